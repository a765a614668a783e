#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/operation.h"
#include "core/status.h"
#include "core/types.h"

/// The ranks of one host reduce among themselves through memory that all of them map. A pure state machine like the
/// worker and server engines: (event, now) -> actions.
namespace herring::intra_node {

struct ByteSpan {  ///< A range of a part, in bytes.
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// One part of one operation among the group's ranks on this host.
struct LocalOperation {
  OpKey key;  ///< No other operation of the job has it, before or after.
  OpDescriptor descriptor;
  std::vector<std::uint32_t> members;      ///< Local ranks taking part, in the fixed order of summation; has this rank.
  std::vector<std::uint32_t> world_ranks;  ///< Their ranks in the job, for messages to people.
  /// Which bytes of the part each member reduces (same order as members); together they cover the part.
  std::vector<std::vector<ByteSpan>> owned;
  std::span<std::byte> memory;     ///< The caller's part: source and destination.
  std::uint32_t root = 0;          ///< kBroadcast, kAllGather: index into members.
  std::uint32_t average_over = 1;  ///< 1 where the network hop averages afterwards.
  bool network = false;            ///< After the local reduction: NetworkAction, then distribute its result.
  bool announced = false;          ///< A Shortcut has sent this rank's Ready (shortcut.h).
  Duration timeout{};
  Duration
      grace{};  ///< After the time-out, how long to wait for a verdict from the network, which knows who is missing.
};

inline constexpr std::uint32_t kEverybody = ~0u;

struct SendLocal {
  std::uint32_t to = 0;  ///< Local rank, or kEverybody: all others, where the order among other messages is free.
  std::vector<std::byte> bytes;
};
/// to[:] = from[:]; copy() of core/copy.h is made for it.
struct CopyAction {
  std::span<const std::byte> from;
  std::span<std::byte> to;
  bool bypass_cache = false;  ///< A hint: the whole result is larger than the caches.
  bool for_others = false;    ///< A hint: ranks on other cores read `to` next, and read it before.
};
struct ReduceLocal {
  ReduceSpec spec;
  std::vector<std::span<const std::byte>> inputs;  ///< In the fixed order of summation.
  std::vector<std::span<std::byte>> outputs;       ///< May be inputs, never a partial overlap.
  bool last_for_others = false;                    ///< As CopyAction's, for the last output where there are several.
};
/// This rank's owned bytes of `part` hold the host's partial result: take them over the network, put the final result
/// in the same place, then call on_network_done(key). `part` has the whole part's size; lies in this rank's arena.
struct NetworkAction {
  OpKey key;
  std::span<std::byte> part;
};
/// The operation has failed on this host, so its result is not wanted any more: end what NetworkAction began, which
/// then need not wait for servers that may never hear why, and tell others `why`. on_network_done(key) is still called.
struct AbandonNetwork {
  OpKey key;
  Status why;
};
struct CompleteLocal {
  OpKey key;
  Status status;
};
/// Done in order; each is finished before the next begins (NetworkAction is only started).
using LocalAction = std::variant<SendLocal, CopyAction, ReduceLocal, NetworkAction, AbandonNetwork, CompleteLocal>;
using LocalActions = std::vector<LocalAction>;

struct EngineConfig {
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;
  std::uint32_t inline_bytes = 0;  ///< Parts up to inline_limit() of it travel inside the messages themselves.
  bool check_finite = false;       ///< NaN and infinity in what is to be reduced fail the operation (kNotFinite).
  Duration stall_warning = Duration::max();  ///< An operation that waits for so long is worth a warning.
  std::vector<std::span<std::byte>> arenas;  ///< Each local rank's arena as mapped here; [local_rank] is our own.
  /// Staging memory of our own arena; empty span where full (the operation then fails with kUnavailable, naming
  /// HERRING_ARENA_BYTES). Bounded by what the caller has outstanding: the runtime windows the parts of one operation.
  std::function<std::span<std::byte>(std::size_t)> allocate;
  std::function<void(std::span<std::byte>)> deallocate;
};

/// The largest part that travels inside the messages among so many members, of which each sums all for itself: beyond
/// it, sharing the sum pays, although it takes a second round of messages.
std::uint64_t inline_limit(std::uint64_t inline_bytes, std::size_t members);

struct StallWarning {
  OpKey key;
  std::string text;
};

struct EngineStats {
  std::uint64_t ops_completed = 0;
  std::uint64_t ops_failed = 0;
  std::uint64_t bytes_copied = 0;
  std::uint64_t bytes_reduced = 0;  ///< Read by reductions.
  std::uint64_t staging_bytes = 0;  ///< In use now.
  std::uint64_t messages_rejected = 0;
};

/// How an all-reduce goes, for the member with index i:
///  1. memory inside our arena is used in place. Private memory: copy the ranges that others own into staging memory.
///     Send Ready{descriptor, location} to the other members. (Small parts: Ready carries the data, every member sums
///     for itself, done.)
///  2. All Ready and equal: reduce our own range from everybody's memory. In-place members get the result written where
///     they are; for staged members it is written once, into our staging memory, and into our own private memory.
///     (network: the partial goes to our slot, then NetworkAction; the rest when the network is done.)
///     Send Reduced.
///  3. On Reduced from member j: a staged member copies range j out. After all: complete; send Done to those whose
///     staging we read. Staging is freed when all who read it are done.
/// Broadcast: the root's memory is the only source; every other member copies from it when all are Ready. Barrier:
/// Ready only. Descriptors that differ: every member completes with kMismatch naming each world rank and what it said,
/// at the latest 2 s after the first difference was seen.
///
/// Failure (a time-out, a lost peer, the network, abort()): the first one is told to the other members, and each
/// completes with it. Whoever could be reading or writing our memory is waited for before the caller hears of it
/// (members answer as soon as their executor is between two actions; a lost one is not waited for), so that after
/// CompleteLocal nobody touches it, and a member that completes with Ok has summed what was there to be summed. A
/// member that does not answer within 1 s (stopped, hung) is named in the status: it may still write to in-place memory
/// when it comes back; staging memory stays out of use until it answers. An operation with the network completes after
/// on_network_done().
///
/// Keys are used once, but for those with the top bit of `op` set (names): used again in the same order on every
/// member.
class Engine final {
 public:
  explicit Engine(EngineConfig config);
  ~Engine();  ///< Gives all staging memory back, also what others may still read.
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Ends in exactly one CompleteLocal. A key in use completes with kInvalidArgument.
  void submit(Instant now, const LocalOperation& operation);
  void on_network_done(Instant now, const OpKey& key, const Status& status);
  /// Gives an operation up: completes with `why` here and tells the other members, who complete with it too (those who
  /// submit it later, at once). Unknown or finished keys are ignored. (The runtime: other parts of the same operation
  /// failed.)
  void abort(Instant now, const OpKey& key, const Status& why);
  /// This rank is done with the operation of that key, which it need not have submitted: what others said and say of it
  /// counts for nothing.
  void forget(const OpKey& key);
  /// A message from another rank; never trusted: bad ones are counted and dropped.
  void on_message(Instant now, std::uint32_t from, std::span<const std::byte> bytes);
  /// A local rank is gone: operations that need it fail with kPeerLost (`why` names it).
  void on_peer_lost(Instant now, std::uint32_t local_rank, const std::string& why);
  /// A local rank has done all that it will, and everything that it sent is delivered: operations that it has not
  /// called fail with kPeerLost.
  void on_peer_left(Instant now, std::uint32_t local_rank, const std::string& why);
  /// Call at or after next_deadline(), when all messages that have come are delivered.
  void on_tick(Instant now);
  Instant next_deadline() const;
  /// An operation that has waited for EngineConfig::stall_warning, and which ranks of this host have not called it:
  /// once for each operation, one of them in that time, and on one of the ranks that wait.
  std::optional<StallWarning> take_warning();

  /// Moves the actions to the end of `out`. Those of the call before have been carried out by now: what they refer to
  /// is freed here, so call it once more after the last action.
  void take_actions(LocalActions& out);
  /// Nothing is known, to be done or freed. (Memory that a hung member may still touch does not count.)
  bool is_idle() const;
  /// Nothing is known at all: no operation that anybody has called, no failure, no lost rank. A Shortcut may begin.
  bool is_untroubled() const;
  const EngineStats& stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::intra_node
