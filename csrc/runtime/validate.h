#pragma once

#include <cstdint>

#include "core/config.h"
#include "core/status.h"
#include "runtime/placement.h"
#include "runtime/runtime.h"
#include "server/reduce.h"

namespace herring::runtime {

/// Whether a request makes sense on this rank alone (what ranks disagree about is found when they meet).
Status validate(const Request& request, const GroupRoute& route);

/// Config::arena_bytes, or half of this machine's memory where it is 0.
std::uint64_t effective_arena_bytes(const Config& config);

/// The instruction set that reductions use. Throws Error(kUnavailable) for one that this processor lacks.
server::Isa reduction_isa(const Config& config);

}  // namespace herring::runtime
