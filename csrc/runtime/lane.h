#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/log.h"
#include "core/types.h"
#include "memory/domain.h"
#include "runtime/core_wait.h"
#include "runtime/placement.h"
#include "runtime/pump.h"
#include "server/engine.h"
#include "transport/transport.h"

namespace herring::runtime {

struct LaneOptions {
  Config config;
  std::uint64_t job_id = 0;
  PeerId self;
  std::uint32_t workers = 0;
  std::uint32_t chunk_bytes = 0;  ///< Placement::chunk_bytes
  std::uint32_t window = 0;       ///< LanePlace, same names
  std::uint32_t max_window = 0;
  bool are_lanes_apart = false;        ///< Placement, same name
  std::uint64_t slots = 0;             ///< Budget::lane_slots
  std::uint32_t announce_credits = 0;  ///< Budget, same names
  std::uint32_t eager_bytes = 0;
  std::uint32_t eager_window = 0;
  std::uint32_t control_messages = 0;
  std::uint64_t max_body_bytes = 0;
  std::uint64_t memory_bound = 0;  ///< Budget::lane_bytes
  std::uint64_t record_bytes = 0;  ///< Budget, same name
  bool failover = false;           ///< Placement, same names
  std::uint32_t backup_workers = 0;
  std::uint32_t lanes = 0;                   ///< Of the plan.
  std::vector<wire::RankSpan> hosts;         ///< server::EngineConfig, same name.
  std::optional<std::uint32_t> near_worker;  ///< near_worker()
  memory::Domain* memory = nullptr;          ///< Of this process; outlives the lane.
  /// The lane cannot go on (an exception on its thread, with its text). Called on that thread, once.
  std::function<void(const std::string&)> on_failure;
};

/// As the placement has it; without job and callback.
LaneOptions lane_options(const Config& config, const Placement& placement, const LanePlace& lane);

/// LaneOptions::hosts: empty where ranks contribute by themselves, or those of a host fit no span.
std::vector<wire::RankSpan> host_spans(const Config& config, const Placement& placement);

/// One lane: its endpoint, engine and memory. One thread at a time drives it: a thread of its own (lane_thread.h), or
/// whoever drives the worker that it is embedded in.
class Lane final {
 public:
  Lane(const LaneOptions& options, std::unique_ptr<transport::Endpoint> endpoint);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const transport::Address& address() const { return endpoint_->address(); }
  PeerId id() const { return options_.self; }
  /// Worker endpoints by rank. Once, before it is driven; from then on messages may come. Throws Error.
  void open(std::span<const transport::Address> workers);

  // Who drives it.
  /// Takes what has come, sums, sends. True where anything happened. Never throws: a lane that cannot go on says so
  /// once (LaneOptions::on_failure) and does nothing from then on.
  bool turn(Instant now);
  /// Before a wait: what others may know of it by now.
  void publish(Instant now);
  /// When turn() is to be called at the latest.
  Instant next_deadline() const;
  /// As transport::Endpoint's, same names.
  void wait(Instant deadline) { endpoint_->wait(deadline); }
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) {
    return endpoint_->prepare_wait(descriptors, deadline);
  }
  /// Nothing is under way, and all that it has to say is out.
  bool is_quiet() const;

  // Any thread.
  void peer_lost(PeerId worker, const std::string& why);
  /// It has said goodbye.
  void peer_left(PeerId worker, const std::string& why);
  void wake() { endpoint_->wake(); }
  server::EngineStats stats() const;
  std::uint64_t memory_bound() const { return options_.memory_bound; }
  std::uint64_t record_bound() const { return server::record_bound(options_.record_bytes); }

 private:
  server::EngineConfig engine_config() const;
  PumpOptions pump_options() const;
  bool do_turn(Instant now);
  void deliver_losses(Instant now);
  void log_stragglers(Instant now);
  void stop();
  void fail(const std::exception& problem);

  const LaneOptions options_;
  std::unique_ptr<transport::Endpoint> endpoint_;
  memory::Buffer slots_;
  std::unique_ptr<server::Engine> engine_;
  std::unique_ptr<Pump<server::Engine>> pump_;
  CoreWait core_wait_;
  bool has_stopped_ = false;
  std::atomic<bool> has_news_{false};  // Of peers.
  mutable std::mutex mutex_;
  std::vector<std::pair<PeerId, std::string>> losses_;      // guarded by mutex_
  std::vector<std::pair<PeerId, std::string>> departures_;  // guarded by mutex_
  server::EngineStats stats_;                               // guarded by mutex_
  Logger logger_;
  Instant lateness_due_{};
  std::vector<server::Lateness> lateness_logged_;  // Of it what was logged.
};

}  // namespace herring::runtime
