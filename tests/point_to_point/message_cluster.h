#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "point_to_point/engine.h"
#include "runtime/checked_endpoint.h"
#include "runtime/pump.h"
#include "transport/sim.h"
#include "transport/strict_endpoint.h"

/// Workers that send each other messages, in one thread: the real engines and pumps over the simulated network. Each
/// worker has two endpoints, one for its own host and one for the others, as a job has.
namespace herring::point_to_point::testing {

struct ClusterOptions {
  std::uint64_t seed = 1;
  std::uint32_t workers = 2;
  std::uint32_t hosts = 1;  ///< Worker w lives on host w % hosts.
  LinkConfig near = {256, 4, 64, 2, 4};
  LinkConfig far = {128, 3, 32, 2, 4};
  std::uint32_t max_unmatched = 65536;
  std::uint32_t max_incoming = 256;
  std::uint32_t max_incoming_of_peer = 4;
  Duration grace = std::chrono::seconds(5);
  bool checksum = false;  ///< Between hosts.
  bool strict = false;    ///< On cards that want all memory registered while they use it.
  transport::SimOptions sim = {};
};

class Cluster {
 public:
  static constexpr std::uint64_t kJob = 0xBEEF;
  static constexpr std::uint32_t kLinks = 2;

  explicit Cluster(const ClusterOptions& options) : options_(options), network_(options.seed, sim_options(options)) {
    for (std::uint32_t i = 0; i < options.workers * kLinks; ++i) add_endpoint(i);
    workers_.resize(options.workers);
    for (std::uint32_t rank = 0; rank < options.workers; ++rank) add_worker(rank);
  }

  bool is_near(std::uint32_t a, std::uint32_t b) const { return a % options_.hosts == b % options_.hosts; }

  EngineConfig engine_config(std::uint32_t rank) const {
    EngineConfig config;
    config.self = PeerId{rank};
    config.job_id = kJob;
    config.links = {options_.near, options_.far};
    for (std::uint32_t peer = 0; peer < options_.workers; ++peer) {
      config.link_of.push_back(peer == rank ? kNoLink : is_near(rank, peer) ? 0 : 1);
    }
    config.max_unmatched = options_.max_unmatched;
    config.max_incoming = options_.max_incoming;
    config.max_incoming_of_peer = options_.max_incoming_of_peer;
    config.grace = options_.grace;
    return config;
  }

  /// The handle names it in completions().
  std::uint64_t send(std::uint32_t rank, SendOperation operation) {
    operation.handle = next_handle_++;
    memory_[operation.handle] = operation.data;
    lend(rank, operation.handle, {const_cast<std::byte*>(operation.data.data()), operation.data.size()});
    workers_[rank].engine->send(network_.now(), operation);
    flush(rank);
    return operation.handle;
  }
  std::uint64_t receive(std::uint32_t rank, ReceiveOperation operation) {
    operation.handle = next_handle_++;
    memory_[operation.handle] = operation.memory;
    lend(rank, operation.handle, operation.memory);
    workers_[rank].engine->receive(network_.now(), operation);
    flush(rank);
    return operation.handle;
  }
  void close_group(std::uint32_t rank, GroupId group, const Status& why) {
    workers_[rank].engine->close_group(network_.now(), group, why);
    flush(rank);
  }
  /// `rank` hears that another worker calls nothing more in the group.
  void member_left(std::uint32_t rank, GroupId group, std::uint32_t leaver, const std::string& why) {
    workers_[rank].engine->on_member_left(network_.now(), group, PeerId{leaver}, why);
    flush(rank);
  }
  void cancel_receives(std::uint32_t rank, const Status& why) {
    workers_[rank].engine->cancel_unmatched_receives(why);
    flush(rank);
  }
  /// The process is gone, and everybody is told.
  void lose(std::uint32_t rank, const std::string& why) {
    dead_.insert(rank);
    for (std::uint32_t link = 0; link < kLinks; ++link) network_.kill(rank * kLinks + link);
    for (std::uint32_t other = 0; other < options_.workers; ++other) {
      if (dead_.contains(other)) continue;
      workers_[other].engine->on_peer_lost(network_.now(), PeerId{rank}, why);
      for (std::uint32_t link = 0; link < kLinks; ++link) endpoints_[other * kLinks + link]->remove_peer(PeerId{rank});
      flush(other);
    }
  }
  void leave(std::uint32_t rank, const std::string& why) {
    for (std::uint32_t other = 0; other < options_.workers; ++other) {
      if (other == rank || dead_.contains(other)) continue;
      workers_[other].engine->on_peer_left(network_.now(), PeerId{rank}, why);
      flush(other);
    }
  }

  bool run_until_idle(Duration limit) { return run(network_.now() + limit, true); }
  void run_until(Instant when) {
    run(when, false);
    network_.advance_to(when);
  }
  /// Until nothing moves any more, whatever still waits. Time-outs do not happen.
  void settle() {
    while (step_all() || has_backlog() || network_.advance()) {
    }
  }

  bool is_idle() const {
    for (std::uint32_t rank = 0; rank < options_.workers; ++rank) {
      if (!dead_.contains(rank) && !workers_[rank].engine->is_idle()) return false;
    }
    return !has_backlog();
  }

  Instant now() const { return network_.now(); }
  transport::SimNetwork& network() { return network_; }
  transport::Endpoint& endpoint(std::uint32_t rank, std::uint32_t link) { return *endpoints_[rank * kLinks + link]; }
  const ClusterOptions& options() const { return options_; }
  const Engine& engine(std::uint32_t rank) const { return *workers_[rank].engine; }
  Engine& engine(std::uint32_t rank) { return *workers_[rank].engine; }
  bool is_dead(std::uint32_t rank) const { return dead_.contains(rank); }
  /// By handle; every operation of a living worker ends once.
  const std::map<std::uint64_t, Completion>& completions() const { return completions_; }
  const Completion* find(std::uint64_t handle) const {
    const auto found = completions_.find(handle);
    return found == completions_.end() ? nullptr : &found->second;
  }
  /// What the engine says it never exceeds.
  std::uint64_t memory_bound(std::uint32_t rank) const {
    std::uint64_t bound = 0;
    for (std::uint32_t peer = 0; peer < options_.workers; ++peer) {
      if (peer == rank) continue;
      const LinkConfig& link = is_near(rank, peer) ? options_.near : options_.far;
      bound += std::uint64_t{link.eager_window} * link.eager_bytes + link.credits * max_body_bytes(link);
    }
    return bound;
  }

 private:
  static transport::SimOptions sim_options(const ClusterOptions& options) {
    transport::SimOptions sim = options.sim;
    sim.surplus_tag = runtime::kReportTag;
    return sim;
  }

  using LinkPump = runtime::Pump<Link>;
  struct Worker {
    std::unique_ptr<Engine> engine;
    std::vector<std::unique_ptr<LinkPump>> pumps;
  };

  void lend(std::uint32_t rank, std::uint64_t handle, std::span<std::byte> memory) {
    if (options_.strict) registrations_[handle] = domains_[rank]->hold(memory);
  }

  void add_endpoint(std::uint32_t index) {
    endpoints_.push_back(network_.open_endpoint());
    if (index % kLinks == 0) domains_.push_back(std::make_unique<memory::Domain>());
    if (options_.strict) {
      endpoints_.back() =
          std::make_unique<transport::StrictEndpoint>(std::move(endpoints_.back()), *domains_[index / kLinks]);
    }
    checked_.push_back(nullptr);
    if (!options_.checksum || index % kLinks == 0) return;
    runtime::CheckedOptions checked;
    checked.self = PeerId{index / kLinks};
    checked.job_id = kJob;
    checked.is_pooled = [](Tag tag) { return tag == kControlTag; };
    checked.max_damaged = 1000;
    checked.now = [this] { return network_.now(); };
    auto endpoint = std::make_unique<runtime::CheckedEndpoint>(std::move(endpoints_.back()), checked);
    checked_.back() = endpoint.get();
    endpoints_.back() = std::move(endpoint);
  }

  void add_worker(std::uint32_t rank) {
    Worker& worker = workers_[rank];
    worker.engine = std::make_unique<Engine>(engine_config(rank));
    for (std::uint32_t link = 0; link < kLinks; ++link) {
      for (std::uint32_t peer = 0; peer < options_.workers; ++peer) {
        if (peer == rank) continue;
        endpoints_[rank * kLinks + link]->add_peer(PeerId{peer}, endpoints_[peer * kLinks + link]->address());
      }
      const LinkConfig& config = link == 0 ? options_.near : options_.far;
      worker.pumps.push_back(std::make_unique<LinkPump>(
          worker.engine->link(link), *endpoints_[rank * kLinks + link],
          runtime::PumpOptions{options_.workers * (config.credits + 2), max_body_bytes(config)},
          [](const ReduceAction&) -> std::vector<NotFiniteInput> { std::abort(); }, [](const CompleteAction&) {}));
    }
  }

  void flush(std::uint32_t rank) {
    Actions own;
    workers_[rank].engine->take_actions(own);
    for (const Action& action : own) {
      const auto& copy = std::get<CopyAction>(action);
      std::copy(copy.from.begin(), copy.from.end(), copy.to.begin());
      workers_[rank].engine->on_copied(*copy.token);
    }
    for (const auto& pump : workers_[rank].pumps) pump->flush(network_.now());
    std::vector<Completion> done;
    workers_[rank].engine->take_completions(done);
    for (Completion& completion : done) {
      for (std::uint32_t link = 0; link < kLinks; ++link) {
        EXPECT_FALSE(network_.is_borrowed(rank * kLinks + link, memory_[completion.handle]))
            << "the network still uses the memory: " << completion.status.to_string();
      }
      const std::uint64_t handle = completion.handle;
      registrations_.erase(handle);
      EXPECT_TRUE(completions_.emplace(handle, std::move(completion)).second) << "handle " << handle << " ended twice";
    }
  }

  bool step_all() {
    bool busy = false;
    const Instant now = network_.now();
    for (std::uint32_t rank = 0; rank < options_.workers; ++rank) {
      if (dead_.contains(rank)) continue;
      Worker& worker = workers_[rank];
      if (worker.engine->next_deadline() <= now) {
        worker.engine->on_tick(now);
        busy = true;
      }
      for (std::uint32_t link = 0; link < kLinks; ++link) {
        const runtime::CheckedEndpoint* checked = checked_[rank * kLinks + link];
        const bool is_due = checked != nullptr && checked->next_deadline() <= now;
        if (is_due || network_.has_completions(rank * kLinks + link) || worker.pumps[link]->has_backlog()) {
          busy |= worker.pumps[link]->step(now) || is_due;
        }
      }
      flush(rank);
    }
    return busy;
  }

  bool has_backlog() const {
    for (std::uint32_t rank = 0; rank < options_.workers; ++rank) {
      if (dead_.contains(rank)) continue;
      for (const auto& pump : workers_[rank].pumps) {
        if (pump->has_backlog()) return true;
      }
    }
    return false;
  }

  bool run(Instant limit, bool stop_when_idle) {
    int fruitless = 0;
    while (true) {
      if (step_all()) {
        fruitless = 0;
        continue;
      }
      const Instant event = network_.next_event();
      if (stop_when_idle && event == Instant::max() && is_idle()) return true;
      // A post that was refused at random is tried again without any event; a bounded number of times.
      if (event == Instant::max() && has_backlog() && ++fruitless < 1000) continue;
      Instant next = event;
      for (std::uint32_t rank = 0; rank < options_.workers; ++rank) {
        if (dead_.contains(rank)) continue;
        next = std::min(next, workers_[rank].engine->next_deadline());
        for (std::uint32_t link = 0; link < kLinks; ++link) {
          const runtime::CheckedEndpoint* checked = checked_[rank * kLinks + link];
          if (checked != nullptr) next = std::min(next, checked->next_deadline());
        }
      }
      if (next > limit) return false;
      if (event <= next) {
        network_.advance();
      } else {
        network_.advance_to(next);
      }
    }
  }

  ClusterOptions options_;
  transport::SimNetwork network_;
  std::vector<std::unique_ptr<memory::Domain>> domains_;  // One for each worker: its links share it.
  std::vector<std::unique_ptr<transport::Endpoint>> endpoints_;
  std::vector<runtime::CheckedEndpoint*> checked_;       // Null: without.
  std::map<std::uint64_t, memory::Hold> registrations_;  // By handle.
  std::vector<Worker> workers_;
  std::set<std::uint32_t> dead_;
  std::map<std::uint64_t, std::span<const std::byte>> memory_;  // What each operation lent.
  std::map<std::uint64_t, Completion> completions_;
  std::uint64_t next_handle_ = 1;
};

}  // namespace herring::point_to_point::testing
