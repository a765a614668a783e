#include "runtime/placement.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "core/status.h"
#include "fusion_buffer/shard_plan.h"

namespace herring::runtime {
namespace {

/// `like`: weight of the server, who has it, its rail.
void add_server(Placement& placement, const Config& config, LanePlace like, std::string place) {
  like.server = placement.servers++;
  like.weight /= config.lanes;
  placement.server_places.push_back(std::move(place));
  for (std::uint32_t lane = 0; lane < config.lanes; ++lane) {
    like.peer = PeerId{placement.workers + static_cast<std::uint32_t>(placement.lanes.size())};
    placement.lanes.push_back(like);
  }
}

/// A server in each of the first Placement::rails workers of every host, which share the host's weight.
void add_embedded(Placement& placement, const Config& config, std::span<const Member> workers, double weight) {
  // One rail after the other: a part that goes to a few lanes goes to several hosts.
  std::vector<std::vector<std::uint32_t>> workers_of(placement.rails);
  std::vector<std::uint32_t> served(placement.hosts, 0);
  for (std::uint32_t worker = 0; worker < workers.size(); ++worker) {
    const std::uint32_t rail = served[placement.host_of[worker]]++;
    if (rail < placement.rails) workers_of[rail].push_back(worker);
  }
  for (std::uint32_t rail = 0; rail < placement.rails; ++rail) {
    for (const std::uint32_t worker : workers_of[rail]) {
      LanePlace like;
      like.weight = weight / placement.rails;
      like.embedded = true;
      like.owner = worker;
      like.rail = rail;
      add_server(placement, config, like, "embedded in " + to_string(workers[worker]));
    }
  }
}

/// How many workers of each host have a server, where there are no server processes and a host's workers contribute
/// together: a number that divides the workers of every host, so that all have the same share, and gives no more lanes
/// than every worker should be connected to. What a worker has for the server inside it crosses no network, and the
/// sums have more cores.
std::uint32_t rails_of(const Placement& placement, const Config& config) {
  constexpr std::uint32_t kMostLanes = 128;
  if (config.intra_node == Switch::kOff || config.backup_workers > 0) return 1;
  std::vector<std::uint32_t> workers_of(placement.hosts, 0);
  for (const std::uint32_t host : placement.host_of) ++workers_of[host];
  std::uint32_t common = 0;
  for (const std::uint32_t workers : workers_of) common = std::gcd(common, workers);
  std::uint32_t rails = std::clamp(kMostLanes / (placement.hosts * config.lanes), 1u, common);
  while (common % rails != 0) --rails;
  return rails;
}

void add_processes(Placement& placement, const Config& config, std::span<const Member> workers,
                   std::span<const Member> servers) {
  std::set<std::string> worker_hosts;
  for (const Member& worker : workers) worker_hosts.insert(worker.host_identity);
  std::map<std::string, std::uint32_t> servers_on;
  for (const Member& server : servers) ++servers_on[server.host_identity];
  const bool all_dedicated = std::none_of(servers.begin(), servers.end(), [&](const Member& server) {
    return worker_hosts.contains(server.host_identity);
  });
  const auto dedicated_hosts = static_cast<std::uint32_t>(servers_on.size());
  PlacementWeights weights{1.0, 0.0};
  if (all_dedicated) weights = placement_weights(placement.hosts, dedicated_hosts);
  for (std::uint32_t rank = 0; rank < servers.size(); ++rank) {
    const double share = all_dedicated ? weights.dedicated / servers_on[servers[rank].host_identity] : 1.0;
    LanePlace like;
    like.weight = share;
    like.owner = rank;
    add_server(placement, config, like, to_string(servers[rank]));
  }
  if (weights.own_host > 0) add_embedded(placement, config, workers, weights.own_host);
}

/// What a worker has in flight in all is settled: the lanes share it by weight, so that each moves as fast as its share
/// needs, and in chunks that are small beside it. With more in flight some lanes' data runs ahead in the network's
/// queues, and sums wait for what it holds up.
void set_windows(Placement& placement, const Config& config) {
  constexpr double kChunksOfLargestLane = 4;
  // How many times its share a lane's window becomes where chunks go quickly. Among many processes a lane waits longer
  // for each of them than for the network. Between two, more in flight only leaves the caches.
  const double most_shares = placement.lanes.size() > 2 ? 12 : 6;
  constexpr std::uint32_t kLeastGrowth = 3;  // Also where its share is less than the chunk that it gets.
  constexpr std::uint32_t kMinChunkBytes = 32 << 10;
  constexpr std::uint32_t kChunkAlignment = 64;
  placement.chunk_bytes = config.chunk_bytes;
  if (placement.lanes.empty()) return;
  placement.are_lanes_apart = std::ranges::none_of(placement.lanes, &LanePlace::embedded);
  double total = 0;
  double largest = 0;
  for (const LanePlace& lane : placement.lanes) {
    total += lane.weight;
    largest = std::max(largest, lane.weight * placement.rails);
  }
  const double flight = static_cast<double>(config.chunk_bytes) * config.window;
  const auto wanted = std::bit_floor(static_cast<std::uint64_t>(flight * largest / total / kChunksOfLargestLane));
  const std::uint32_t least = std::min(kMinChunkBytes, config.chunk_bytes);
  if (wanted < config.chunk_bytes) {
    const std::uint64_t chunk = std::max<std::uint64_t>(wanted, least);
    placement.chunk_bytes =
        static_cast<std::uint32_t>((chunk + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment);
  }
  for (LanePlace& lane : placement.lanes) {
    // A worker has nothing for the lanes of other rails than its own.
    const double chunks = flight * lane.weight * placement.rails / total / placement.chunk_bytes;
    lane.window = std::clamp(static_cast<std::uint32_t>(std::lround(chunks)), 1u, config.window);
    lane.max_window =
        std::max(lane.window * kLeastGrowth, static_cast<std::uint32_t>(std::lround(chunks * most_shares)));
  }
}

/// Every process computes it, so all have the same sizes, or all refuse.
void keep_within_budget(Placement& placement, const Config& config) {
  BudgetInput input;
  input.workers = placement.workers;
  input.hosts = placement.hosts;
  input.rails = placement.rails;
  for (const LanePlace& lane : placement.lanes) input.lane_windows.push_back(lane.max_window);
  input.lanes_of_server = config.lanes;
  input.chunk_bytes = placement.chunk_bytes;
  // A lane inside a worker takes part in what the worker computes: there a round trip before the data is the larger
  // part of what a shard of this size takes. Between two hosts one hop is as fast.
  const bool are_embedded = std::ranges::all_of(placement.lanes, &LanePlace::embedded);
  input.eager_bytes = are_embedded && placement.hosts > 2 ? config.embedded_eager_bytes : config.eager_bytes;
  input.failover = placement.failover;
  input.checksum = config.checksum == Toggle::kOn;
  input.backup_workers = placement.backup_workers;
  input.backup_bytes = config.backup_bytes;
  placement.budget = make_budget(input);
  for (std::size_t i = 0; i < placement.lanes.size(); ++i) {
    LanePlace& lane = placement.lanes[i];
    lane.max_window = placement.budget.lane_windows[i];
    lane.window = std::min(lane.window, lane.max_window);
  }
}

/// Up to which size operations go to the lanes of all hosts at once. Each host then sends n - 1 messages instead of
/// one, and (n - 1)(n - 2) / n of the data more than in two hops: a message's own cost is worth a few KB. Two hosts
/// send no more than in two hops, but each computes the whole sum, which takes longer than a hop where it is large.
std::uint64_t one_hop_bytes(const Placement& placement, const Config& config) {
  constexpr std::uint64_t kMoreOnLink = 4 << 10;
  const std::uint64_t hosts = placement.hosts;
  const bool is_one_each = placement.lanes.size() == hosts * placement.rails;
  const bool are_near = std::ranges::all_of(
      placement.lanes, [&](const LanePlace& lane) { return near_worker(config, lane).has_value(); });
  if (hosts < 2 || hosts > config.one_hop_hosts || !is_one_each || !are_near || placement.failover ||
      placement.backup_workers > 0) {
    return 0;
  }
  const std::uint64_t most = std::min(placement.budget.eager_bytes, placement.chunk_bytes);
  return hosts == 2 ? std::max(most, config.one_hop_bytes)
                    : std::min(most, kMoreOnLink * hosts / ((hosts - 1) * (hosts - 2)));
}

}  // namespace

std::vector<std::uint32_t> Placement::neighbours(std::uint32_t worker) const {
  std::vector<std::uint32_t> result;
  for (std::uint32_t other = 0; other < workers; ++other) {
    if (host_of[other] == host_of[worker]) result.push_back(other);
  }
  return result;
}

std::optional<std::uint32_t> near_worker(const Config& config, const LanePlace& lane) {
  if (!lane.embedded || config.intra_node == Switch::kOff) return std::nullopt;
  return lane.owner;
}

std::string peer_name(std::uint32_t workers, PeerId peer) {
  return peer.value < workers ? "rank " + std::to_string(peer.value)
                              : "server lane " + std::to_string(peer.value - workers);
}

Placement make_placement(const Config& config, std::span<const Member> workers, std::span<const Member> servers) {
  if (servers.size() != config.servers) {
    throw Error(Code::kInvalidArgument, "HERRING_SERVERS is " + std::to_string(config.servers) + " here, but " +
                                            std::to_string(servers.size()) + " servers joined the job");
  }
  if (config.backup_workers > 0 && config.backup_workers >= workers.size()) {
    throw Error(Code::kInvalidArgument, "HERRING_BACKUP_WORKERS is " + std::to_string(config.backup_workers) +
                                            ", but the job has " + std::to_string(workers.size()) +
                                            " workers: it must be less than the number of workers");
  }
  Placement placement;
  placement.backup_workers = config.backup_workers;
  placement.workers = static_cast<std::uint32_t>(workers.size());
  std::map<std::string, std::uint32_t> number;
  for (const Member& worker : workers) {
    const auto next = static_cast<std::uint32_t>(number.size());
    placement.host_of.push_back(number.try_emplace(worker.host_identity, next).first->second);
  }
  placement.hosts = static_cast<std::uint32_t>(number.size());
  if (!servers.empty()) {
    add_processes(placement, config, workers, servers);
  } else if (placement.hosts > 1) {
    placement.rails = rails_of(placement, config);
    add_embedded(placement, config, workers, 1.0);
  } else if ((config.intra_node == Switch::kOff || config.backup_workers > 0) && placement.workers > 1) {
    add_embedded(placement, config, workers, 1.0);
  }
  // On one host with servers asked for, a local reduction would leave the servers a single stream to hand back: there
  // the servers do the summing, unless the user says otherwise.
  placement.host_first = config.intra_node == Switch::kOn ||
                         (config.intra_node == Switch::kAuto && (placement.hosts > 1 || placement.servers == 0));
  set_windows(placement, config);
  const bool has_process =
      std::any_of(placement.lanes.begin(), placement.lanes.end(), [](const LanePlace& lane) { return !lane.embedded; });
  const bool can_move = has_process && placement.servers > 1 && placement.workers > 1;
  if (config.failover == Switch::kOn && !can_move) {
    throw Error(
        Code::kInvalidArgument,
        "HERRING_FAILOVER is on, but no server process of this job could be replaced: that takes two workers, and a "
        "server process and another server. Start more, or set HERRING_FAILOVER=auto");
  }
  placement.failover = can_move && config.failover != Switch::kOff && config.backup_workers == 0;
  keep_within_budget(placement, config);
  placement.one_hop_bytes = one_hop_bytes(placement, config);
  return placement;
}

namespace {

/// GroupRoute::rails
std::uint64_t rails_within(const Placement& placement, std::span<const std::uint32_t> ranks,
                           std::span<const std::uint32_t> hosts) {
  if (placement.rails == 1) return worker::kEveryRail;
  std::uint64_t all = 0;
  std::uint64_t lacking = 0;
  for (const LanePlace& lane : placement.lanes) {
    const std::uint64_t rail = std::uint64_t{1} << lane.rail;
    all |= rail;
    const bool is_near = std::ranges::find(hosts, placement.host_of[lane.owner]) != hosts.end();
    if (is_near && std::ranges::find(ranks, lane.owner) == ranks.end()) lacking |= rail;
  }
  const std::uint64_t served = all & ~lacking;
  return served == 0 || served == all ? worker::kEveryRail : served;
}

/// GroupRoute::one_hop_bytes. Every host is a contributor, and the process of its lane of rail r is its owner r. What
/// is small has no other owners; what is larger has one of it where ranks of a host have no lane.
std::uint64_t one_hop_bytes_of(const Placement& placement, std::span<const std::uint32_t> ranks,
                               std::size_t contributors) {
  if (placement.one_hop_bytes == 0 || contributors != placement.hosts) return 0;
  std::vector<std::vector<std::uint32_t>> owners(placement.hosts);
  for (const std::uint32_t rank : ranks) owners[placement.host_of[rank]].push_back(rank);
  const bool are_near = std::ranges::all_of(placement.lanes, [&](const LanePlace& lane) {
    const std::vector<std::uint32_t>& here = owners[placement.host_of[lane.owner]];
    return lane.rail < here.size() && here[lane.rail] == lane.owner;
  });
  if (!are_near) return 0;
  const bool are_all = std::ranges::all_of(owners, [&](const auto& here) { return here.size() == placement.rails; });
  return are_all ? placement.one_hop_bytes
                 : std::min<std::uint64_t>(placement.one_hop_bytes, placement.budget.eager_bytes);
}

}  // namespace

GroupRoute make_route(const Placement& placement, const Config& config, std::uint32_t rank,
                      std::span<const std::uint32_t> ranks) {
  GroupRoute route;
  route.ranks.assign(ranks.begin(), ranks.end());
  std::set<std::uint32_t> seen;
  bool member = false;
  std::vector<std::uint32_t> hosts;
  const std::vector<std::uint32_t> neighbours = placement.neighbours(rank);
  for (std::uint32_t i = 0; i < ranks.size(); ++i) {
    const std::uint32_t world = ranks[i];
    if (world >= placement.workers) {
      throw Error(Code::kInvalidArgument, "a group names rank " + std::to_string(world) +
                                              ", but the job has ranks 0 to " + std::to_string(placement.workers - 1));
    }
    if (!seen.insert(world).second) {
      throw Error(Code::kInvalidArgument, "a group names rank " + std::to_string(world) + " twice");
    }
    if (world == rank) {
      route.index = i;
      route.local_index = static_cast<std::uint32_t>(route.local_members.size());
      member = true;
    }
    const std::uint32_t host = placement.host_of[world];
    if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) hosts.push_back(host);
    const auto neighbour = std::find(neighbours.begin(), neighbours.end(), world);
    if (neighbour == neighbours.end()) continue;
    route.local_members.push_back(static_cast<std::uint32_t>(neighbour - neighbours.begin()));
    route.local_world.push_back(world);
  }
  if (!member) {
    throw Error(Code::kInvalidArgument, "rank " + std::to_string(rank) + " is not in the group it adds");
  }
  route.local_span = wire::span_of(route.local_world).value_or(wire::RankSpan{rank});
  const auto own_host = std::find(hosts.begin(), hosts.end(), placement.host_of[rank]);
  route.host_index = static_cast<std::uint32_t>(own_host - hosts.begin());
  route.host_count = static_cast<std::uint32_t>(hosts.size());
  route.rails = rails_within(placement, ranks, hosts);
  const bool shared_memory = config.intra_node != Switch::kOff && placement.host_first;
  if (ranks.size() == 1) {
    route.path = GroupRoute::Path::kAlone;
  } else if (shared_memory && hosts.size() == 1 && (placement.hosts > 1 || placement.lanes.empty())) {
    route.path = GroupRoute::Path::kLocal;
  } else if (shared_memory && placement.hosts < placement.workers) {
    route.path = GroupRoute::Path::kHostFirst;
  } else {
    route.path = GroupRoute::Path::kNetwork;
  }
  const std::size_t contributors = route.path == GroupRoute::Path::kHostFirst ? hosts.size() : ranks.size();
  route.one_hop_bytes = one_hop_bytes_of(placement, ranks, contributors);
  return route;
}

}  // namespace herring::runtime
