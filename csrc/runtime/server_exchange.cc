#include "runtime/server_exchange.h"

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "runtime/durations.h"

namespace herring::runtime {
namespace {

// A message costs about what so many bytes cost: cut finer, more lanes take longer.
constexpr std::uint32_t kMinShardBytes = 16 << 10;

memory::Buffer map_bounce(memory::Domain& domain, std::size_t bytes) {
  try {
    return domain.allocate(bytes);
  } catch (const Error& error) {
    throw Error(error.status().code(),
                "memory for results of servers: " + error.status().message() +
                    "; lower HERRING_WINDOW or HERRING_CHUNK_BYTES, or set HERRING_FAILOVER=off");
  }
}

}  // namespace

worker::EngineConfig worker_engine_config(const Config& config, const Placement& placement, std::uint32_t rank,
                                          std::uint64_t job_id) {
  worker::EngineConfig result;
  result.self = PeerId{rank};
  result.job_id = job_id;
  for (const LanePlace& lane : placement.lanes) {
    result.lanes.push_back(lane.peer);
    result.lane_weights.push_back(lane.weight);
    result.lane_rails.push_back(lane.rail);
    if (near_worker(config, lane) == rank) result.near_lanes.push_back(lane.peer);
  }
  result.rails = placement.rails;
  result.chunk_bytes = placement.chunk_bytes;
  result.max_eager_bytes = placement.budget.eager_bytes;
  result.eager_window = placement.budget.eager_window;
  result.announce_credits = placement.budget.announce_credits;
  result.min_shard_bytes = std::min(placement.budget.eager_bytes, kMinShardBytes * placement.rails);
  result.lane_grace = dead_after(config);
  result.sealed_sends = config.checksum == Toggle::kOn;
  result.failover = placement.failover;
  // Two windows: while one's chunks are summed and come back the next one's are pushed.
  for (const LanePlace& lane : placement.lanes) {
    result.lane_slots.push_back(2 * lane.max_window);
  }
  return result;
}

PumpOptions worker_pump_options(const Config& config, const Placement& placement, std::uint32_t rank, PumpLinks links) {
  PumpOptions pump;
  // What lanes may send at the same time: a grant for each chunk in flight, credits, errors.
  pump.control_receives = placement.budget.worker.control;
  for (const LanePlace& lane : placement.lanes) {
    if (near_worker(config, lane) != rank) continue;
    const std::size_t of_lane = lane.max_window + placement.budget.from_lane;
    pump.control_receives -= of_lane;
    pump.near.push_back({lane.peer, of_lane});
  }
  pump.max_body_bytes = 2048;
  pump.links = std::move(links);
  return pump;
}

ServerExchange::ServerExchange(ServerExchangeOptions options)
    : options_(std::move(options)),
      memory_(options_.endpoint->memory()),
      config_(worker_engine_config(options_.config, *options_.placement, options_.rank, options_.job_id)) {
  if (config_.failover) {
    bounce_ = map_bounce(*options_.memory, worker::bounce_bytes(config_));
    config_.bounce = bounce_.bytes();
  }
  engine_ = std::make_unique<worker::Engine>(config_);
  pump_ = std::make_unique<Pump<worker::Engine>>(
      *engine_, *options_.endpoint, worker_pump_options(options_.config, *options_.placement, options_.rank, links()),
      no_reduction, [this](const CompleteAction& action) { completions_.push_back(action); });
}

/// Lanes of this process need no link.
PumpLinks ServerExchange::links() {
  PumpLinks links;
  links.self = PeerId{options_.rank};
  links.job_id = options_.job_id;
  links.watch = {dead_after(options_.config), true};
  for (const LanePlace& lane : options_.placement->lanes) {
    if (!lane.embedded || lane.owner != options_.rank) links.peers.push_back(lane.peer);
  }
  links.on_unreachable = [this](const Unreachable& found) { report(found); };
  return links;
}

/// A process is as reachable as its worst lane.
void ServerExchange::report(const Unreachable& found) const {
  const Placement& placement = *options_.placement;
  std::set<std::uint32_t> all;
  std::set<std::uint32_t> silent;
  for (const LanePlace& lane : placement.lanes) {
    const bool is_gone = !lane.embedded && lost_servers_.contains(lane.owner);
    if (is_gone || (lane.embedded && lane.owner == options_.rank)) continue;
    const std::uint32_t member = lane.embedded ? lane.owner : placement.workers + lane.owner;
    all.insert(member);
    if (std::find(found.peers.begin(), found.peers.end(), lane.peer) != found.peers.end()) silent.insert(member);
  }
  const std::vector<std::uint32_t> members(silent.begin(), silent.end());
  options_.on_unreachable(members, static_cast<std::uint32_t>(all.size()), found);
}

void ServerExchange::submit(Instant now, const worker::Operation& operation) {
  engine_->submit(now, operation);
  pump_->flush(now);
}

void ServerExchange::abort(Instant now, const worker::Operation& operation, const Status& why) {
  engine_->abort(now, operation, why);
}

void ServerExchange::refuse(Instant now, const worker::Operation& operation, const Status& why) {
  engine_->abort(now, operation, why);
  pump_->flush(now);
  completions_.push_back({operation.key, why});
}

void ServerExchange::flush(Instant now) {
  if (pump_) pump_->flush(now);
}

bool ServerExchange::step(Instant now) { return pump_ && pump_->step(now); }

void ServerExchange::tick(Instant now) {
  if (!engine_ || now < engine_->next_deadline()) return;
  engine_->on_tick(now);
  pump_->flush(now);
}

Instant ServerExchange::next_deadline() const {
  return engine_ ? std::min(engine_->next_deadline(), pump_->next_deadline()) : Instant::max();
}

bool ServerExchange::next_completion(CompleteAction& action) {
  if (completions_.empty()) return false;
  action = std::move(completions_.front());
  completions_.pop_front();
  return true;
}

bool ServerExchange::lose_server(Instant now, std::uint32_t server, const std::string& why) {
  if (!engine_) return false;
  const std::vector<LanePlace>& lanes = options_.placement->lanes;
  lost_servers_.insert(server);
  const bool any_left = std::ranges::any_of(
      lanes, [this](const LanePlace& lane) { return lane.embedded || !lost_servers_.contains(lane.owner); });
  if (!any_left) return false;
  for (const LanePlace& lane : lanes) {
    if (lane.embedded || lane.owner != server) continue;
    options_.endpoint->remove_peer(lane.peer);
    pump_->forget_peer(lane.peer);
    engine_->on_peer_lost(now, lane.peer, why);
  }
  pump_->flush(now);
  return true;
}

void ServerExchange::release(std::span<const std::byte> memory, memory::Hold hold, std::shared_ptr<const void> owner) {
  if (!hold || lost_servers_.empty() || !pump_ || !pump_->uses(memory)) return;
  hold.outlive_memory();
  lingering_.push_back({memory, std::move(owner), std::move(hold)});
}

void ServerExchange::end_holds() {
  if (lingering_.empty()) return;
  std::erase_if(lingering_, [this](const auto& entry) { return !pump_->uses(entry.memory); });
}

void ServerExchange::close() {
  // The pump polls as it goes, so registrations follow it, when the endpoint uses no memory any more.
  pump_.reset();
  if (options_.endpoint) options_.endpoint->shut_down();
  options_.endpoint.reset();
  lingering_.clear();
  engine_.reset();
  completions_.clear();
}

void ServerExchange::count(RuntimeStats& stats, std::vector<PeerTraffic>& lanes) const {
  if (!engine_) return;
  const worker::EngineStats& network = engine_->stats();
  stats.bytes_to_servers = network.bytes_sent;
  stats.bytes_from_servers = network.bytes_received;
  stats.announces = network.announces;
  stats.came_last = network.came_last;
  stats.late_us = network.late_us;
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    const auto traffic = pump_->traffic(config_.lanes[lane]);
    lanes[lane] = {traffic.bytes_sent, traffic.bytes_received, traffic.messages};
  }
}

}  // namespace herring::runtime
