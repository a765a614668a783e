#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "core/operation.h"
#include "core/seconds_text.h"

namespace herring {

/// The warning of a call that has waited so long for `whom` ("rank 3", "ranks 3, 5"). `least`: the setting, which is
/// said where the wait is not longer by a second.
inline std::string stall_text(const OpDescriptor& descriptor, const OpKey& key, const std::string& whom, Duration least,
                              Duration waited) {
  const Duration whole = std::chrono::floor<std::chrono::seconds>(waited);
  return to_string(descriptor) + " has waited for " + whom + " for " + round_seconds_text(std::max(least, whole)) +
         " (" + to_string(key) + "). Look at what the missing ones are doing";
}

}  // namespace herring
