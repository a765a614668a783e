#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/operation.h"
#include "core/status.h"
#include "core/types.h"
#include "intra_node/engine.h"
#include "intra_node/neighborhood.h"
#include "runtime/local_writes.h"
#include "runtime/placement.h"
#include "runtime/polite_wait.h"
#include "runtime/small_operation.h"
#include "server/reduce.h"

namespace herring::runtime {

struct HostExchangeOptions {
  Config config;
  std::vector<std::uint32_t> ranks;  ///< Of this host, by their local rank.
  std::uint32_t rank = 0;            ///< This one.
  std::shared_ptr<intra_node::Neighborhood> neighborhood;
  /// A message of the rings that is not the engine's.
  std::function<void(std::uint32_t from, std::span<const std::byte>)> on_message;
  /// What the engine leaves to others: NetworkAction, AbandonNetwork, CompleteLocal.
  std::function<void(Instant, const intra_node::LocalAction&)> on_action;
};

/// What the ranks of a host do together: their engine, the rings in shared memory between them, the copies and sums.
/// Used by the thread in the seat alone, where nothing else is said.
class HostExchange final {
 public:
  explicit HostExchange(HostExchangeOptions options);

  void submit(Instant now, const intra_node::LocalOperation& operation) { engine_->submit(now, operation); }
  void abort(Instant now, const OpKey& key, const Status& why) { engine_->abort(now, key, why); }
  /// The part's way through the network is over.
  void network_done(Instant now, const OpKey& key, const Status& status) { engine_->on_network_done(now, key, status); }
  /// Nobody here calls this operation any more.
  void forget(const OpKey& key) {
    if (engine_) engine_->forget(key);
  }
  /// The memory is known to all ranks of this host.
  bool contains(std::span<const std::byte> memory) const { return options_.neighborhood->contains(memory); }

  /// Gives the engine what has come. True where anything had.
  bool take_messages(Instant now);
  /// Carries out what the engine wants.
  bool run_actions(Instant now);
  bool flush_backlog();
  /// Messages to ranks of this host for which there was no room yet.
  bool has_backlog() const;
  /// The engine's deadlines; what it warns of.
  std::optional<intra_node::StallWarning> tick(Instant now);
  Instant next_deadline() const { return engine_ ? engine_->next_deadline() : Instant::max(); }

  /// A rank that may be of this host has done all that it will do: what it has not called here ends.
  void end_without(Instant now, std::uint32_t rank, const std::string& why);
  /// And nobody reads what it is sent.
  void rank_gone(std::uint32_t rank);
  /// Everything has failed: messages are only taken out of the rings from now on.
  void close();

  /// Any thread: whether exchange() could do this one, if nothing else goes on.
  bool is_small(const SmallOperation& operation) const;
  /// Nothing that exchange() could disturb goes on.
  bool may_exchange() const { return engine_ != nullptr && engine_->is_untroubled() && !has_backlog(); }
  /// All of a small operation, polling for at most `patience`: intra_node/shortcut.h. False where the engine has to go
  /// on; this rank's message to the others is out.
  bool exchange(const SmallOperation& operation, PoliteWait& wait, Duration patience);
  /// Any thread: what exchange() has done, with memory that all know and with other memory.
  std::uint64_t zero_copy_exchanges() const { return zero_copy_exchanges_.load(std::memory_order_relaxed); }
  std::uint64_t staged_exchanges() const { return staged_exchanges_.load(std::memory_order_relaxed); }

  /// As intra_node::Neighborhood's.
  bool prepare_sleep() { return options_.neighborhood->prepare_sleep(); }
  int doorbell_fd() const { return options_.neighborhood->doorbell_fd(); }
  void end_sleep() { options_.neighborhood->end_sleep(); }

 private:
  void execute(Instant now, intra_node::LocalAction& action);
  void send(std::uint32_t to, std::span<const std::byte> first, std::span<const std::byte> second,
            std::span<const std::byte> third);
  void send_to_all(std::span<const std::byte> first, std::span<const std::byte> second,
                   std::span<const std::byte> third);

  const HostExchangeOptions options_;
  const server::Isa isa_;
  LocalWrites writes_;
  std::unique_ptr<intra_node::Engine> engine_;  // Null from close() on.
  struct Neighbour {
    bool is_gone = false;
    std::deque<std::vector<std::byte>> backlog;
  };
  std::vector<Neighbour> neighbours_;               // By local rank.
  std::vector<std::span<const std::byte>> inputs_;  // Of the exchange under way.
  std::atomic<std::uint64_t> zero_copy_exchanges_{0};
  std::atomic<std::uint64_t> staged_exchanges_{0};
};

}  // namespace herring::runtime
