#include "runtime/device_memory.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "core/text.h"

namespace herring::runtime {
namespace {

std::string why_not_of(const GroupRoute& route) {
  if (route.path == GroupRoute::Path::kAlone) return "the group has one rank";
  if (route.local_members.size() > 1) {
    return "the group has " + std::to_string(route.local_members.size()) +
           " ranks on this host, which reduce among themselves first. GPUDirect takes one rank of a group on each host";
  }
  if (route.path != GroupRoute::Path::kNetwork) {
    return "the group has several ranks on another host, so all hosts reduce among their ranks first. GPUDirect takes "
           "one rank of a group on each host";
  }
  return {};
}

}  // namespace

std::string why_no_device_memory(const Config& config, const Placement& placement, const HubClient& hub,
                                 std::uint32_t rank, const Network* network) {
  if (config.gpudirect == Switch::kOff) return "HERRING_GPUDIRECT is off";
  if (config.cuda == Switch::kOff) return "HERRING_CUDA is off";
  if (placement.lanes.empty() || network == nullptr) {
    return "the job has no servers: its ranks share memory. Start at least as many server hosts as worker "
           "hosts (herringrun --servers)";
  }
  const auto embedded = std::ranges::count_if(placement.lanes, &LanePlace::embedded);
  if (embedded > 0) {
    return counted(static_cast<std::uint64_t>(embedded), "server lane") +
           " of the job are embedded in workers, which sum in host memory. Start at least as many server hosts as "
           "worker hosts (herringrun --servers)";
  }
  const std::vector<Member> servers = hub.servers();
  const std::string here = hub.member(rank).host_identity;
  for (const LanePlace& lane : placement.lanes) {
    if (servers[lane.owner].host_identity != here) continue;
    return "server " + std::to_string(lane.owner) + " runs on the host of rank " + std::to_string(rank) +
           ". Start the servers on other hosts";
  }
  if (config.checksum == Toggle::kOn) return "HERRING_CHECKSUM is on, so the host reads all data";
  if (placement.backup_workers > 0) return "HERRING_BACKUP_WORKERS is not 0";
  const std::string no_devices = network->no_devices();
  return no_devices.empty() ? ""
                            : no_devices + ". Rank " + std::to_string(rank) +
                                  "'s host needs a card of EFA or verbs that reaches GPU memory";
}

DeviceMemoryUse device_memory_use(const std::string& why_not, const Group* group, const Placement& placement) {
  std::string why = group == nullptr ? "the group does not exist on this rank" : why_not;
  if (why.empty()) why = why_not_of(group->route);
  return {why.empty() ? Status::ok() : Status(Code::kUnavailable, why), placement.failover};
}

}  // namespace herring::runtime
