#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "wire/action.h"
#include "wire/header.h"

/// Messages from one worker to another, as a pure state machine: (event, now) -> actions. docs/wire.md, "Point to
/// point", is the protocol; docs/adr/0004-point-to-point.md says why it is so.
namespace herring::point_to_point {

/// Tags with this bit are met by receives that name them, never by "any tag": what a collective sends to itself.
inline constexpr std::uint64_t kReservedTagBit = std::uint64_t{1} << 63;

/// One way to reach peers (shared memory, the network); the same on both ends.
struct LinkConfig {
  std::uint32_t chunk_bytes = 0;   ///< Large messages go in pieces of this.
  std::uint32_t window = 1;        ///< Pieces of one message in flight.
  std::uint32_t eager_bytes = 0;   ///< Messages up to this travel inside the envelope.
  std::uint32_t eager_window = 1;  ///< Of these, so many to one peer may be unreceived; more go as large ones do.
  std::uint32_t credits = 4;       ///< Control messages to one peer that it has not taken in; at least 2.
};

inline constexpr std::uint32_t kNoLink = 0xFFFF'FFFF;

struct EngineConfig {
  PeerId self;
  std::uint64_t job_id = 0;
  Epoch epoch;
  std::vector<std::uint32_t> link_of;  ///< By worker rank: index into links; kNoLink: unreachable, or self.
  std::vector<LinkConfig> links;
  std::uint32_t max_unmatched = 65536;  ///< Messages of one peer that wait for a receive; more are refused.
  std::uint32_t max_incoming = 256;     ///< Large messages coming in at once; more wait their turn.
  std::uint32_t max_incoming_of_peer = 4;
  Duration grace{};  ///< After a failure, how long the other side may take to say what is on its way.
};

/// Ends in exactly one completion, when `to` has received it. `data` is borrowed until then.
struct SendOperation {
  std::uint64_t handle = 0;  ///< Chosen by the caller; used once.
  GroupId group;
  PeerId to;
  std::uint64_t tag = 0;
  std::span<const std::byte> data;
  Duration timeout{};
  std::optional<DataType> dtype = std::nullopt;  ///< Where both sides say one, it must be the same.
  Status refusal = {};  ///< Not ok: cannot be sent; `data` is a size alone, and whoever receives it is told why.
};

/// Ends in exactly one completion. `memory` is borrowed until then, and has the size of the message.
struct ReceiveOperation {
  std::uint64_t handle = 0;
  GroupId group;
  std::vector<PeerId> sources;       ///< One of these; not empty.
  std::optional<std::uint64_t> tag;  ///< None: any without kReservedTagBit.
  std::span<std::byte> memory;
  Duration timeout{};
  std::optional<DataType> dtype = std::nullopt;
  Status refusal = {};  ///< Not ok: cannot be received; `memory` is a size alone, and the sender is told why.
};

/// What a receive got.
struct Received {
  PeerId source;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
};

struct Completion {
  std::uint64_t handle = 0;
  Status status;
  Received received;  ///< Of a receive that ended well, or met a message of another size.
};

struct EngineStats {
  std::uint64_t sent = 0;            ///< Messages that were received by the other side.
  std::uint64_t received = 0;        ///< Messages.
  std::uint64_t bytes_sent = 0;      ///< Of messages.
  std::uint64_t bytes_received = 0;  ///< Of messages.
  std::uint64_t failed = 0;          ///< Sends and receives.
  std::uint64_t messages_rejected = 0;
  std::uint64_t unmatched = 0;        ///< Messages that wait for a receive now.
  std::uint64_t held_bytes = 0;       ///< In bodies kept because they came before their receive, or out of order.
  std::uint64_t held_bytes_peak = 0;  ///< At most workers * (eager_window * eager_bytes + credits * (body limit)).
  std::uint64_t incoming_peak = 0;    ///< Large messages coming in at once.
};

/// The largest body of a control message on this link.
std::size_t max_body_bytes(const LinkConfig& link);

class Link;

/// Matching is MPI's and c10d's: a receive gets the earliest message of its group that fits it by source and tag, a
/// message the earliest receive that fits it; messages of one rank are matched in the order in which they were sent,
/// however the network reorders. A message and its receive differ in size or dtype: both ends get
/// kMismatch. Whatever the other side does, memory here is bounded: EngineStats::held_bytes_peak, at most eager_window
/// + credits bodies kept of each peer, and max_unmatched records a peer.
class Engine final {
 public:
  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void send(Instant now, const SendOperation& operation);
  void receive(Instant now, const ReceiveOperation& operation);
  /// Receives that no message has met complete with `why`.
  void cancel_unmatched_receives(const Status& why);
  /// The same for one group, and not for receives of reserved tags: those are collectives', which others join.
  void cancel_unmatched_receives(const Status& why, GroupId group);
  /// This worker has left the group: its sends and receives there fail with `why`, messages that wait for a receive are
  /// refused with it.
  void close_group(Instant now, GroupId group, const Status& why);
  /// This worker's sends and receives of that tag fail with `why`.
  void cancel(Instant now, GroupId group, std::uint64_t tag, const Status& why);

  /// A worker is gone: what needs it fails with kPeerLost (`why` names it). The executor also removes it from the
  /// endpoint, so that sends on their way complete.
  void on_peer_lost(Instant now, PeerId peer, const std::string& why);
  /// A worker said goodbye: what is on its way has `grace` to come; all else that needs it fails.
  void on_peer_left(Instant now, PeerId peer, const std::string& why);
  /// A worker calls nothing more in this group: what waits for it there has a moment for what is on its way. Not
  /// messages of reserved tags: those are collectives'.
  void on_member_left(Instant now, GroupId group, PeerId peer, const std::string& why);
  void on_tick(Instant now);
  Instant next_deadline() const;

  /// Moves what has ended to the end of `out`.
  void take_completions(std::vector<Completion>& out);

  /// The engine as the pump of link `index` sees it. Lives as long as the engine.
  Link& link(std::uint32_t index);
  /// What no link has to do: copies of this worker's messages to itself. Each ends with on_copied().
  void take_actions(Actions& out);
  void on_copied(Token token);
  /// Something that others wait for has not left this process: control messages, data. Receives and sends that wait
  /// for others do not count.
  bool has_unsent() const;
  /// Nothing is known, to be done, or on its way.
  bool is_idle() const;
  const EngineStats& stats() const;

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// What runtime::Pump drives.
class Link final {
 public:
  Link(Engine::Impl& engine, std::uint32_t index) : engine_(&engine), index_(index) {}
  /// `body` is borrowed for the call; where true comes back, until ReleaseAction{token}.
  bool on_control(Instant now, const wire::Header& header, std::span<const std::byte> body, Token token);
  /// A CopyAction has ended.
  void on_copied(Instant now, Token token);
  void on_received(Instant now, Token token, const Status& status, const wire::Header& header);
  void on_sent(Instant now, Token token, const Status& status);
  void on_withdrawn(Instant now, Token token);
  void take_actions(Actions& out);
  /// Something is awaited from other workers: whether the links to them work matters.
  bool is_waiting() const;
  /// Adds the workers that something is awaited from. Receives that take any source do not count.
  void add_awaited(std::vector<PeerId>& workers) const;

 private:
  Engine::Impl* engine_;
  std::uint32_t index_;
};

}  // namespace herring::point_to_point
