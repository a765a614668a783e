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

#include "core/loan.h"
#include "core/roster.h"
#include "core/status.h"
#include "core/types.h"
#include "wire/action.h"
#include "wire/header.h"

/// What a lane knows: of an operation, of those who take part in it, of its chunks, and of each worker. Nobody but the
/// server engine includes this.
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
  bool is_apart = false;    // Its pushes and Results are two messages each.
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

  bool is_lent() const { return std::ranges::any_of(inputs, &Input::is_loan); }
  Input& output() { return *std::ranges::find(inputs, false, &Input::is_loan); }
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
  std::uint32_t run = 1;     // In messages of so many chunks,
  std::uint32_t window = 0;  // and with so many of a worker in flight at most.
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

  // Of an operation that is ready.
  /// Who has this chunk for the contributor: its place among the participants.
  std::uint32_t owner_of(std::uint32_t contributor, std::uint32_t chunk) const {
    const std::vector<std::uint32_t>& processes = owners[contributor];
    if (processes.size() == 1) return processes.front();
    const auto owner = std::ranges::find_if(processes, [&](std::uint32_t i) { return participants[i].owns(chunk); });
    return owner == processes.end() ? processes.front() : *owner;  // There is one: make_ready() has checked that.
  }
  const Participant& owner(std::uint32_t contributor, std::uint32_t chunk) const {
    return participants[owner_of(contributor, chunk)];
  }
  /// What a run that begins at this chunk has of them: it ends where another process goes on for its contributor.
  std::uint32_t run_at(std::uint32_t chunk, std::uint32_t run) const {
    std::uint32_t count = std::min(run, chunks - chunk);
    for (std::uint32_t k = 0; count > 1 && k < owners.size(); ++k) {
      const wire::Announce& said = owner(k, chunk).announce;
      count = std::min(count, said.owned_first + said.owned_count - chunk);
    }
    return count;
  }
  /// The contributor whose data is the chunk's result: the single pusher, or one who has it from a lane that died.
  /// kNone where it has to be summed.
  std::uint32_t source_of(std::uint32_t chunk) const {
    if (has_one_pusher()) return shape.pusher;
    for (std::uint32_t k = 0; any_held && k < owners.size(); ++k) {
      if (owner(k, chunk).holds(chunk)) return k;
    }
    return kNone;
  }
  bool is_held_by_all(std::uint32_t chunk) const {
    if (!any_held) return false;
    for (std::uint32_t k = 0; k < owners.size(); ++k) {
      if (!owner(k, chunk).holds(chunk)) return false;
    }
    return true;
  }
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

}  // namespace herring::server
