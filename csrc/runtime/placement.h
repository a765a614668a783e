#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/types.h"
#include "runtime/budget.h"
#include "runtime/control.h"
#include "wire/header.h"
#include "worker/engine.h"

namespace herring::runtime {

/// One lane of one server, in plan order.
struct LanePlace {
  PeerId peer;                   ///< workers + position in Placement::lanes
  std::uint32_t server = 0;      ///< Position among the servers of the plan.
  double weight = 0;             ///< Share of every part, relative.
  std::uint32_t window = 0;      ///< Chunks of one worker in flight to this lane, at first,
  std::uint32_t max_window = 0;  ///< and at most, where they go quickly (server/adaptive_window.h).
  bool embedded = false;         ///< In worker `owner`'s process; else in server process `owner`.
  std::uint32_t owner = 0;
  std::uint32_t rail = 0;  ///< worker::EngineConfig::lane_rails; below Placement::rails.
};

/// Who runs where and which lanes the shard plan has: a pure function of the members and the settings, the same on
/// every process.
struct Placement {
  std::uint32_t workers = 0;
  std::uint32_t servers = 0;           ///< In the plan; 0: shared memory is the whole job.
  std::vector<std::uint32_t> host_of;  ///< Host number of each worker, numbered by first appearance.
  std::uint32_t hosts = 0;
  bool host_first = false;  ///< The ranks of a host reduce among themselves before the network.
  std::vector<LanePlace> lanes;
  bool are_lanes_apart = false;      ///< None of them is embedded.
  std::uint32_t rails = 1;           ///< So many workers of each host have a server in them, where they all are there.
  bool failover = false;             ///< A server process that dies has others to move its work to, and may.
  std::uint32_t backup_workers = 0;  ///< Config::backup_workers; then there are lanes, where there are two workers.
  std::uint32_t chunk_bytes = 0;     ///< Of this job: at most Config::chunk_bytes, less where there are many lanes.
  Budget budget;                     ///< What fits: windows above are already within it.
  std::uint64_t one_hop_bytes = 0;   ///< Of a group that all ranks are in; GroupRoute, same name.
  std::vector<std::string> server_places;  ///< "server 0 (pid 7 on b)", "embedded in worker 3 (pid 8 on a)", by server.

  /// Workers on the same host as `worker`, by rank.
  std::vector<std::uint32_t> neighbours(std::uint32_t worker) const;
};

/// The worker whose process the lane is in and that reaches it there; none where its messages go over the network as
/// everybody's do.
std::optional<std::uint32_t> near_worker(const Config& config, const LanePlace& lane);

/// "rank 1" or "server lane 0": what people read of an endpoint.
std::string peer_name(std::uint32_t workers, PeerId peer);

/// Throws Error(kInvalidArgument) for settings that contradict the members, and for a job that is too large.
Placement make_placement(const Config& config, std::span<const Member> workers, std::span<const Member> servers);

/// How a group of workers goes about its operations.
struct GroupRoute {
  enum class Path : std::uint8_t {
    kAlone,      ///< One rank: nothing to exchange.
    kLocal,      ///< All on this host: shared memory.
    kHostFirst,  ///< Shared memory inside each host, then servers between hosts.
    kNetwork,    ///< Every rank talks to the servers itself.
  };
  Path path = Path::kAlone;
  std::vector<std::uint32_t> ranks;          ///< World ranks in group order.
  std::uint32_t index = 0;                   ///< This rank's position in `ranks`.
  std::vector<std::uint32_t> local_members;  ///< Local ranks of the members on this host, in group order.
  std::vector<std::uint32_t> local_world;    ///< Their world ranks.
  wire::RankSpan local_span;                 ///< The same; this rank alone where they fit no span.
  std::uint32_t local_index = 0;             ///< This rank's position in `local_members`.
  std::uint32_t host_index = 0;              ///< Position of this host among the group's hosts.
  std::uint32_t host_count = 1;
  /// worker::Operation, same name: the rails whose workers are all in the group, on all its hosts; where there is none,
  /// all rails.
  std::uint64_t rails = worker::kEveryRail;
  std::uint64_t one_hop_bytes = 0;  ///< worker::Operation, same name.
};

/// Throws Error(kInvalidArgument) where `rank` is not in `ranks`, or one of them is out of range or named twice.
GroupRoute make_route(const Placement& placement, const Config& config, std::uint32_t rank,
                      std::span<const std::uint32_t> ranks);

}  // namespace herring::runtime
