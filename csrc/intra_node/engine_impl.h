#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "intra_node/engine.h"
#include "intra_node/exchange.h"
#include "intra_node/local_message.h"

namespace herring::intra_node {

inline constexpr std::chrono::seconds kMismatchWait{2};  ///< For the rest to say what they mean, too.
inline constexpr std::chrono::seconds kLetGoWait{1};     ///< For the others to let go of a failed operation's memory.
inline constexpr std::size_t kMaxEarly = 65536;          ///< Operations that others have called and we have not.
inline constexpr std::size_t kMaxEarlyBytes = 64 << 20;  ///< Data of those, from one rank.
inline constexpr std::size_t kMaxTombstones = 4096;      ///< Failed operations whose late messages are dropped.
inline constexpr std::size_t kMaxForgotten = 256;        ///< Operations of which nothing is to be heard any more.
inline constexpr std::size_t kMaxPendingDones = 32;      ///< Then they go out by themselves.

class Engine::Impl {
 public:
  explicit Impl(EngineConfig config);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void submit(Instant now, const LocalOperation& operation);
  void on_network_done(Instant now, const OpKey& key, const Status& status);
  void abort(Instant now, const OpKey& key, const Status& why);
  void forget(const OpKey& key);
  void on_message(Instant now, std::uint32_t from, std::span<const std::byte> bytes);
  void on_peer_lost(Instant now, std::uint32_t local_rank, const std::string& why);
  void on_peer_left(Instant now, std::uint32_t local_rank, const std::string& why);
  void on_tick(Instant now);
  Instant next_deadline() const { return next_deadline_; }
  void take_actions(LocalActions& out);
  bool is_idle() const;
  bool is_untroubled() const;
  const EngineStats& stats() const { return stats_; }
  std::optional<StallWarning> take_warning() { return std::exchange(warning_, {}); }

 private:
  // The way of an operation (engine.cc).
  void begin(Instant now, Exchange& exchange);
  bool place(Instant now, Exchange& exchange);
  void announce(Exchange& exchange);
  void advance(Instant now, Exchange& exchange);
  void gathered(Instant now, Exchange& exchange);
  void reduce(Exchange& exchange);
  void share(Exchange& exchange);
  void try_finish(Exchange& exchange);
  void complete(Exchange& exchange, const Status& status);
  void try_retire(Exchange& exchange);
  void retire(Exchange& exchange);

  // What others say (engine_messages.cc).
  void on_ready(Instant now, std::uint32_t from, const LocalMessage& message);
  void on_reduced(std::uint32_t from, const LocalMessage& message);
  void on_done(std::uint32_t from, const LocalMessage& message);
  void on_error(Instant now, std::uint32_t from, const LocalMessage& message);
  Exchange* open_early(std::uint32_t from, const LocalMessage& message);
  void send(std::uint32_t to, const LocalMessage& message);
  void send_to_all(const LocalMessage& message);
  void send_dones(std::uint32_t to);
  void send_error(std::uint32_t to, const OpKey& key, const Status& status, bool reply);

  // What goes wrong (engine_failure.cc).
  bool check_agreement(Instant now, Exchange& exchange);
  void fail(Instant now, Exchange& exchange, const Status& status, bool relayed = false);
  void try_fail(Exchange& exchange);
  void report_failure(Exchange& exchange);
  void let_go(Exchange& exchange, std::uint32_t rank);
  void expire(Instant now, Exchange& exchange);
  void note_stall(Instant now, Exchange& exchange);
  void drop_early(const OpKey& key);
  void remember_failure(const OpKey& key, const Status& status);

  Exchange* find(const OpKey& key);
  Exchange* find_active(const OpKey& key);
  bool is_member(const Exchange& exchange, std::uint32_t rank) const;
  void wake_at(Instant deadline) { next_deadline_ = std::min(next_deadline_, deadline); }
  void emit(std::size_t first);

  EngineConfig config_;
  EngineStats stats_;
  std::unordered_map<OpKey, std::unique_ptr<Exchange>> exchanges_;
  std::size_t early_ = 0;                 // Exchanges in Stage::kEarly.
  std::vector<std::size_t> early_bytes_;  // Their data, by rank.
  std::size_t active_ = 0;
  std::size_t quarantined_ = 0;
  std::vector<std::optional<std::string>> lost_;   // By rank: why.
  std::vector<std::vector<OpKey>> pending_dones_;  // By rank: go along with the next message there.
  std::unordered_map<OpKey, Status> tombstones_;
  std::deque<OpKey> tombstone_order_;
  std::unordered_set<OpKey> forgotten_;
  std::deque<OpKey> forgotten_order_;
  // Finished, but actions that were not carried out yet refer to them; the second batch was taken already.
  std::vector<std::unique_ptr<Exchange>> retired_;
  std::vector<std::unique_ptr<Exchange>> retired_and_taken_;
  LocalActions actions_;
  Instant next_deadline_ = Instant::max();
  std::optional<StallWarning> warning_;
  Instant next_warning_{};
};

}  // namespace herring::intra_node
