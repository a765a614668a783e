#pragma once

#include <cstdint>
#include <string>

#include "core/config.h"
#include "runtime/communicator.h"
#include "runtime/control.h"
#include "runtime/group.h"
#include "runtime/network.h"
#include "runtime/placement.h"

/// GPUDirect RDMA (docs/adr/0035-gpudirect.md): whether the network card alone touches an operation's memory, so that
/// this may be a device's.
namespace herring::runtime {

/// Why not, whatever the group is; empty: groups decide. `network`: null where the placement has no lanes.
std::string why_no_device_memory(const Config& config, const Placement& placement, const HubClient& hub,
                                 std::uint32_t rank, const Network* network);
/// The same for a group; null: there is none. `why_not`: of why_no_device_memory().
DeviceMemoryUse device_memory_use(const std::string& why_not, const Group* group, const Placement& placement);

}  // namespace herring::runtime
