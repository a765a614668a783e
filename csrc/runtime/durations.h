#pragma once

#include "core/clock.h"
#include "core/config.h"
#include "core/types.h"

/// Settings in seconds, as times.
namespace herring::runtime {

inline Duration dead_after(const Config& config) { return duration_of(config.dead_after_s); }
inline Duration stall_warning(const Config& config) {
  return config.stall_warning_s > 0 ? duration_of(config.stall_warning_s) : Duration::max();
}

}  // namespace herring::runtime
