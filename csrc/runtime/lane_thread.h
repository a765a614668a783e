#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/log.h"
#include "core/types.h"
#include "runtime/placement.h"
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
  /// The lane cannot go on (an exception on its thread, with its text). Called on that thread, once.
  std::function<void(const std::string&)> on_failure;
};

/// As the placement has it; without job and callback.
LaneOptions lane_options(const Config& config, const Placement& placement, const LanePlace& lane);

/// LaneOptions::hosts: empty where ranks contribute by themselves, or those of a host fit no span.
std::vector<wire::RankSpan> host_spans(const Config& config, const Placement& placement);

/// One lane: a thread with its own endpoint, engine and memory. Running from start() to the destructor.
class LaneThread final {
 public:
  LaneThread(const LaneOptions& options, std::unique_ptr<transport::Endpoint> endpoint);
  ~LaneThread();
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

  const transport::Address& address() const { return endpoint_->address(); }
  /// Worker endpoints by rank. Once.
  void start(std::span<const transport::Address> workers);
  /// Any thread.
  void peer_lost(PeerId worker, const std::string& why);
  /// Any thread: it has said goodbye.
  void peer_left(PeerId worker, const std::string& why);
  server::EngineStats stats() const;
  std::uint64_t memory_bound() const { return options_.memory_bound; }
  std::uint64_t record_bound() const { return server::record_bound(options_.record_bytes); }
  bool is_idle() const { return idle_.load(std::memory_order_acquire); }

 private:
  void loop();
  void serve();
  void deliver_losses(Instant now, server::Engine& engine);
  void publish(const server::Engine& engine);
  void log_stragglers(Instant now, const server::Engine& engine);

  const LaneOptions options_;
  std::unique_ptr<transport::Endpoint> endpoint_;
  std::span<std::byte> slots_;  // mapped in the constructor, unmapped in the destructor
  std::atomic<bool> stop_{false};
  std::atomic<bool> idle_{true};
  mutable std::mutex mutex_;
  std::vector<std::pair<PeerId, std::string>> losses_;      // guarded by mutex_
  std::vector<std::pair<PeerId, std::string>> departures_;  // guarded by mutex_
  server::EngineStats stats_;                               // guarded by mutex_
  Logger logger_;
  Instant lateness_due_{};                         // Only the lane's thread.
  std::vector<server::Lateness> lateness_logged_;  // Of it what was logged.
  std::thread thread_;
};

}  // namespace herring::runtime
