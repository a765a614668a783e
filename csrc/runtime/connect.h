#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/types.h"
#include "memory/domain.h"
#include "runtime/checked_endpoint.h"
#include "runtime/control.h"
#include "runtime/lane.h"
#include "runtime/network.h"
#include "runtime/placement.h"
#include "runtime/runtime.h"
#include "transport/transport.h"

namespace herring::runtime {

/// What one process opens for the placement, before the addresses are exchanged. The memory domain outlives it.
struct Connections {
  std::unique_ptr<Network> network;                    ///< Null where the placement has no lanes.
  std::unique_ptr<transport::Endpoint> endpoint;       ///< Workers only: to the lanes.
  std::unique_ptr<transport::Endpoint> peer_endpoint;  ///< Workers only: to the other workers, PeerId{rank}.
  std::vector<std::unique_ptr<Lane>> lanes;            ///< This process's own lanes, in plan order; open.
  std::shared_ptr<DamageCounters> damage = std::make_shared<DamageCounters>();                   ///< Of all endpoints.
  std::shared_ptr<tcp::StrangerCounters> strangers = std::make_shared<tcp::StrangerCounters>();  ///< Likewise.
};

/// Opens endpoints, exchanges their addresses and the settings that must agree over the hub, and makes everybody known
/// to everybody; whoever calls it drives the lanes from then on. Every member of the job calls it at the same time.
/// Throws Error: kUnavailable where the placement needs a network and there is none, kMismatch naming who has other
/// settings.
Connections connect(const Config& config, const Placement& placement, HubClient& hub, Role role, std::uint32_t rank,
                    std::span<const std::string> fabric_search, Instant deadline, memory::Domain& domain,
                    const EndpointWrapper& wrap = {});

/// "shared memory inside each host, then tcp (libfabric 2.5, eth0) through 4 servers (4 embedded in workers)". No
/// endpoint: no lanes.
std::string describe(const Config& config, const Placement& placement, bool has_arena,
                     const transport::Endpoint* endpoint);

}  // namespace herring::runtime
