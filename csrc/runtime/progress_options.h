#pragma once

#include <chrono>

#include "core/clock.h"
#include "core/config.h"
#include "core/types.h"
#include "runtime/pump.h"
#include "worker/engine.h"

namespace herring::runtime {

struct ProgressOptions;

inline Duration dead_after(const Config& config) { return duration_of(config.dead_after_s); }
inline Duration stall_warning(const Config& config) {
  return config.stall_warning_s > 0 ? duration_of(config.stall_warning_s) : Duration::max();
}

/// What the placement and the settings make of a worker's engine; without memory for results.
worker::EngineConfig make_network_config(const ProgressOptions& options);

/// And of its pump.
PumpOptions make_pump_options(const ProgressOptions& options, PumpLinks links);

}  // namespace herring::runtime
