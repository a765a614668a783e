#pragma once

#include <span>

#include "core/types.h"

namespace herring::runtime {

/// Blocks until one of the descriptors can be read, the deadline, or a signal: the caller looks again.
void poll_until(Instant deadline, std::span<const int> descriptors);

}  // namespace herring::runtime
