#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/slot_pool.h"
#include "wire/reason.h"
#include "worker/engine.h"
#include "worker/items.h"

/// The worker engine's inside, shared by the files that implement it. Nobody else includes this.
namespace herring::worker {

inline constexpr std::uint32_t kNone = 0xFFFF'FFFF;

/// So many chunks from this one on, to be pushed in one message.
struct ChunkPush {
  std::uint32_t chunk = 0;
  std::uint32_t run = 1;
  Tag tag;
};

/// One lane's share of an operation: an item of it (items.h).
struct LanePart {
  std::uint32_t lane = 0;   // Index into EngineConfig::lanes.
  std::uint32_t index = 0;  // In Op::parts.
  Item item;
  ByteRange shard;
  std::uint32_t chunks = 0;
  IndexRange owned;              // Chunks that this process pushes and pulls.
  std::uint32_t announcers = 1;  // Processes of its contributor that announce to this lane.
  std::uint32_t answers = 1;     // Messages that come back where there are no chunks.
  bool has_roster = false;
  bool is_home = false;
  bool is_one_way = false;    // In one hop, of a lane in another process: nothing comes back.
  bool is_announced = false;  // Else it waits for an announce credit.
  bool is_eager = false;
  bool is_closing = false;              // Its receives are being withdrawn, ...
  bool is_done = false;                 // ... and nothing of it is in flight towards this process any more.
  std::uint64_t tag = 0;                // Of the Result of chunk 0; names this announce.
  std::uint64_t sequence = 0;           // Of the announce among those to this lane.
  std::uint32_t received = 0;           // Results that came, by chunk.
  std::uint32_t pushed = 0;             // Chunks pushed.
  bool has_error = false;               // The lane's Error came ...
  std::uint32_t results_sent = 0;       // ... which says how many Results it sent.
  std::vector<std::uint64_t> receives;  // Tokens, by owned chunk (one without payload where none is owned); 0: over.
  std::vector<bool> is_pushed;          // By owned chunk; with failover: granted.

  // In one hop.
  bool has_receives = false;       // Those that post_held_back() holds back are posted.
  std::vector<bool> is_sent;       // Of a part that is_one_way, by owned chunk: it has left, or a copy will.
  std::uint32_t sent = 0;          // How many have.
  std::vector<ChunkPush> waiting;  // To the lane in this process: others have yet to get the same.

  // With failover.
  std::uint32_t moved_by = 0;        // 1 + the number of the loss that moved it here; 0: none.
  bool is_settled = true;            // Everybody has what this was for, or heirs look after it.
  std::uint32_t eager_slot = kNone;  // Where all its Results land; else each has a slot of its own.
  std::vector<bool> held;            // By expected Result: what it brings is here.

  std::uint32_t expected() const { return is_one_way ? 0 : std::max(owned.count, answers); }
};

/// Running -> (all Results came) -> complete; or Running -> failed: Cancels sent, waits until no Result can be on its
/// way any more, gives the receives back -> complete with the first error. With failover, between the last Result and
/// the end: waits until all lanes say Settled, or ends for its user at once and waits with a copy of the result.
struct Op {
  std::uint64_t id = 0;
  Operation operation;
  std::deque<LanePart> parts;    // Grows when a lane dies, never shrinks.
  std::uint32_t open_parts = 0;  // Not is_done.
  std::uint32_t unsettled = 0;   // Parts that are not is_settled.
  bool is_one_hop = false;       // goes_in_one_hop()
  Roster answer;                 // Of a join: as it comes in.
  bool is_over = false;          // For its user: `retained` stands in for the memory from now on.
  std::shared_ptr<std::byte[]> retained;
  std::uint64_t retained_bytes = 0;       // As counted against EngineConfig::retain_bytes.
  Status suspicion;                       // A send that failed: the reason given where its lane turns out to be alive.
  std::uint32_t payload_sends = 0;        // Sends on their way that borrow the operation's memory.
  std::shared_ptr<std::byte[]> outgoing;  // One hop: what is pushed later than the result may come.
  std::vector<std::uint64_t> copied;      // Where chunks begin that are in `outgoing`, in order. Of all rails.
  Instant copies_at = Instant::max();     // One hop: when what still waits for other lanes goes to `outgoing`.
  bool has_failed = false;
  Status failure;
  Instant submitted;
  Instant timer = Instant::max();

  std::uint32_t pusher() const {
    return operation.pusher == kPusherIsRoot ? operation.descriptor.root : operation.pusher;
  }
  bool has_one_pusher() const { return herring::has_one_pusher(operation.descriptor.collective); }
  bool pushes() const {
    if (!operation.roster.empty()) return is_in(operation.roster, operation.contributor);
    return !has_one_pusher() || operation.contributor == pusher();
  }
  /// A single pusher has the data already.
  bool pulls_data() const { return !has_one_pusher() || operation.contributor != pusher(); }
};

struct Lane {
  PeerId peer;
  bool is_near = false;  // One of EngineConfig::near_lanes.
  bool lost = false;
  std::string why_lost;
  std::uint32_t credits = 0;
  std::uint32_t eager = 0;    // Unfinished eager announces.
  std::uint32_t one_way = 0;  // Announces of parts that are is_one_way which the lane has not said to be over.
  std::uint64_t next_sequence = 0;
  // Parts that wait for a credit: operation id, part index; 0 and a loss: that it is time to say Moved.
  std::deque<std::pair<std::uint64_t, std::size_t>> queue;
};

struct Receive {
  std::uint64_t op = 0;
  std::size_t part = 0;
  std::uint32_t chunk = 0;
  std::uint32_t retries = 0;
  std::uint32_t slot = kNone;  // With failover: of the lane's.
  std::uint32_t run = 1;       // Chunks in the message.
  bool is_withdrawn = false;   // The transport has been asked to give it back.
};

struct Send {
  std::uint64_t op = 0;
  std::size_t part = 0;
  bool borrows = false;                   // The operation's memory.
  bool matters = false;                   // Its failure fails the operation.
  std::shared_ptr<const void> keep = {};  // What the payload is read from, where it is not the user's.
  std::uint32_t receipt_lane = kNone;     // It is a Receipt.
  IndexRange answered = {};  // Chunks whose Results are received when it is over: they land on what it reads ...
  std::uint32_t run = 1;     // ... in messages of so many.
  IndexRange one_way = {};   // Chunks that the lane in this process may sum when it is over.
};

/// Whether the lanes of one rail, one in each host, get all of it each. The same on all who call the same operation.
bool goes_in_one_hop(const EngineConfig& config, const Operation& operation);
/// The bytes of a part by lane, and the lane that every contributor announces to.
std::vector<ByteRange> plan_part(const EngineConfig& config, const Operation& operation);
/// A shard that travels in its announce, where the lane has room for that.
bool is_small(const EngineConfig& config, std::uint64_t shard_bytes);
std::uint32_t home_lane(const EngineConfig& config, const OpKey& key, std::uint64_t rails);
bool are_on_one_rail(const EngineConfig& config, std::uint32_t lane, std::uint32_t other);
/// How many of a contributor's owners announce to a lane that has so many chunks, and which of them are this one's.
std::uint32_t announcers_of(const EngineConfig& config, std::uint32_t lane, std::uint32_t chunks,
                            const Operation& operation);
IndexRange owned_chunks(const EngineConfig& config, std::uint32_t lane, std::uint32_t chunks,
                        const Operation& operation);
/// Nobody has a byte of it.
inline bool is_empty(const Operation& operation) { return operation.descriptor.part_bytes == 0; }
Status check_operation(const EngineConfig& config, const Operation& operation);
/// One bit each, the first one lowest in the first byte.
void add_bitmap(std::vector<std::byte>& out, const std::vector<bool>& bits);
/// A Grant's "so many chunks in one message": 0 where it is nothing sensible.
std::uint32_t run_of(std::uint64_t said);
/// Picks the heirs of an item.
std::uint64_t heir_seed(const OpKey& key);

class Engine::Impl {
 public:
  explicit Impl(EngineConfig config);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // engine.cc
  void submit(Instant now, const Operation& operation);
  void take_actions(Actions& out);
  bool is_idle() const { return ops_.empty() && receives_.empty() && sends_.empty() && one_way_ == 0; }
  bool has_operations() const { return !ops_.empty(); }
  bool is_needed() const;
  void add_awaited(std::vector<PeerId>& lanes) const;
  Instant next_deadline() const;
  const EngineStats& stats() const { return stats_; }

  // engine_data.cc
  void on_control(Instant now, const wire::Header& header, std::span<const std::byte> body);
  void on_received(Instant now, Token token, const Status& status, const wire::Header& header);
  void on_sent(Instant now, Token token, const Status& status);

  // engine_failure.cc
  void on_withdrawn(Instant now, Token token);
  void abort(Instant now, const Operation& operation, const Status& why);
  void on_peer_lost(Instant now, PeerId peer, const std::string& why);
  void on_tick(Instant now);

 private:
  class Delivery;  // delivery.h
  class PlainDelivery;
  class RecoverableDelivery;

  // engine.cc
  std::uint32_t shard_of(const LanePart& part) const;
  void make_parts(Op& op) const;
  void add_parts(Op& op, std::uint32_t origin, ByteRange shard, bool is_home_shard) const;
  LanePart make_part(const Op& op, const Item& item, ByteRange shard, bool is_home_shard) const;
  void announce_or_queue(Op& op, std::size_t index);
  wire::Announce announce_of(const Op& op, const LanePart& part) const;
  void announce(Op& op, std::size_t index);
  void post_results(Op& op, std::size_t index);
  void post(Op& op, const Receive& receive);
  wire::Header header_to(const OpKey& key, wire::MessageType type) const;
  void send(PeerId to, Tag tag, const wire::Header& header, std::vector<std::byte> body,
            std::span<const std::byte> payload, const Send& record);
  void set_timer(Op& op, Instant when);
  void finish_part(LanePart& part, Op& op);
  void complete_if_done(Op& op);
  void forget(Op& op);
  Op* find_op(std::uint64_t id);
  Op* find_op(const OpKey& key);
  ByteRange run_range(const LanePart& part, std::uint32_t chunk, std::uint32_t run) const;
  std::span<std::byte> chunk_memory(const Op& op, const LanePart& part, std::uint32_t chunk,
                                    std::uint32_t run = 1) const;

  // engine_data.cc
  bool is_from_job(const wire::Header& header) const;
  Lane* lane_of(std::uint32_t peer);
  void handle_credit(const wire::Header& header);
  void handle_error(Instant now, const wire::Header& header, std::span<const std::byte> body);
  LanePart* find_part(Op& op, std::uint32_t peer, std::uint64_t tag);
  bool is_answered_later(const Op& op, const LanePart& part) const;
  void push(Op& op, LanePart& part, const ChunkPush& push);
  void post_answered(Op& op, const Send& sent);
  void take_result(Op& op, LanePart& part, const Receive& receive, std::uint64_t bytes);
  bool may_be_in_place(const Op& op, const LanePart& part, std::uint32_t chunk) const;
  bool is_expected(const Op& op, const LanePart& part, const Receive& receive, const wire::Header& header,
                   std::uint64_t bytes) const;
  void serve_queue(Lane& lane);

  // engine_one_hop.cc
  void sent_one_way(Op& op, LanePart& part);
  void post_held_back(Op& op);
  bool waits_for_others(const Op& op, const LanePart& part) const {
    return op.is_one_hop && !part.is_one_way && op.pushes() && !is_small(config_, part.shard.bytes);
  }
  bool is_held_back(const Op& op, std::uint32_t chunk, std::uint32_t run) const;
  void note_sent(Op& op, LanePart& part, const IndexRange& chunks);
  void finish_if_sent(Op& op, LanePart& part);
  void hold_back(Op& op, LanePart& part, const ChunkPush& push);
  void push_waiting(Op& op);
  void copy_unsent(Op& op);
  void hold_no_longer(Op& op);
  std::span<std::byte> outgoing_of(const Op& op, std::span<const std::byte> memory) const;

  // engine_failure.cc
  void fail(Instant now, Op& op, const Status& why);
  void give_up_part(Op& op, std::size_t index);
  void cancel(Op& op, std::size_t index, bool wants_answer);
  void cancel_unknown(const Operation& operation, const Status& why);
  void cancel_unannounced(const Op& op);
  void drain_part(Op& op, LanePart& part, bool force);
  void close_part(Op& op, LanePart& part);
  std::string timeout_text(const Op& op) const;
  /// When it fails if nothing comes of it.
  Instant deadline_of(const Op& op) const { return op.submitted + op.operation.timeout + config_.lane_grace; }

  EngineConfig config_;
  std::vector<Lane> lanes_;
  std::unique_ptr<Delivery> delivery_;
  std::unordered_map<PeerId, std::uint32_t> lane_index_;
  std::unordered_map<PeerId, std::string> lost_workers_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Op>> ops_;
  std::unordered_map<OpKey, std::uint64_t> by_key_;
  std::set<std::pair<Instant, std::uint64_t>> timers_;
  std::vector<std::uint32_t> losses_;  // Lanes, in the order in which they died.
  Instant now_{};                      // Of the event at hand.
  std::unordered_map<std::uint64_t, Receive> receives_;
  std::unordered_map<std::uint64_t, Send> sends_;
  std::uint64_t one_way_ = 0;  // Lane::one_way, over all that live.
  std::uint64_t next_op_ = 1;
  std::uint64_t next_token_ = 1;
  std::uint64_t next_tag_ = 1;
  Actions actions_;
  EngineStats stats_;
};

}  // namespace herring::worker
