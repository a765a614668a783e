#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
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
  bool failover = false;  ///< Placement, same names
  std::uint32_t backup_workers = 0;
  std::uint32_t lanes = 0;  ///< Of the plan.
  /// The lane cannot go on (an exception on its thread, with its text). Called on that thread, once.
  std::function<void(const std::string&)> on_failure;
};

/// As the placement has it; without job and callback.
LaneOptions lane_options(const Config& config, const Placement& placement, const LanePlace& lane);

/// Sizes that workers and lanes derive from the settings and the size of the job in the same way.
struct ProtocolLimits {
  std::uint32_t announce_credits = 0;  ///< Announces of one worker to one lane that are not credited back.
  std::uint32_t eager_window = 0;      ///< Unfinished eager announces of one worker to one lane.
};
ProtocolLimits protocol_limits(const Config& config, std::uint32_t workers);

/// LaneOptions::max_window, less where there are so many workers that their slots would take too much memory.
std::uint32_t max_lane_window(const LaneOptions& options);

/// Control messages of one worker that may wait at the same moment.
std::uint32_t control_messages(const LaneOptions& options);

/// Bytes one lane uses for chunks and announces, at most: the bound that docs/architecture.md states.
std::uint64_t lane_memory_bound(const LaneOptions& options);

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
  void peer_left(PeerId worker);
  server::EngineStats stats() const;
  std::uint64_t memory_bound() const { return lane_memory_bound(options_); }
  bool is_idle() const { return idle_.load(std::memory_order_acquire); }

 private:
  void loop();
  void serve();
  void deliver_losses(Instant now, server::Engine& engine);
  void publish(const server::Engine& engine);
  void log_stragglers(Instant now, const server::Engine& engine);

  const LaneOptions options_;
  const ProtocolLimits limits_;
  std::unique_ptr<transport::Endpoint> endpoint_;
  std::span<std::byte> slots_;  // mapped in the constructor, unmapped in the destructor
  std::atomic<bool> stop_{false};
  std::atomic<bool> idle_{true};
  mutable std::mutex mutex_;
  std::vector<std::pair<PeerId, std::string>> losses_;  // guarded by mutex_
  std::vector<PeerId> departures_;                      // guarded by mutex_
  server::EngineStats stats_;                           // guarded by mutex_
  Logger logger_;
  Instant lateness_due_{};                         // Only the lane's thread.
  std::vector<server::Lateness> lateness_logged_;  // Of it what was logged.
  std::thread thread_;
};

}  // namespace herring::runtime
