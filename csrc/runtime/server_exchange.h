#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/status.h"
#include "core/types.h"
#include "memory/domain.h"
#include "runtime/placement.h"
#include "runtime/pump.h"
#include "runtime/runtime.h"
#include "transport/transport.h"
#include "worker/engine.h"

namespace herring::runtime {

struct PeerTraffic {
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t messages = 0;
};

/// What the placement and the settings make of a worker's engine; without memory for results.
worker::EngineConfig worker_engine_config(const Config& config, const Placement& placement, std::uint32_t rank,
                                          std::uint64_t job_id);
/// And of its pump.
PumpOptions worker_pump_options(const Config& config, const Placement& placement, std::uint32_t rank, PumpLinks links);

struct ServerExchangeOptions {
  Config config;
  const Placement* placement = nullptr;  ///< Outlives it.
  std::uint32_t rank = 0;
  std::uint64_t job_id = 0;
  memory::Domain* memory = nullptr;               ///< Of this process; outlives the endpoint.
  std::unique_ptr<transport::Endpoint> endpoint;  ///< Lanes are known to it already.
  /// Of so many members these do not answer: workers by rank, server processes behind them.
  std::function<void(std::span<const std::uint32_t> members, std::uint32_t of, const Unreachable&)> on_unreachable;
};

/// What a worker exchanges with the lanes of the servers: its engine, its pump, the memory that the network knows.
/// Used by the thread in the seat alone.
class ServerExchange final {
 public:
  explicit ServerExchange(ServerExchangeOptions options);
  ~ServerExchange() { close(); }
  ServerExchange(const ServerExchange&) = delete;
  ServerExchange& operator=(const ServerExchange&) = delete;

  const worker::EngineConfig& config() const { return config_; }

  void submit(Instant now, const worker::Operation& operation);
  void abort(Instant now, const worker::Operation& operation, const Status& why);
  /// The network does not take the operation's memory: it ends here too, with next_completion().
  void refuse(Instant now, const worker::Operation& operation, const Status& why);
  /// Sends what submit() and abort() have asked for.
  void flush(Instant now);
  bool step(Instant now);
  /// The engine's deadlines.
  void tick(Instant now);
  Instant next_deadline() const;
  /// What has ended, one after the other; false where nothing more has.
  bool next_completion(CompleteAction& action);
  /// Others may still want results of this worker.
  bool is_needed() const { return engine_ != nullptr && engine_->is_needed(); }
  bool has_unsent() const { return pump_ != nullptr && pump_->has_unsent(); }

  /// A server process is gone. False where no server is left.
  bool lose_server(Instant now, std::uint32_t server, const std::string& why);

  /// The network wants to know the memory that it uses: else any will do, without a hold.
  bool wants_holds() const { return memory_ != nullptr; }
  /// So that the network may use the memory. Throws Error.
  memory::Hold hold(std::span<std::byte> memory, MemoryKind kind = MemoryKind::kHost) {
    return memory_->hold(memory, kind);
  }
  /// The same for memory of the arena, which later operations use too.
  memory::Hold hold_shared(std::span<std::byte> memory) {
    return memory_->hold(memory, MemoryKind::kShared, memory::Reuse::kUntilInvalidated);
  }
  /// The memory's operation is over. A server that was lost may be sent to for a while yet: what is read for it stays
  /// registered so long, and so long lives what it belongs to.
  void release(std::span<const std::byte> memory, memory::Hold hold, std::shared_ptr<const void> owner = {});
  /// Ends the holds that nothing reads any more.
  void end_holds();

  /// Waits for the network, or one of these.
  void wait(Instant until, std::span<const int> descriptors) { options_.endpoint->wait(until, descriptors); }
  bool is_open() const { return engine_ != nullptr; }
  /// Everything has failed: nothing touches anybody's memory from now on, and nothing is submitted any more.
  void close();

  /// Writes what it has counted, and with each of config()'s lanes. After close() nothing.
  void count(RuntimeStats& stats, std::vector<PeerTraffic>& lanes) const;

 private:
  PumpLinks links();
  void report(const Unreachable& found) const;

  ServerExchangeOptions options_;
  memory::Domain* const memory_;  // Of the endpoint; may be null.
  worker::EngineConfig config_;
  memory::Buffer bounce_;  // Failover: where results land.
  // Null from close() on.
  std::unique_ptr<worker::Engine> engine_;
  std::unique_ptr<Pump<worker::Engine>> pump_;
  std::deque<CompleteAction> completions_;
  std::set<std::uint32_t> lost_servers_;
  // Of memory that ended operations have given back, while the network still reads it for a lost server.
  struct Lingering {
    std::span<const std::byte> memory;
    std::shared_ptr<const void> owner;  ///< Goes after the hold.
    memory::Hold hold;
  };
  std::vector<Lingering> lingering_;
};

}  // namespace herring::runtime
