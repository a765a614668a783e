#include "runtime/job_needs.h"

#include <algorithm>
#include <string>
#include <vector>

#include "control/doorway.h"
#include "core/descriptors.h"
#include "core/status.h"
#include "core/text.h"
#include "fusion_buffer/shard_plan.h"
#include "runtime/checked_endpoint.h"
#include "runtime/messages.h"
#include "runtime/server_exchange.h"
#include "server/engine.h"

namespace herring::runtime {
namespace {

void check(const JobShape& shape) {
  const auto refuse = [](const std::string& what) { throw Error(Code::kInvalidArgument, what); };
  if (shape.workers == 0 || shape.hosts == 0) refuse("a job has at least one worker on one host");
  if (shape.hosts > shape.workers) {
    refuse(counted(shape.workers, "worker") + " on " + counted(shape.hosts, "host") +
           ": some of these hosts would have no worker; use at most " + std::to_string(shape.workers) + " hosts");
  }
  if (shape.server_hosts > shape.servers) {
    refuse(counted(shape.servers, "server process", "server processes") + " on " + counted(shape.server_hosts, "host") +
           ": some of these hosts would have no server; use at most " + std::to_string(shape.servers) +
           " hosts for servers");
  }
}

/// `count` members on `hosts` hosts, whose names are "worker host 0", ...
std::vector<Member> members(Role role, std::uint32_t count, std::uint32_t hosts, const std::string& host) {
  std::vector<Member> result;
  for (std::uint32_t number = 0; number < hosts; ++number) {
    const IndexRange range = split_evenly(count, hosts, number);
    const std::string name = host + " " + std::to_string(number);
    for (std::uint32_t rank = range.first; rank < range.first + range.count; ++rank) {
      result.push_back({role, rank, 1, name, name});
    }
  }
  return result;
}

std::uint64_t checked_bytes(const Config& config, const EndpointBudget& endpoint) {
  return config.checksum == Toggle::kOn ? endpoint.receives() * CheckedEndpoint::kPostBytes : 0;
}

void add_lane(ProcessNeeds& needs, const Placement& placement, const LanePlace& lane) {
  const std::uint64_t bytes = placement.budget.lane_bytes[lane.peer.value - placement.workers];
  ++needs.lanes;
  needs.connections += placement.workers - (lane.embedded ? 1 : 0);
  needs.bytes += bytes;
  needs.registered_bytes += bytes;
  needs.record_bytes += server::record_bound(placement.budget.record_bytes);
}

/// Of rank 0: where some workers have a lane, it has one.
ProcessNeeds worker_needs(const Config& config, const Placement& placement) {
  ProcessNeeds needs;
  needs.connections = 1;  // To the hub.
  const Budget& budget = placement.budget;
  if (!placement.lanes.empty()) {
    const std::uint64_t body = worker_pump_options(config, placement, 0, {}).max_body_bytes + wire::kHeaderBytes;
    const std::uint64_t bounce = worker::bounce_bytes(worker_engine_config(config, placement, 0, 0));
    needs.registered_bytes = budget.worker.control * body + bounce;
    needs.bytes =
        needs.registered_bytes + checked_bytes(config, budget.worker) + checked_bytes(config, budget.messages);
    needs.connections += placement.workers - 1;  // For messages.
  }
  needs.bytes += message_memory_bound(config, placement, 0);
  for (const LanePlace& lane : placement.lanes) {
    if (lane.embedded && lane.owner == 0) {
      add_lane(needs, placement, lane);
    } else {
      ++needs.connections;
    }
  }
  needs.descriptors = kOtherDescriptors + budget.worker_descriptors + (needs.lanes > 0 ? budget.server_descriptors : 0);
  return needs;
}

ProcessNeeds server_needs(const Placement& placement) {
  ProcessNeeds needs;
  needs.connections = 1;
  for (const LanePlace& lane : placement.lanes) {
    if (!lane.embedded && lane.owner == 0) add_lane(needs, placement, lane);
  }
  needs.descriptors = kOtherDescriptors + placement.budget.server_descriptors;
  return needs;
}

Budget budget_of_two(const Config& config) {
  BudgetInput input;
  input.workers = input.hosts = 2;
  input.lane_windows = {config.window};
  input.chunk_bytes = config.chunk_bytes;
  input.eager_bytes = config.eager_bytes;
  return make_budget(input);
}

}  // namespace

JobNeeds job_needs(Config config, const JobShape& shape) {
  check(shape);
  config.servers = shape.servers;
  const bool are_dedicated = shape.server_hosts > 0;
  const std::vector<Member> workers = members(Role::kWorker, shape.workers, shape.hosts, "worker host");
  const std::vector<Member> servers =
      are_dedicated ? members(Role::kServer, shape.servers, shape.server_hosts, "server host")
                    : members(Role::kServer, shape.servers, std::min(shape.hosts, shape.servers), "worker host");
  JobNeeds needs;
  needs.placement = make_placement(config, workers, servers);
  needs.of_two = budget_of_two(config);
  needs.worker = worker_needs(config, needs.placement);
  if (shape.servers > 0) needs.server = server_needs(needs.placement);
  needs.hub_connections = workers.size() + servers.size();
  needs.hub_descriptors = control::door_descriptors(needs.hub_connections);
  return needs;
}

}  // namespace herring::runtime
