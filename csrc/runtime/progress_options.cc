#include "runtime/progress_options.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "runtime/progress.h"

namespace herring::runtime {
namespace {

// A message costs about what so many bytes cost: cut finer, more lanes take longer.
constexpr std::uint32_t kMinShardBytes = 16 << 10;

}  // namespace

worker::EngineConfig make_network_config(const ProgressOptions& options) {
  const Placement& placement = *options.placement;
  worker::EngineConfig config;
  config.self = PeerId{options.rank};
  config.job_id = options.job_id;
  for (const LanePlace& lane : placement.lanes) {
    config.lanes.push_back(lane.peer);
    config.lane_weights.push_back(lane.weight);
    config.lane_rails.push_back(lane.rail);
    if (near_worker(options.config, lane) == options.rank) config.near_lanes.push_back(lane.peer);
  }
  config.rails = placement.rails;
  config.chunk_bytes = placement.chunk_bytes;
  config.max_eager_bytes = placement.budget.eager_bytes;
  config.eager_window = placement.budget.eager_window;
  config.announce_credits = placement.budget.announce_credits;
  config.min_shard_bytes = std::min(placement.budget.eager_bytes, kMinShardBytes * placement.rails);
  config.lane_grace = dead_after(options.config);
  config.sealed_sends = options.config.checksum == Toggle::kOn;
  config.failover = placement.failover;
  // Two windows: while one's chunks are summed and come back the next one's are pushed.
  for (const LanePlace& lane : placement.lanes) {
    config.lane_slots.push_back(2 * lane.max_window);
  }
  return config;
}

PumpOptions make_pump_options(const ProgressOptions& options, PumpLinks links) {
  const Budget& budget = options.placement->budget;
  PumpOptions pump;
  // What lanes may send at the same time: a grant for each chunk in flight, credits, errors.
  pump.control_receives = budget.worker.control;
  for (const LanePlace& lane : options.placement->lanes) {
    if (near_worker(options.config, lane) != options.rank) continue;
    const std::size_t of_lane = lane.max_window + budget.from_lane;
    pump.control_receives -= of_lane;
    pump.near.push_back({lane.peer, of_lane});
  }
  pump.max_body_bytes = 2048;
  pump.links = std::move(links);
  return pump;
}

}  // namespace herring::runtime
