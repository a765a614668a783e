#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "point_to_point/engine.h"

/// The point-to-point engine's inside, shared by the files that implement it. Nobody else includes this.
namespace herring::point_to_point {

/// A control message that waits for a credit.
struct Outgoing {
  wire::Header header;
  std::vector<std::byte> body;
  std::uint64_t send = 0;  // The Envelope of this send: made when it goes.
};

/// The body of a control message, which is the executor's.
struct Body {
  std::span<const std::byte> bytes;
  Token token;
  bool is_kept = false;  // Until ReleaseAction.
};

struct Held {
  wire::Header header;
  Body body;
};

/// The two channels of control messages to and from one worker: numbered, taken in in order, credited.
struct Peer {
  PeerId id;
  std::uint32_t link = kNoLink;
  std::uint32_t credits = 0;
  std::uint64_t next_out = 0;
  std::deque<Outgoing> queue;
  std::uint64_t next_in = 0;
  std::map<std::uint64_t, Held> held;  // Came before their turn.
  std::uint32_t to_return = 0;         // Taken in, credit not given back.
  std::uint32_t eager_out = 0;         // Our eager messages that it has not received.
  std::uint32_t eager_in = 0;          // Its eager messages that wait here for a receive.
  std::uint32_t unmatched = 0;         // All its messages that do.
  std::uint32_t copying = 0;           // Its messages that are being copied: an Accept of each is to come.
  std::uint32_t incoming = 0;          // Its large messages that are coming in ...
  std::deque<std::uint64_t> waiting;   // ... and the receives whose turn has not come.
  std::size_t unsent = 0;              // In the queue, or under way to it.
  bool lost = false;
  bool left = false;
  std::string why;

  bool is_gone() const { return lost || left; }
};

/// Queued (its envelope waits for a credit) -> announced -> received by the other side: over.
/// Failed: withdrawn, until the other side has answered or the grace has passed: over. Completes when it is over and no
/// transport reads its memory any more.
struct Send {
  std::uint64_t id = 0;
  SendOperation operation;
  std::uint32_t chunks = 0;
  std::uint32_t invited = 0;
  std::uint32_t pushed = 0;
  std::uint32_t flying = 0;  // Posts that borrow the data.
  bool is_queued = false;
  bool is_eager = false;
  bool is_over = false;
  bool is_copied = false;  // To this worker itself, and about to end.
  Status doom;             // What it fails with at `timer`; Ok: its time-out.
  Status failure;
  Instant timer = Instant::max();
};

/// Posted -> matched (-> waiting for its turn) -> coming in -> complete; or failed: says so, waits until what was
/// pushed has come or the grace has passed, withdraws its receives, completes when it has them all back.
struct Receive {
  std::uint64_t id = 0;
  ReceiveOperation operation;
  bool is_matched = false;
  bool is_waiting = false;
  bool is_copied = false;  // It is all there, and about to end.
  bool has_failed = false;
  bool is_closing = false;  // Its posted receives are being withdrawn.
  Received met;
  std::uint64_t send_id = 0;  // The sender's.
  std::uint32_t chunks = 0;
  std::uint64_t base_tag = 0;
  std::uint32_t invited = 0;
  std::uint32_t received = 0;
  std::map<std::uint32_t, std::uint64_t> open;  // Chunk -> token of its posted receive.
  std::optional<std::uint32_t> pushed;          // What the sender says it has pushed.
  Status doom;                                  // As Send::doom.
  Status failure;
  Instant timer = Instant::max();

  bool is_wild() const { return operation.sources.size() > 1 || !operation.tag; }
};

/// A message that waits for a receive.
struct Envelope {
  std::uint64_t arrival = 0;
  PeerId source;
  std::uint64_t send_id = 0;  // The sender's; ours where the source is this worker.
  GroupId group;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  std::uint32_t dtype = 0;  // DataType's number, 0: not said.
  bool is_eager = false;
  std::span<const std::byte> data;  // Of an eager message: it lies in this body, which is kept while it waits.
  Token body;
};

/// A copy that has not ended.
struct Copy {
  Token token;
  std::uint64_t receive = 0;
  std::uint64_t send = 0;  // Of this worker to itself; else 0, and
  Token body;              // from there.
};

/// What waits for its counterpart in one group. Ids and arrivals grow: the smallest is the earliest.
struct Box {
  std::map<std::uint64_t, Envelope> unmatched;                                 // By arrival.
  std::set<std::tuple<PeerId, std::uint64_t, std::uint64_t>> unmatched_index;  // Source, tag, arrival.
  std::set<std::tuple<PeerId, std::uint64_t, std::uint64_t>> receives;         // Source, tag, id.
  std::set<std::uint64_t> wild_receives;                                       // Id.

  bool is_empty() const { return unmatched.empty() && receives.empty() && wild_receives.empty(); }
};

/// A post that the transport has not completed.
struct Flight {
  enum class Kind : std::uint8_t { kControl, kData, kReceive };
  Kind kind = Kind::kControl;
  PeerId peer;
  std::uint64_t id = 0;  // Control: the send whose data it borrows, or 0. Data: the send. Receive: the receive.
  std::uint32_t chunk = 0;
  std::uint32_t retries = 0;
};

/// "tag 7", "the tag of gather, scatter or all_to_all call 12 of its group"
std::string tag_text(std::uint64_t tag);
std::string rank_text(PeerId peer);
/// "rank 3", "one of ranks 0, 2, 3"
std::string ranks_text(const std::vector<PeerId>& peers);
std::string seconds_text(Duration duration);

class Engine::Impl {
 public:
  explicit Impl(EngineConfig config);

  // engine.cc
  void send(Instant now, const SendOperation& operation);
  void receive(Instant now, const ReceiveOperation& operation);
  void take_completions(std::vector<Completion>& out);
  void take_actions(std::uint32_t link, Actions& out);
  Instant next_deadline() const { return timers_.empty() ? Instant::max() : std::get<0>(*timers_.begin()); }
  bool has_unsent() const;
  void add_unsent(Peer& peer);
  void take_unsent(Peer& peer, std::size_t count = 1);
  bool is_idle() const;
  bool is_waiting() const { return !sends_.empty() || !receives_.empty(); }
  void add_awaited(std::uint32_t link, std::vector<PeerId>& workers) const;
  const EngineStats& stats() const { return stats_; }
  Link& link(std::uint32_t index) { return links_.at(index); }
  void take_own_actions(Actions& out);

  // engine_match.cc
  void on_copied(Token token);

  // engine_channel.cc
  bool on_control(Instant now, std::uint32_t link, const wire::Header& header, std::span<const std::byte> body,
                  Token token);
  void on_sent(Instant now, Token token, const Status& status);

  // engine_transfer.cc
  void on_received(Instant now, Token token, const Status& status, const wire::Header& header);
  void on_withdrawn(Token token);

  // engine_failure.cc
  void cancel_unmatched_receives(const Status& why, std::optional<GroupId> group = {});
  void cancel(Instant now, GroupId group, std::uint64_t tag, const Status& why);
  void close_group(Instant now, GroupId group, const Status& why);
  void on_peer_lost(Instant now, PeerId peer, const std::string& why);
  void on_peer_left(Instant now, PeerId peer, const std::string& why);
  void on_member_left(Instant now, GroupId group, PeerId peer, const std::string& why);
  void on_tick(Instant now);

 private:
  using SendKey = std::pair<PeerId, std::uint64_t>;  // Source and its id of the send.
  enum class Kind : std::uint8_t { kSend, kReceive };

  // engine.cc
  Status check(const SendOperation& operation) const;
  Status check(const ReceiveOperation& operation) const;
  void set_timer(Send& send, Instant when);
  void set_timer(Receive& receive, Instant when);
  void complete_if_over(Send& send);
  void complete(Receive& receive, const Status& status);
  Send* find_send(std::uint64_t id);
  Receive* find_receive(std::uint64_t id);

  // engine_match.cc
  Box& box_of(GroupId group) { return boxes_[group]; }
  void drop_if_empty(GroupId group);
  void post(Receive& receive);
  void unpost(Receive& receive);
  std::uint64_t find_envelope(const Receive& receive) const;
  Receive* find_receive_for(const Envelope& envelope);
  static bool fits(const Receive& receive, const Envelope& envelope);
  // True where the body that the message lies in is needed still.
  bool arrive(Envelope envelope);
  bool meet(Receive& receive, const Envelope& envelope);
  void keep(Envelope envelope);
  Envelope take_unmatched(GroupId group, std::uint64_t arrival);
  void drop_unmatched_of(PeerId peer);
  void drop(GroupId group, std::uint64_t arrival);
  void release(PeerId source, Token body);
  bool is_being_copied(const SendKey& key) const;
  void accept(Receive& receive);
  void copy(Receive& receive, std::span<const std::byte> from, std::uint64_t own_send, Token body, Actions& actions);
  void meet_own(Receive& receive, const Envelope& envelope);
  void end_own(Send& send, Receive& receive, const Status& status);
  Status compare(const Receive& receive, const Envelope& envelope) const;
  void refuse(const Envelope& envelope, const Status& why);

  // engine_channel.cc
  wire::Header header_to(wire::MessageType type, std::uint64_t send_id) const;
  void enqueue(Peer& peer, wire::Header header, std::vector<std::byte> body = {});
  void dispatch(Peer& peer);
  void fill_envelope(Peer& peer, Outgoing& out, std::span<const std::byte>& payload, Flight& flight);
  void post_send(Peer& peer, Tag tag, const wire::Header& header, std::vector<std::byte> body,
                 std::span<const std::byte> payload, const Flight& flight);
  void take_in_held(Instant now, Peer& peer);
  bool take_credits(Peer& peer, const wire::Header& header);
  void take_in(Instant now, Peer& peer, const wire::Header& header, Body& body);
  void return_credits(Peer& peer);
  void handle_envelope(Peer& peer, const wire::Header& header, Body& body);
  void handle_accept(Peer& peer, const wire::Header& header);
  void hold_bytes(std::size_t bytes);

  // engine_transfer.cc
  void handle_invite(Instant now, Peer& peer, const wire::Header& header);
  void start_incoming(Receive& receive);
  void start_waiting();
  void advance(Receive& receive);
  void post_chunk(Receive& receive, std::uint32_t chunk, std::uint32_t retries);
  void end_incoming(Receive& receive);
  bool is_expected(const Receive& receive, std::uint32_t chunk, const wire::Header& header) const;

  // engine_failure.cc
  void handle_close(Peer& peer, const wire::Header& header, std::span<const std::byte> body);
  void handle_withdraw(Instant now, Peer& peer, const wire::Header& header, std::span<const std::byte> body);
  void fail(Instant now, Send& send, const Status& why);
  void fail(Instant now, Receive& receive, const Status& why);
  void drain(Receive& receive, bool force);
  void close(Receive& receive);
  bool all_gone(const std::vector<PeerId>& peers) const;
  Status gone_status(const std::vector<PeerId>& peers) const;
  Status timeout_of(const Send& send) const;
  Status timeout_of(const Receive& receive) const;

  Peer& peer_of(PeerId id) { return peers_[id.value]; }
  const Peer& peer_of(PeerId id) const { return peers_[id.value]; }
  const LinkConfig& link_config(const Peer& peer) const { return config_.links[peer.link]; }

  EngineConfig config_;
  std::vector<Peer> peers_;
  std::vector<Link> links_;
  std::vector<Actions> actions_;  // By link.
  Actions own_actions_;           // Of no link.
  std::map<std::uint64_t, std::unique_ptr<Send>> sends_;
  std::map<std::uint64_t, std::unique_ptr<Receive>> receives_;
  std::map<GroupId, Box> boxes_;
  std::map<SendKey, std::pair<GroupId, std::uint64_t>> unmatched_;  // -> group, arrival
  std::map<SendKey, std::uint64_t> incoming_;                       // Matched large messages -> receive.
  std::unordered_map<std::uint64_t, Flight> flights_;               // By token.
  std::vector<Copy> copies_;                                        // Few at a time.
  std::set<std::tuple<Instant, Kind, std::uint64_t>> timers_;
  std::vector<Completion> completions_;
  std::uint64_t next_id_ = 1;  // Of sends and receives.
  std::uint64_t next_arrival_ = 1;
  std::uint64_t next_tag_ = 1;
  std::uint64_t next_token_ = 1;
  std::uint32_t incoming_now_ = 0;
  std::size_t waiting_now_ = 0;
  std::uint32_t next_turn_ = 0;  // Peer that start_waiting() asks first.
  std::size_t unsent_ = 0;       // Of all peers that may wait for it: Peer::unsent.
  EngineStats stats_;
};

}  // namespace herring::point_to_point
