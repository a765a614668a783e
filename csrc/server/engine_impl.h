#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/roster.h"
#include "core/slot_pool.h"
#include "server/adaptive_run.h"
#include "server/adaptive_window.h"
#include "server/engine.h"
#include "wire/reason.h"

/// The server engine's inside, shared by the files that implement it. Nobody else includes this.
namespace herring::server {

inline constexpr std::uint32_t kNone = 0xFFFF'FFFF;
/// What containers take for each entry beside it, roughly.
inline constexpr std::uint64_t kNodeBytes = 64;
inline constexpr std::uint64_t kNotAnnounced = ~std::uint64_t{0};  // Cancel: no announce of mine belongs to this.

/// What a lane keeps apart: an item of a part of an operation.
struct Key {
  OpKey op;
  std::uint32_t shard = 0;  // wire::Header::shard
  friend bool operator==(const Key&, const Key&) = default;
};
struct KeyHash {
  std::size_t operator()(const Key& key) const noexcept {
    return std::hash<OpKey>{}(key.op) ^ (key.shard * std::size_t{0x9E3779B97F4A7C15});
  }
};
inline Key key_of(const wire::Header& header) { return {header.key(), header.shard}; }

/// Whether its contributor's data is in the result.
inline bool is_pusher(const wire::Announce& announce) {
  return !has_one_pusher(announce.descriptor.collective) || announce.contributor == announce.pusher;
}

/// One process that takes part in an operation.
struct Participant {
  PeerId peer;
  wire::Announce announce;
  std::uint64_t tag = 0;         // Of its Results; also names this announce in Grant, Error and Cancel.
  std::uint32_t announcers = 1;  // Processes of its contributor that announce to this lane.
  Instant announced;
  std::uint32_t late = 0;   // wire::kWasLast
  bool silent = false;      // It gave the operation up without an announce: told nothing.
  bool counted = false;     // In its worker's numbers of unfinished announces.
  bool is_join = false;     // It asks for the roster.
  bool is_one_way = false;  // In one hop, in another process: its own lane answers it.
  bool eager = false;
  std::span<std::byte> data;  // Eager payload: its owned chunks, in a body that was kept.
  Token data_token;
  std::uint64_t push_tag = 0;                  // Chunk c is pushed to push_tag + c.
  std::uint32_t outstanding = 0;               // Receives posted for it and not finished.
  std::uint32_t pushed = 0;                    // Chunks that arrived.
  std::uint32_t results = 0;                   // Results sent, by chunk.
  std::uint64_t record_bytes = 0;              // What it counts in its worker's.
  std::optional<std::uint32_t> gave_up_after;  // Its Cancel came: it pushed so many chunks, no more will follow.
  std::uint32_t told_first = 0;                // Chunks granted in the present pass that it is not told of yet:
  std::uint32_t told_count = 0;                // so many,
  std::uint32_t told_run = 1;                  // in messages of so many each.
  bool told_pulls = false;

  // With failover.
  bool ready = false;      // Its receives are posted: no Ready is needed.
  bool receipted = false;  // It has all its Results.
  std::vector<bool> held;  // Announced because a lane died: by owned chunk, whether it has the result already.

  std::uint32_t expected_results() const {
    if (is_one_way) return 0;
    if (is_join) return roster_words(announce.contributor_count);
    return announce.owned_count == 0 ? 1 : announce.owned_count;
  }
  bool has_everything() const { return !silent && results >= expected_results(); }
  /// Nothing of it is missing.
  bool has_all_data() const { return eager || pushed >= announce.owned_count || !is_pusher(announce); }
  bool owns(std::uint32_t chunk) const {
    return chunk >= announce.owned_first && chunk - announce.owned_first < announce.owned_count;
  }
  bool holds(std::uint32_t chunk) const { return !held.empty() && owns(chunk) && held[chunk - announce.owned_first]; }
};

struct Input {
  std::span<std::byte> data;
  std::uint32_t slot = kNone;  // The first one.
  std::uint64_t token = 0;     // Of the posted receive; 0: the data is there.
  bool is_loan = false;        // It has no slot: its worker lends it.
  std::shared_ptr<Loan> loan;  // Until it is summed.
};

/// A chunk, or a run of them that travels in one message, between its grant and the completion of its Results' sends.
struct Chunk {
  std::uint32_t count = 1;
  std::uint32_t order = 0;             // Of the slots that each input has (slot_pool.h).
  std::vector<Input> inputs;           // By contributor; a single one where `source` is set.
  std::uint32_t source = kNone;        // The contributor whose data is the result; kNone: they are summed.
  std::vector<std::uint32_t> unready;  // Participants whose Ready is missing.
  std::uint32_t missing = 0;
  std::uint32_t sends = 0;
  bool is_reducing = false;  // Its inputs are in use.
  Instant granted;
};

/// A control message.
struct Arrival {
  wire::Header header;
  std::span<std::byte> body;
  Token token;
  bool is_kept = false;  // The body, until ReleaseAction.
};

/// What one process announced, kept until an earlier operation of the same key is out of the way.
struct Deferred {
  Arrival arrival;
  std::vector<std::byte> body;  // Where it is not kept: it came without data.
};

/// A Cancel that overtook its announce.
struct HeldCancel {
  wire::Header header;
  std::vector<std::byte> body;
};

/// kGathering -> kReady (all have announced and agree) -> kFinishing (all Results handed out) -> gone.
/// kGathering or kReady -> kFailed: drains what is in flight, then stays as a tombstone that answers late announces.
/// With failover kFinishing lasts until everybody has said to have all (Receipt), and is told so (Settled).
/// With backup workers kReady -> kKept (all is summed, some have not announced yet) -> kFinishing.
enum class OpState : std::uint8_t { kGathering, kReady, kKept, kFinishing, kFailed };

/// With backup workers (docs/adr/0007-backup-workers.md), of an operation that may do without some of its contributors.
struct Backup {
  bool is_join = false;                // Nothing is summed: who is in is decided here.
  Roster roster;                       // Who is in. Of a join: once it is decided.
  std::vector<std::uint32_t> in;       // The same as a list.
  bool waits_for_all = false;          // A join: who is missing is owed too much to go on without.
  std::uint32_t in_complete = 0;       // Of these, those that have announced.
  Instant decide_at = Instant::max();  // A join: the end of the grace.
  std::shared_ptr<std::byte[]> kept;   // The shard's results, for those who have not come ...
  std::vector<bool> is_kept;           // ... by chunk: whether it is there.
  std::uint64_t room = 0;              // What it takes of EngineConfig::backup_bytes.
};

/// Why the next chunks of an operation cannot be granted. As long as it stands, nobody looks at all contributors again:
/// each push of each of them is an occasion to grant, and a chunk would cost the square of their number.
struct Obstacle {
  std::uint32_t run = 1;     // In messages of so many chunks.
  std::size_t slots = 0;     // So many have to be free,
  PeerId worker;             // or, where that is 0, this worker's window has to have room
  std::uint32_t room = 0;    // for so many chunks more.
  std::uint64_t grants = 0;  // As many chunks had been granted by then: each may have taken what was free.
};

struct Op {
  std::uint64_t id = 0;
  Key key;
  OpState state = OpState::kGathering;
  wire::Announce shape;  // What the first one said.
  std::vector<Participant> participants;
  std::vector<std::uint32_t> places;               // By peer: 1 + where it is among these; 0, or no entry: nowhere.
  std::vector<std::vector<std::uint32_t>> owners;  // By contributor: participants, in order of their first chunk.
  std::uint32_t contributors_complete = 0;
  bool disagreed = false;
  bool any_eager = false;
  bool has_near = false;    // EngineConfig::near_worker has announced it.
  bool is_one_hop = false;  // Nobody but the worker in this process gets the result.
  bool drained = false;     // kFailed: nothing of it is in flight any more.
  std::uint32_t chunks = 0;
  std::uint32_t next_chunk = 0;      // The first one not granted.
  std::optional<Obstacle> obstacle;  // To that.
  std::uint32_t chunks_done = 0;
  std::unordered_map<std::uint32_t, Chunk> in_flight;  // By its first chunk.
  std::uint32_t sends = 0;                             // Results on their way.
  Instant first_announce;
  Instant hasty_since = Instant::max();  // The first announce with less than kNoHaste.
  Instant deadline = Instant::max();
  Duration timeout{};                  // Of whose deadline it is.
  Instant stalls_at = Instant::max();  // Then it is worth a warning.
  Instant timer = Instant::max();      // Its entry in Engine::Impl::timers_.
  Status failure;
  std::vector<Deferred> deferred;

  // With failover.
  std::uint32_t moved_by = 0;  // 1 + the loss that brought it here; 0: none.
  bool any_held = false;       // Somebody has some of the result already, so all had announced it elsewhere.
  bool urgent = false;         // Somebody waits for Settled.
  bool given_up = false;       // Whoever has not sent a Receipt by now is not waited for.

  std::unique_ptr<Backup> backup;  // Null: all take part.

  /// Null where it has no part in it. A worker has one at most while the operation lives.
  Participant* find(PeerId peer) {
    const std::uint32_t place = peer.value < places.size() ? places[peer.value] : 0;
    return place == 0 ? nullptr : &participants[place - 1];
  }
  const Participant* find(PeerId peer) const { return const_cast<Op*>(this)->find(peer); }
  Participant& add(Participant participant) {
    const std::size_t peer = participant.peer.value;
    if (places.size() <= peer) places.resize(peer + 1);
    participants.push_back(std::move(participant));
    places[peer] = static_cast<std::uint32_t>(participants.size());
    return participants.back();
  }
  Instant due() const { return std::min(deadline, stalls_at); }
  bool is_live() const { return state == OpState::kGathering || state == OpState::kReady || state == OpState::kKept; }
  bool may_lack_some() const { return backup != nullptr; }
  bool is_join() const { return backup != nullptr && backup->is_join; }
  /// Contributors that are not in, or may turn out not to be, and have not announced.
  std::uint32_t absentees() const {
    return backup != nullptr ? static_cast<std::uint32_t>(owners.size()) - contributors_complete : 0;
  }
  bool sums(std::uint32_t contributor) const { return backup == nullptr || is_in(backup->roster, contributor); }
  bool has_one_pusher() const { return herring::has_one_pusher(shape.descriptor.collective); }
  std::uint32_t pushers() const {
    if (has_one_pusher()) return 1;
    return backup == nullptr ? shape.contributor_count : static_cast<std::uint32_t>(backup->in.size());
  }
  std::uint64_t chunk_offset(std::uint32_t chunk) const {
    return shape.shard_offset + std::uint64_t{chunk} * shape.chunk_bytes;
  }
  std::uint32_t run_bytes(std::uint32_t chunk, std::uint32_t count) const {
    const std::uint64_t start = std::uint64_t{chunk} * shape.chunk_bytes;
    const std::uint64_t most = std::uint64_t{count} * shape.chunk_bytes;
    return static_cast<std::uint32_t>(std::min(most, shape.shard_bytes - start));
  }
  bool everyone_announced() const { return !owners.empty() && contributors_complete == owners.size(); }
};

struct WorkerState {
  bool lost = false;
  bool left = false;
  std::string why_lost;                              // Or why it left.
  std::uint64_t next_sequence = 0;                   // Every announce below it has arrived ...
  std::set<std::uint64_t> early;                     // ... and these above it.
  std::map<std::uint64_t, HeldCancel> held_cancels;  // By the sequence of the announce that they overtook.
  std::uint32_t uncredited = 0;
  std::uint32_t one_way_over = 0;  // Announces that are is_one_way and over, which it has not been told of.
  std::uint64_t credited = 0;      // Sent to it so far, beside those that it began with.
  bool credit_on_way = false;
  std::uint32_t answers_on_way = 0;                           // To its Cancels of what was over here ...
  std::deque<std::pair<Key, std::uint64_t>> answers_waiting;  // ... and those that wait for these: key and tag.
  std::uint32_t ops = 0;                                      // Announced, not finished.
  std::uint32_t eager = 0;                                    // Of those, eager.
  std::uint32_t granted = 0;                                  // Chunks granted, not arrived.
  std::uint64_t record_bytes = 0;                             // Its records of operations, failed ones too.

  bool has_seen(std::uint64_t sequence) const { return sequence < next_sequence || early.contains(sequence); }
};

struct Receive {
  std::uint64_t op = 0;
  std::uint32_t participant = 0;
  std::uint32_t chunk = 0;
  std::uint32_t input = 0;
  std::uint32_t retries = 0;
  bool is_withdrawn = false;  // The transport has been asked to give it back.
};

struct Send {
  std::uint64_t op = 0;  // 0: none.
  std::uint32_t chunk = kNone;
  PeerId peer;
  bool is_result = false;
  bool is_settled = false;
  bool is_credit = false;
  bool is_answer = false;
};

/// Ranks that a contributor of a group stands for, learnt from operations that became ready: names who is missing
/// later.
using GroupMembers = std::vector<wire::RankSpan>;  // By contributor.

class Engine::Impl {
 public:
  Impl(const EngineConfig& config, std::span<std::byte> slots);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // engine.cc
  bool on_control(Instant now, const wire::Header& header, std::span<std::byte> body, Token token);
  void on_received(Instant now, Token token, const Status& status, const wire::Header& header,
                   const std::shared_ptr<Loan>& loan);
  void on_reduced(Instant now, Token token, std::span<const NotFiniteInput> found);
  void on_sent(Instant now, Token token, const Status& status);
  void on_tick(Instant now);
  void on_core_wait(double share) { run_.on_core_wait(share); }
  Instant next_deadline() const;
  void take_actions(Actions& out);
  bool is_quiet() const;
  bool is_idle() const { return undrained_ == 0 && receives_.empty() && sends_.empty() && reducing_.empty(); }
  const EngineStats& stats() const { return stats_; }
  const std::vector<Lateness>& lateness() const { return lateness_; }
  std::string take_warning() { return std::exchange(warning_, {}); }

  // engine_failure.cc
  void on_withdrawn(Instant now, Token token);
  void on_peer_lost(Instant now, PeerId worker, const std::string& why);
  void on_peer_left(Instant now, PeerId worker, const std::string& why);

 private:
  class Delivery;  // delivery.h
  class PlainDelivery;
  class RecoverableDelivery;

  // engine.cc
  bool is_from_job(const wire::Header& header) const;
  void follow_up(Instant now);
  bool has_first(const Op& op) const;
  void note_stall(Instant now, Op& op);
  void set_timer(Op& op, Instant when);
  Op& create_op(const Key& key, Instant now);
  void erase_op(std::uint64_t id);
  void drop_eager_data(Op& op);
  Op* find_op(std::uint64_t id);
  Op* find_live(const Key& key);
  void end_live(const Op& op);
  wire::Header header_to(const Key& key, wire::MessageType type) const;
  void send(PeerId to, Tag tag, const wire::Header& header, std::vector<std::byte> body,
            std::span<const std::byte> payload, const Send& record);
  void send_error(PeerId to, const Key& key, std::uint64_t tag, std::uint32_t results, const Status& status,
                  bool is_answer = false);

  // engine_announce.cc
  void handle_announce(Instant now, Arrival& arrival);
  bool take_sequence(WorkerState& worker, std::uint64_t sequence);
  bool may_announce(const WorkerState& worker, PeerId peer, std::uint64_t sequence);
  void credit(PeerId peer, WorkerState& worker, bool is_due = false);
  bool is_one_way(const wire::Header& header) const;
  void note_one_way_over(Instant now, PeerId peer);
  void retire_one_way(Instant now, Op& op);
  void defer(Op& op, Arrival& arrival);
  static bool has_deferred(const Op& op, PeerId peer);
  void undefer(const Deferred& deferred);
  void process_announce(Instant now, Arrival& arrival);
  Op& open_op(Instant now, const wire::Header& header, const wire::Announce& announce, const Roster& roster);
  void keep_data(Op& op, Participant& participant, Arrival& arrival, std::size_t bytes);
  Status check_announce(const wire::Header& header, const wire::Announce& announce,
                        std::span<const std::byte> data) const;
  bool join_tombstone(Instant now, const wire::Header& header, const wire::Announce& announce);
  Status check_place(const Op& op, const wire::Header& header, const wire::Announce& announce) const;
  bool agrees(const Op& op, const wire::Header& header, const wire::Announce& announce, const Roster& roster) const;
  Participant& add_participant(Op& op, const wire::Header& header, const wire::Announce& announce);
  void place_participant(Op& op, std::uint32_t index);
  void after_announce(Instant now, Op& op);
  void count_lateness(const Op& op, Participant& participant);
  void note_lateness(Op& op);
  void make_ready(Instant now, Op& op);

  // engine_records.cc
  std::uint64_t record_bytes_of(std::uint32_t contributors, bool is_first) const;
  void charge(Op& op, Participant& participant);
  void add_records(PeerId peer, std::uint64_t bytes);
  void drop_records(PeerId peer, std::uint64_t bytes);
  bool has_room_for_records(PeerId peer, std::uint64_t bytes);
  Status check_records(const wire::Header& header, const wire::Announce& announce, std::span<const std::byte> body);
  bool forget_oldest_failure();

  // engine_grant.cc
  enum class Grant : std::uint8_t { kAll, kNoSlots, kNoWindow };
  void schedule(Instant now);
  std::size_t looks_at(GroupId group);
  Grant grant_chunks(Instant now, Op& op);
  enum class Role : std::uint8_t { kNothing, kPush, kPull };
  Role role_of(std::uint32_t contributor, const Participant& owner, std::uint32_t chunk, std::uint32_t source) const;
  std::uint32_t source_of(const Op& op, std::uint32_t chunk) const;
  bool is_held_by_all(const Op& op, std::uint32_t chunk) const;
  std::uint32_t run_length(const Op& op) const;
  std::uint32_t run_at(const Op& op, std::uint32_t chunk, std::uint32_t run) const;
  std::uint32_t count_grantable(Op& op, std::uint32_t run);
  std::optional<Obstacle> obstacle_to(const Op& op, std::uint32_t number, std::uint32_t run, std::size_t& free);
  bool still_stands(const Obstacle& obstacle, std::uint32_t run) const;
  void tell(Op& op, Participant& participant, std::uint32_t chunk, std::uint32_t run, bool pulls);
  void send_grant(Op& op, Participant& participant);
  void give_slot(Op& op, std::uint32_t index, std::uint32_t number, std::uint32_t input, std::uint32_t bytes);
  bool lends(const Op& op, const Participant& participant, std::uint32_t bytes) const;
  bool is_small_one_hop(const Op& op) const { return op.is_one_hop && op.shape.shard_bytes <= config_.max_eager_bytes; }
  void grant_chunk(Instant now, Op& op, std::uint32_t number, std::uint32_t count, std::uint32_t order);
  std::uint32_t owner_of(const Op& op, std::uint32_t contributor, std::uint32_t chunk) const;
  void post(Op& op, Receive receive, std::span<std::byte> memory);
  void send_grants(Op& op);
  void finish_chunk(Instant now, Op& op, std::uint32_t number);
  Status not_finite(const Op& op, std::uint32_t number, std::span<const NotFiniteInput> found) const;
  static bool is_lent(const Chunk& chunk) { return std::ranges::any_of(chunk.inputs, &Input::is_loan); }
  static Input& output_of(Chunk& chunk) { return *std::ranges::find(chunk.inputs, false, &Input::is_loan); }
  void reduce_chunk(const Op& op, Chunk& chunk, std::uint32_t number);
  void send_results(Instant now, Op& op, std::uint32_t number);
  void send_result(Op& op, Participant& participant, std::uint32_t chunk, std::span<const std::byte> payload,
                   std::uint16_t flag = wire::kFlagNoPayload);
  void finish_op(Instant now, Op& op);
  void release_slots(const Chunk& chunk, Input& input);
  void retire(Participant& participant);

  // engine_failure.cc
  void fail(Instant now, Op& op, const Status& why);
  void handle_cancel(Instant now, const wire::Header& header, std::span<const std::byte> body);
  void answer_cancels(PeerId peer, WorkerState& worker);
  void give_up_unannounced(Instant now, const wire::Header& header, const Status& why);
  void drain(Instant now, Op& op, bool force);
  void drain_chunk(Op& op, Chunk& chunk, bool force);
  void bury(Instant now, Op& op);
  bool may_forget(const Op& op) const;
  bool needs(const Op& op, PeerId peer) const;
  bool waits_in_vain(const Op& op, PeerId left) const;
  Op* find_failed(const Key& key, PeerId peer, std::uint64_t tag);

  // engine_roster.cc
  Status take_roster(const wire::Header& header, const wire::Announce& announce, std::span<const std::byte>& rest,
                     Roster& roster) const;
  void after_rostered(Instant now, Op& op);
  void try_to_decide(Instant now, Op& op);
  void decide(Instant now, Op& op);
  void send_roster(Op& op, Participant& participant);
  void note_late_join(Op& op, Participant& participant);
  void serve_late(Instant now, Op& op, Participant& participant);
  void send_kept(Op& op, Participant& participant, std::uint32_t chunk);
  void keep(Op& op, std::uint32_t number, std::span<const std::byte> output);
  bool take_room(Op& op);
  void give_back_room(Op& op);
  void look_for_room();
  bool are_missing_behind(const Op& op) const;
  void note_missing(const Op& op);
  void note_came(const Op& op, std::uint32_t contributor);
  void forget_missing(const Op& op);

  // engine_text.cc
  std::string mismatch_text(const Op& op) const;
  std::string late_mismatch_text(const Op& op, const wire::Header& header, const wire::Announce& announce) const;
  std::string timeout_text(const Op& op) const;
  void keep_time(Instant now, Op& op, const wire::Announce& announce);
  std::string stall_text(Instant now, const Op& op) const;
  std::vector<std::uint32_t> ranks_of(const Participant& participant) const;
  std::string missing_text(const Op& op) const;
  const GroupMembers* members(const Op& op) const;

  EngineConfig config_;
  std::span<std::byte> slots_;
  SlotPool pool_;
  AdaptiveWindow window_;
  AdaptiveRun run_;
  std::vector<WorkerState> workers_;
  std::unique_ptr<Delivery> delivery_;
  std::vector<PeerId> lost_;
  std::vector<PeerId> left_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Op>> ops_;
  std::unordered_map<Key, std::uint64_t, KeyHash> live_;
  std::unordered_map<Key, std::vector<std::uint64_t>, KeyHash> failed_;
  std::deque<std::uint64_t> failed_order_;
  std::deque<std::pair<std::uint64_t, GroupId>> ready_;  // Operation, and whose it is.
  std::vector<std::pair<GroupId, std::size_t>> looked_;  // Of the pass at hand.
  std::set<std::pair<Instant, std::uint64_t>> timers_;
  std::unordered_map<std::uint64_t, Receive> receives_;
  std::unordered_map<std::uint64_t, Send> sends_;
  std::unordered_map<GroupId, GroupMembers> groups_;
  std::vector<Lateness> lateness_;                                                       // By worker.
  std::unordered_map<std::uint64_t, std::pair<std::uint64_t, std::uint32_t>> reducing_;  // Operation, chunk.
  std::vector<std::uint64_t> roomless_;  // Operations that wait for memory to keep their results in.
  std::uint64_t owed_bytes_ = 0;
  /// By group and contributor: operations that were decided here without it and that it has not come to.
  std::map<std::pair<GroupId, std::uint32_t>, std::uint32_t> behind_;
  bool room_changed_ = false;
  std::deque<Deferred> replay_;
  std::uint64_t next_op_ = 1;
  std::uint64_t next_token_ = 1;
  std::uint64_t grants_ = 0;  // Chunks granted so far, a run as one.
  std::uint64_t next_tag_ = 1;
  Instant one_way_due_ = Instant::max();  // When WorkerState::one_way_over is told at the latest.
  std::string warning_;
  Instant next_warning_{};
  std::size_t undrained_ = 0;  // Operations that are neither over nor tombstones.
  Actions actions_;
  EngineStats stats_;
};

/// "rank 3", "ranks 0-2, 5"; sorts its argument.
std::string rank_list(std::vector<std::uint32_t> ranks);

}  // namespace herring::server
