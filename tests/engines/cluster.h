#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "runtime/checked_endpoint.h"
#include "runtime/process_endpoint.h"
#include "runtime/pump.h"
#include "runtime/routed_endpoint.h"
#include "server/engine.h"
#include "server/reduce.h"
#include "transport/sim.h"
#include "transport/strict_endpoint.h"
#include "worker/engine.h"

/// A whole job in one thread: the real engines and pumps over the simulated network.
namespace herring::testing {

struct ClusterOptions {
  std::uint64_t seed = 1;
  std::uint32_t workers = 2;
  std::uint32_t lanes = 1;
  std::vector<double> weights;  ///< Empty: equal.
  std::uint32_t rails = 1;      ///< Lanes take them in turn; not with failover.
  std::uint32_t chunk_bytes = 1024;
  std::uint32_t window = 4;
  std::uint32_t max_window = 0;     ///< 0: as window.
  bool are_lanes_apart = false;     ///< server::EngineConfig, same name.
  bool is_one_by_one = false;       ///< Operations come when those before are mostly over (random_order()).
  bool near = false;                ///< Worker and lane of a number share a process; not with failover.
  std::uint64_t one_hop_bytes = 0;  ///< worker::Operation, same name; near, and as many lanes as workers.
  std::uint32_t max_run = 1;        ///< Taken whenever there is room, however slow the links are.
  std::uint32_t slots = 0;          ///< Of each lane; 0: workers * window.
  std::uint32_t max_eager_bytes = 0;
  std::uint32_t eager_window = 4;
  std::uint32_t announce_credits = 8;
  std::uint32_t lane_receives = 0;    ///< Control receives of a lane for each worker; 0: as many as could be used.
  std::uint32_t worker_receives = 0;  ///< And of a worker in all.
  std::size_t body_bytes = 0;         ///< Of a control message at most; 0: as much as any of these jobs needs.
  std::uint64_t min_shard_bytes = 0;
  bool checksum = false;
  bool strict = false;            ///< On cards that want all memory registered while they use it.
  std::uint32_t max_damaged = 8;  ///< runtime::CheckedOptions, same name
  bool failover = false;
  std::uint32_t lane_slots = 1;  ///< With failover: Results of one lane that may be landing on a worker.
  std::uint32_t retain_part_bytes = 0;
  std::uint64_t retain_bytes = 0;
  std::uint32_t backup_workers = 0;
  Duration backup_grace{};
  std::uint64_t backup_bytes = 0;
  std::uint32_t strangers = 0;  ///< Further endpoints that know everybody, and nobody them.
  Duration lane_grace = std::chrono::seconds(2);
  Duration dead_after{};  ///< Of links (runtime::LinkWatch); zero: nobody looks at them.
  transport::SimOptions sim;
};

class Cluster {
 public:
  static constexpr std::uint64_t kJob = 0xC0FFEE;

  explicit Cluster(const ClusterOptions& options) : options_(options), network_(options.seed, sim_options(options)) {
    const std::uint32_t peers = options.workers + options.lanes + options.strangers;
    for (std::uint32_t i = 0; i < peers; ++i) add_endpoint(i);
    for (std::uint32_t from = 0; from < peers; ++from) {
      for (std::uint32_t to = 0; to < options.workers + options.lanes; ++to) {
        endpoints_[from]->add_peer(PeerId{to}, endpoints_[to]->address());
      }
    }
    for (std::uint32_t rank = 0; rank < options.workers; ++rank) {
      if (has_near(rank)) join_processes(rank);
    }
    completions_.resize(options.workers);
    due_.resize(options.workers + options.lanes);
    for (std::uint32_t w = 0; w < options.workers; ++w) {
      add_worker(w);
      flush_worker(w);
    }
    for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
      add_lane(lane);
      flush_lane(lane);
    }
    // A job begins when everybody is ready for the first message; a network that is busy takes some receives later.
    for (int turns = 0; turns < 1000 && has_backlog(); ++turns) {
      for (std::uint32_t w = 0; w < options.workers; ++w) flush_worker(w);
      for (std::uint32_t lane = 0; lane < options.lanes; ++lane) flush_lane(lane);
    }
  }

  worker::EngineConfig worker_config(std::uint32_t rank) const {
    worker::EngineConfig config;
    config.self = PeerId{rank};
    config.job_id = kJob;
    for (std::uint32_t lane = 0; lane < options_.lanes; ++lane) config.lanes.push_back(PeerId{options_.workers + lane});
    config.lane_weights = options_.weights.empty() ? std::vector<double>(options_.lanes, 1.0) : options_.weights;
    if (!options_.failover) config.rails = options_.rails;
    for (std::uint32_t lane = 0; lane < options_.lanes; ++lane) config.lane_rails.push_back(lane % config.rails);
    if (has_near(rank)) config.near_lanes = {PeerId{options_.workers + rank}};
    config.chunk_bytes = options_.chunk_bytes;
    config.max_eager_bytes = options_.max_eager_bytes;
    config.eager_window = options_.eager_window;
    config.announce_credits = options_.announce_credits;
    config.min_shard_bytes = options_.min_shard_bytes;
    config.lane_grace = options_.lane_grace;
    config.sealed_sends = options_.checksum;
    config.failover = options_.failover;
    if (options_.failover) config.lane_slots.assign(options_.lanes, options_.lane_slots);
    config.retain_part_bytes = options_.retain_part_bytes;
    config.retain_bytes = options_.retain_bytes;
    return config;
  }

  void submit(std::uint32_t rank, const worker::Operation& operation) {
    memory_[{rank, operation.key}] = operation.memory;
    // A key may be in use already; then this submission is refused.
    if (options_.strict && !registrations_.contains({rank, operation.key})) {
      registrations_[{rank, operation.key}] = domains_[rank]->hold(operation.memory);
      // What a lost lane may still send is received there.
      if (!operation.results.empty()) own_registrations_.push_back(domains_[rank]->hold(operation.results));
    }
    workers_[rank]->submit(network_.now(), operation);
    flush_worker(rank);
  }
  void abort(std::uint32_t rank, const worker::Operation& operation, const Status& why) {
    workers_[rank]->abort(network_.now(), operation, why);
    flush_worker(rank);
  }
  /// Everybody is told that this process is gone, and it goes.
  void lose_worker(std::uint32_t rank, const std::string& why) {
    network_.kill(rank);
    for (std::uint32_t w = 0; w < options_.workers; ++w) {
      if (w == rank) continue;
      workers_[w]->on_peer_lost(network_.now(), PeerId{rank}, why);
      flush_worker(w);
    }
    for (std::uint32_t lane = 0; lane < options_.lanes; ++lane) {
      lanes_[lane]->on_peer_lost(network_.now(), PeerId{rank}, why);
      flush_lane(lane);
      endpoints_[options_.workers + lane]->remove_peer(PeerId{rank});
    }
    dead_.push_back(rank);
  }
  /// All lanes are told that it has done all that it will: at once, however long its messages take.
  void leave(std::uint32_t rank, const std::string& why) {
    for (std::uint32_t lane = 0; lane < options_.lanes; ++lane) {
      lanes_[lane]->on_peer_left(network_.now(), PeerId{rank}, why);
      flush_lane(lane);
    }
  }
  void lose_lane(std::uint32_t lane, const std::string& why) {
    stop_lane(lane);
    for (std::uint32_t w = 0; w < options_.workers; ++w) tell_lost(w, lane, why);
  }
  /// It does nothing more, and nobody knows.
  void stop_lane(std::uint32_t lane) {
    network_.kill(options_.workers + lane);
    if (!is_dead(options_.workers + lane)) dead_.push_back(options_.workers + lane);
  }
  /// One worker learns that a lane is lost, whether that is true or not.
  void tell_lost(std::uint32_t rank, std::uint32_t lane, const std::string& why) {
    endpoints_[rank]->remove_peer(PeerId{options_.workers + lane});
    worker_pumps_[rank]->forget_peer(PeerId{options_.workers + lane});
    workers_[rank]->on_peer_lost(network_.now(), PeerId{options_.workers + lane}, why);
    flush_worker(rank);
  }
  /// Called at each completion, after the check that the network is done with the memory.
  void on_complete(std::function<void(std::uint32_t, const CompleteAction&)> call) { on_complete_ = std::move(call); }

  /// A worker finds lanes that do not answer; inside of a step.
  void on_unreachable(std::function<void(std::uint32_t, const runtime::Unreachable&)> call) {
    on_unreachable_ = std::move(call);
  }

  /// Called between the engines' steps, outside of them; true where it did something.
  void after_step(std::function<bool()> call) { after_step_ = std::move(call); }

  /// Runs until nothing is known to any engine and nothing is in flight. False at the limit of virtual time, or where
  /// everything waits and no event will come.
  bool run_until_idle(Duration limit) { return run(network_.now() + limit, true); }
  void run_until(Instant when) {
    run(when, false);
    network_.advance_to(when);
  }

  bool is_idle() const {
    for (std::uint32_t w = 0; w < options_.workers; ++w) {
      if (!is_dead(w) && (!workers_[w]->is_idle() || worker_pumps_[w]->has_backlog())) return false;
    }
    for (std::uint32_t lane = 0; lane < options_.lanes; ++lane) {
      if (is_dead(options_.workers + lane)) continue;
      if (!lanes_[lane]->is_idle() || lane_pumps_[lane]->has_backlog()) return false;
    }
    return true;
  }

  /// What is pushed finds its receive posted. A Result that lands on its own input waits for it where it outran the
  /// news that the input is sent, and no longer.
  void expect_receives_for_all() const {
    for (std::uint32_t peer = 0; peer < options_.workers + options_.lanes; ++peer) {
      if (is_dead(peer)) continue;
      if (peer >= options_.workers || options_.failover) {
        EXPECT_EQ(network_.unexpected(peer), 0u) << "a message met no receive on peer " << peer;
      } else {
        EXPECT_EQ(network_.unmatched(peer), 0u) << "a message met no receive on peer " << peer;
      }
    }
  }

  bool is_dead(std::uint32_t peer) const { return std::find(dead_.begin(), dead_.end(), peer) != dead_.end(); }
  Instant now() const { return network_.now(); }
  transport::SimNetwork& network() { return network_; }
  transport::Endpoint& endpoint(std::uint32_t peer) { return *endpoints_[peer]; }
  const ClusterOptions& options() const { return options_; }
  const worker::Engine& worker(std::uint32_t rank) const { return *workers_[rank]; }
  const server::Engine& lane(std::uint32_t lane) const { return *lanes_[lane]; }
  /// Zeros without checksums.
  runtime::CheckedStats checked_stats(std::uint32_t peer) const {
    return checked_[peer] == nullptr ? runtime::CheckedStats{} : checked_[peer]->stats();
  }
  const runtime::PumpStats& lane_pump_stats(std::uint32_t lane) const { return lane_pumps_[lane]->stats(); }
  /// Everything that completed on a worker, in order.
  const std::vector<CompleteAction>& completions(std::uint32_t rank) const { return completions_[rank]; }
  std::uint32_t slots() const { return options_.slots != 0 ? options_.slots : options_.workers * most_window(); }
  std::uint32_t most_window() const { return std::max(options_.window, options_.max_window); }

 private:
  using WorkerPump = runtime::Pump<worker::Engine>;
  using LanePump = runtime::Pump<server::Engine>;

  /// With checksums and without failover a Result lands on what a worker may have to send again: nothing else ever
  /// does.
  static transport::SimOptions sim_options(const ClusterOptions& options) {
    transport::SimOptions sim = options.sim;
    if (options.checksum && !options.failover) sim.slow_cancel_chance = 0;
    sim.surplus_tag = runtime::kReportTag;
    return sim;
  }

  void add_endpoint(std::uint32_t peer) {
    endpoints_.push_back(network_.open_endpoint());
    domains_.push_back(std::make_unique<memory::Domain>());
    if (options_.strict && peer < options_.workers + options_.lanes) {
      endpoints_.back() = std::make_unique<transport::StrictEndpoint>(std::move(endpoints_.back()), *domains_.back());
    }
    checked_.push_back(nullptr);
    if (!options_.checksum || peer >= options_.workers + options_.lanes) return;
    runtime::CheckedOptions checked;
    checked.self = PeerId{peer};
    checked.job_id = kJob;
    checked.max_head_bytes = std::max<std::size_t>(options_.max_eager_bytes + 400, 1300);
    checked.is_pooled = [](Tag tag) { return tag == kControlTag; };
    checked.max_damaged = options_.max_damaged;
    checked.now = [this] { return network_.now(); };
    auto endpoint = std::make_unique<runtime::CheckedEndpoint>(std::move(endpoints_.back()), checked);
    checked_.back() = endpoint.get();
    endpoints_.back() = std::move(endpoint);
  }

  /// The worker and the lane of this number share a process.
  bool has_near(std::uint32_t number) const {
    return options_.near && !options_.failover && number < std::min(options_.workers, options_.lanes);
  }

  void join_processes(std::uint32_t number) {
    const std::uint32_t lane = options_.workers + number;
    auto one = std::make_unique<runtime::ProcessEndpoint>(), other = std::make_unique<runtime::ProcessEndpoint>();
    runtime::ProcessEndpoint::introduce(*one, PeerId{number}, *other, PeerId{lane});
    const auto route = [this](std::unique_ptr<transport::Endpoint> near, std::uint32_t self, std::uint32_t peer) {
      endpoints_[self] = std::make_unique<runtime::RoutedEndpoint>(std::move(near), std::set{PeerId{peer}},
                                                                   std::move(endpoints_[self]));
    };
    route(std::move(one), number, lane);
    route(std::move(other), lane, number);
  }

  /// What is lent is there for as long as the engines take.
  static std::vector<NotFiniteInput> carry_out(const ReduceAction& action) {
    EXPECT_TRUE(!action.loan || action.loan->begin());
    std::vector<NotFiniteInput> found = server::carry_out(action);
    if (action.loan) action.loan->end();
    return found;
  }

  void add_worker(std::uint32_t rank) {
    worker::EngineConfig config = worker_config(rank);
    bounce_.emplace_back(worker::bounce_bytes(config));
    config.bounce = bounce_.back();
    if (options_.strict) own_registrations_.push_back(domains_[rank]->hold(bounce_.back()));
    workers_.push_back(std::make_unique<worker::Engine>(config));
    // Every lane may have a window of grants, an error for each operation, and credits on their way to one worker.
    const std::size_t receives =
        options_.worker_receives != 0 ? options_.worker_receives : options_.lanes * (most_window() + 24);
    runtime::PumpOptions pump{receives, options_.body_bytes != 0 ? options_.body_bytes : 1100};
    if (has_near(rank)) pump.near.push_back({PeerId{options_.workers + rank}, receives});
    pump.links.self = PeerId{rank};
    pump.links.job_id = kJob;
    pump.links.watch = {options_.dead_after, true};
    for (std::uint32_t lane = 0; lane < options_.lanes; ++lane) {
      pump.links.peers.push_back(PeerId{options_.workers + lane});
    }
    pump.links.on_unreachable = [this, rank](const runtime::Unreachable& found) {
      if (on_unreachable_) on_unreachable_(rank, found);
    };
    worker_pumps_.push_back(std::make_unique<WorkerPump>(
        *workers_.back(), *endpoints_[rank], pump,
        [](const ReduceAction&) -> std::vector<NotFiniteInput> { std::abort(); },
        [this, rank](const CompleteAction& action) {
          const std::span<const std::byte> memory = memory_[{rank, action.key}];
          EXPECT_FALSE(network_.is_borrowed(rank, memory)) << "the network still uses the memory";
          EXPECT_FALSE(worker_pumps_[rank]->uses(memory)) << "a lane in this process still uses the memory";
          completions_[rank].push_back(action);
          if (action.status.code() != Code::kInvalidArgument) registrations_.erase({rank, action.key});
          if (on_complete_) on_complete_(rank, action);
        }));
  }

  void add_lane(std::uint32_t lane) {
    server::EngineConfig config;
    config.self = PeerId{options_.workers + lane};
    config.job_id = kJob;
    config.workers = options_.workers;
    config.max_chunk_bytes = options_.chunk_bytes;
    config.window = options_.window;
    config.are_lanes_apart = options_.are_lanes_apart;
    config.max_window = options_.max_window;
    config.max_run = options_.failover ? std::min(options_.max_run, options_.lane_slots) : options_.max_run;
    config.run_time = Duration::max();
    config.max_eager_bytes = options_.max_eager_bytes;
    config.announce_credits = options_.announce_credits;
    config.eager_window = options_.eager_window;
    config.failover = options_.failover;
    config.backup_workers = options_.backup_workers;
    config.backup_grace = options_.backup_grace;
    config.stall_warning = std::chrono::seconds(1);
    config.backup_bytes = options_.backup_bytes;
    config.lanes = options_.lanes;
    if (has_near(lane)) config.near_worker = PeerId{lane};
    config.min_loan_bytes = 2 * runtime::ProcessEndpoint::kMaxInlineBytes;
    slots_.emplace_back(std::size_t{slots()} * options_.chunk_bytes);
    if (options_.strict) {
      own_registrations_.push_back(domains_[options_.workers + lane]->hold(slots_.back()));
    }
    lanes_.push_back(std::make_unique<server::Engine>(config, slots_.back()));
    const std::size_t announces = options_.announce_credits == 0 ? 64 : options_.announce_credits + 24;
    // With failover: a Ready for each grant.
    const std::size_t answers = options_.failover ? most_window() + options_.lanes : 0;
    const std::size_t receives = options_.lane_receives != 0 ? options_.lane_receives : announces + answers;
    const std::size_t body = std::max<std::size_t>(options_.max_eager_bytes + wire::kAnnounceBytes + 16, 1200);
    runtime::PumpOptions pump{options_.workers * receives, options_.body_bytes != 0 ? options_.body_bytes : body};
    if (has_near(lane)) pump.near.push_back({PeerId{lane}, receives});
    pump.links.self = PeerId{options_.workers + lane};
    pump.links.job_id = kJob;
    for (std::uint32_t w = 0; w < options_.workers; ++w) pump.links.peers.push_back(PeerId{w});
    lane_pumps_.push_back(std::make_unique<LanePump>(*lanes_.back(), *endpoints_[options_.workers + lane], pump,
                                                     carry_out, [](const CompleteAction&) { std::abort(); }));
  }

  void flush_worker(std::uint32_t rank) {
    worker_pumps_[rank]->flush(network_.now());
    note(*workers_[rank], *worker_pumps_[rank], rank);
  }
  void flush_lane(std::uint32_t lane) {
    lane_pumps_[lane]->flush(network_.now());
    note(*lanes_[lane], *lane_pumps_[lane], options_.workers + lane);
  }

  /// What a process waits for changes only when it does something: with thousands of them nobody asks all of them at
  /// each event.
  struct Due {
    Instant engine = Instant::max();
    Instant pump = Instant::max();
  };
  template <class Engine, class Pump>
  void note(const Engine& engine, const Pump& pump, std::uint32_t peer) {
    due_[peer] = {engine.next_deadline(), pump.next_deadline()};
    earliest_due_ = std::min({earliest_due_, due_[peer].engine, due_[peer].pump});
    if (pump.has_backlog()) {
      backlogs_.insert(peer);
    } else {
      backlogs_.erase(peer);
    }
  }

  /// The first peer from `peer` on that may have something to do, or `end`.
  std::uint32_t next_to_step(std::uint32_t peer, std::uint32_t end, bool all) const {
    if (all) return peer;
    std::uint32_t next = end;
    const auto busy = network_.busy().lower_bound(peer);
    if (busy != network_.busy().end()) next = std::min(next, static_cast<std::uint32_t>(*busy));
    const auto backlog = backlogs_.lower_bound(peer);
    if (backlog != backlogs_.end()) next = std::min(next, *backlog);
    return next;
  }

  template <class Engines, class Pumps>
  bool step_all(Engines& engines, Pumps& pumps, std::uint32_t first_peer) {
    bool busy = false;
    const Instant now = network_.now();
    // The network does not know what comes from a near peer, nor what checksums wait for.
    const bool all = options_.near || options_.checksum || earliest_due_ <= now;
    const auto end = first_peer + static_cast<std::uint32_t>(engines.size());
    for (std::uint32_t peer = next_to_step(first_peer, end, all); peer < end; peer = next_to_step(peer + 1, end, all)) {
      const std::uint32_t i = peer - first_peer;
      if (is_dead(peer)) continue;
      if (due_[peer].engine <= now) {
        engines[i]->on_tick(now);
        pumps[i]->flush(network_.now());
        note(*engines[i], *pumps[i], peer);
        busy = true;
      }
      const bool looks = due_[peer].pump <= now;
      const bool is_due = checked_[peer] != nullptr && checked_[peer]->next_deadline() <= now;
      if (is_due || looks || has_near(i) || network_.has_completions(peer) || backlogs_.contains(peer)) {
        busy |= pumps[i]->step(now) || is_due || looks;
        note(*engines[i], *pumps[i], peer);
      }
    }
    return busy;
  }

  bool run(Instant limit, bool stop_when_idle) {
    int fruitless = 0;
    while (true) {
      bool busy = step_all(workers_, worker_pumps_, 0);
      busy |= step_all(lanes_, lane_pumps_, options_.workers);
      if (earliest_due_ <= network_.now()) find_earliest_due();
      if (after_step_) busy |= after_step_();
      if (busy) {
        fruitless = 0;
        continue;
      }
      const Instant event = network_.next_event();
      if (stop_when_idle && event == Instant::max() && is_idle()) return true;
      // A post that was refused at random is tried again without any event; a bounded number of times.
      if (event == Instant::max() && has_backlog() && ++fruitless < 1000) continue;
      const Instant next = std::min(event, next_deadline());
      if (next > limit) return false;
      if (event <= next) {
        network_.advance();
      } else {
        network_.advance_to(next);
      }
    }
  }

  void find_earliest_due() {
    earliest_due_ = Instant::max();
    for (std::uint32_t peer = 0; peer < due_.size(); ++peer) {
      if (!is_dead(peer)) earliest_due_ = std::min({earliest_due_, due_[peer].engine, due_[peer].pump});
    }
  }

  bool has_backlog() const { return !backlogs_.empty(); }

  Instant next_deadline() const {
    Instant next = earliest_due_;
    for (std::uint32_t peer = 0; peer < checked_.size(); ++peer) {
      if (checked_[peer] != nullptr && !is_dead(peer)) next = std::min(next, checked_[peer]->next_deadline());
    }
    return next;
  }

  ClusterOptions options_;
  transport::SimNetwork network_;
  std::vector<std::unique_ptr<memory::Domain>> domains_;  // One for each process.
  std::vector<std::unique_ptr<transport::Endpoint>> endpoints_;
  std::vector<runtime::CheckedEndpoint*> checked_;  // Null: without.
  std::vector<std::vector<std::byte>> slots_;
  std::deque<std::vector<std::byte>> bounce_;
  std::vector<memory::Hold> own_registrations_;
  std::map<std::pair<std::uint32_t, OpKey>, memory::Hold> registrations_;
  std::function<void(std::uint32_t, const CompleteAction&)> on_complete_;
  std::function<bool()> after_step_;
  std::function<void(std::uint32_t, const runtime::Unreachable&)> on_unreachable_;
  std::vector<std::unique_ptr<worker::Engine>> workers_;
  std::vector<std::unique_ptr<server::Engine>> lanes_;
  std::vector<std::unique_ptr<WorkerPump>> worker_pumps_;
  std::vector<std::unique_ptr<LanePump>> lane_pumps_;
  std::vector<std::vector<CompleteAction>> completions_;
  std::map<std::pair<std::uint32_t, OpKey>, std::span<const std::byte>> memory_;  // What each submit lent.
  std::vector<std::uint32_t> dead_;
  std::vector<Due> due_;                   // By peer.
  Instant earliest_due_ = Instant::max();  // Of all of these, or earlier.
  std::set<std::uint32_t> backlogs_;       // Peers on which something waits for room.
};

}  // namespace herring::testing
