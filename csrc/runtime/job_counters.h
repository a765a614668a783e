#pragma once

#include <vector>

#include "runtime/communicator.h"
#include "runtime/placement.h"
#include "runtime/server_exchange.h"

namespace herring::runtime {

/// What all ranks have counted, brought together. Each function here is a collective operation of all workers, by a
/// name of its own, so that no numbered operation of the caller shifts against those of workers that call it at another
/// point.

/// Communicator::stragglers() from what this rank's lanes have counted.
std::vector<Straggler> gather_stragglers(Communicator& job, const RuntimeStats& own);

/// Communicator::server_counters() from what this rank has exchanged with each lane of `placement`.
std::vector<ServerCounters> gather_server_counters(Communicator& job, const Placement& placement,
                                                   const std::vector<PeerTraffic>& own);

}  // namespace herring::runtime
