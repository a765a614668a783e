#include <algorithm>
#include <string>
#include <utility>

#include "server/delivery.h"
#include "server/reduce.h"

namespace herring::server {
namespace {

/// How far ahead of the oldest missing announce one may arrive; more is not reordering.
constexpr std::uint64_t kMaxAhead = 65536;
constexpr std::size_t kMaxGroups = 4096;
/// One-hop announces that are over are told with other credits, or after so long.
constexpr Duration kOneWayDelay = std::chrono::milliseconds(10);

bool same_shape(const wire::Announce& a, const wire::Announce& b) {
  return a.descriptor == b.descriptor && a.contributor_count == b.contributor_count && a.pusher == b.pusher &&
         a.average_over == b.average_over && a.shard_offset == b.shard_offset && a.shard_bytes == b.shard_bytes &&
         a.chunk_bytes == b.chunk_bytes;
}

std::uint32_t chunk_count(const wire::Announce& announce) {
  if (announce.shard_bytes == 0) return 0;
  return static_cast<std::uint32_t>((announce.shard_bytes - 1) / announce.chunk_bytes + 1);
}

std::uint64_t owned_bytes(const wire::Announce& announce) {
  const std::uint64_t first = std::uint64_t{announce.owned_first} * announce.chunk_bytes;
  const std::uint64_t end = first + std::uint64_t{announce.owned_count} * announce.chunk_bytes;
  return std::min(end, announce.shard_bytes) - std::min(first, announce.shard_bytes);
}

}  // namespace

void Engine::Impl::handle_announce(Instant now, Arrival& arrival) {
  const wire::Header& header = arrival.header;
  WorkerState& worker = workers_[header.sender];
  if (!may_announce(worker, PeerId{header.sender}, header.offset) || !take_sequence(worker, header.offset)) {
    ++stats_.messages_rejected;  // A copy of one that was taken in, or nonsense.
    return;
  }
  ++worker.uncredited;
  credit(PeerId{header.sender}, worker);
  process_announce(now, arrival);
  delivery_->after_announces(now);
  const auto held = worker.held_cancels.find(header.offset);
  if (held == worker.held_cancels.end()) return;
  const HeldCancel cancel = std::move(held->second);
  worker.held_cancels.erase(held);
  handle_cancel(now, cancel.header, cancel.body);
}

bool Engine::Impl::take_sequence(WorkerState& worker, std::uint64_t sequence) {
  if (worker.has_seen(sequence) || sequence - worker.next_sequence > kMaxAhead) return false;
  worker.early.insert(sequence);
  while (!worker.early.empty() && *worker.early.begin() == worker.next_sequence) {
    worker.early.erase(worker.early.begin());
    ++worker.next_sequence;
  }
  return true;
}

/// Whether it had a credit for the announce of this number. What it sends beyond that is not taken in, however much it
/// sends: this is what bounds what a lane remembers of announces that it has not taken in yet.
bool Engine::Impl::may_announce(const WorkerState& worker, PeerId peer, std::uint64_t sequence) {
  if (config_.announce_credits == 0 || sequence < worker.credited + config_.announce_credits) return true;
  ++stats_.over_credit;
  stats_.over_credit_by = peer;
  return false;
}

/// One Credit to a worker at a time: who does not read what it is sent gets no more of them.
void Engine::Impl::credit(PeerId peer, WorkerState& worker, bool is_due) {
  if (worker.credit_on_way || worker.lost) return;
  const bool has_many = worker.one_way_over >= std::max(1u, config_.eager_window / 2);
  const bool is_enough =
      config_.announce_credits != 0 && worker.uncredited >= std::max(1u, config_.announce_credits / 2);
  if (!is_enough && !has_many && !(is_due && worker.one_way_over > 0)) return;
  wire::Header header = header_to({}, wire::MessageType::kCredit);
  header.offset = std::exchange(worker.one_way_over, 0);
  if (config_.announce_credits != 0) {
    header.count = worker.uncredited;
    worker.credited += std::exchange(worker.uncredited, 0);
  }
  worker.credit_on_way = true;
  send(peer, kControlTag, header, {}, {}, {0, kNone, peer, false, false, true});
}

/// In one hop: its worker is in another process, and hears from the lane there.
bool Engine::Impl::is_one_way(const wire::Header& header) const {
  return (header.flags & wire::kFlagOneHop) != 0 && config_.near_worker != PeerId{header.sender};
}

/// Its worker counts such an announce until it hears that it is over: before that it does not leave the job.
void Engine::Impl::note_one_way_over(Instant now, PeerId peer) {
  WorkerState& worker = workers_[peer.value];
  ++worker.one_way_over;
  one_way_due_ = std::min(one_way_due_, now + kOneWayDelay);
  credit(peer, worker);
}

void Engine::Impl::retire_one_way(Instant now, Op& op) {
  for (Participant& participant : op.participants) {
    if (!participant.is_one_way || !participant.counted) continue;
    retire(participant);
    note_one_way_over(now, participant.peer);
  }
}

/// Until an earlier operation of its key is out of the way. Counted as what it will be.
void Engine::Impl::defer(Op& op, Arrival& arrival) {
  const wire::Header& header = arrival.header;
  WorkerState& worker = workers_[header.sender];
  ++worker.ops;
  Deferred deferred{arrival, {}};
  if ((header.flags & wire::kFlagEager) != 0) {
    ++worker.eager;
    arrival.is_kept = true;
  } else {
    deferred.body.assign(arrival.body.begin(), arrival.body.end());
  }
  add_records(PeerId{header.sender}, sizeof(Deferred) + arrival.body.size());
  op.deferred.push_back(std::move(deferred));
}

bool Engine::Impl::has_deferred(const Op& op, PeerId peer) {
  return std::ranges::any_of(op.deferred,
                             [peer](const Deferred& waiting) { return waiting.arrival.header.sender == peer.value; });
}

void Engine::Impl::undefer(const Deferred& deferred) {
  const wire::Header& header = deferred.arrival.header;
  WorkerState& worker = workers_[header.sender];
  --worker.ops;
  drop_records(PeerId{header.sender}, sizeof(Deferred) + deferred.arrival.body.size());
  if ((header.flags & wire::kFlagEager) != 0) --worker.eager;
}

void Engine::Impl::process_announce(Instant now, Arrival& arrival) {
  const wire::Header& header = arrival.header;
  const std::span<const std::byte> body = arrival.body;
  const PeerId peer{header.sender};
  const auto refuse = [&](const Status& status) {
    ++stats_.messages_rejected;
    send_error(peer, key_of(header), header.tag, 0, status);
    if (is_one_way(header)) note_one_way_over(now, peer);
  };
  const std::optional<wire::Announce> announce =
      body.size() < wire::kAnnounceBytes ? std::nullopt : wire::decode_announce(body.first(wire::kAnnounceBytes));
  if (!announce) {
    refuse(Status(Code::kProtocol, "a server refused an announce of rank " + std::to_string(peer.value) +
                                       ": its fields are out of range or contradict each other"));
    return;
  }
  const bool is_moved = (header.flags & wire::kFlagHeld) != 0;
  std::span<const std::byte> rest = body.subspan(wire::kAnnounceBytes);
  Roster roster;
  Status status = take_roster(header, *announce, rest, roster);
  const std::span<const std::byte> data = is_moved ? std::span<const std::byte>{} : rest;
  if (status.is_ok()) status = delivery_->check(header, *announce, rest);
  if (status.is_ok()) status = check_announce(header, *announce, data);
  if (status.is_ok()) status = check_records(header, *announce, body);
  if (!status.is_ok()) {
    refuse(status);
    return;
  }
  if (join_tombstone(now, header, *announce)) return;
  Op* op = find_live(key_of(header));
  if (op != nullptr) {
    const Participant* const mine = op->find(peer);
    if (mine != nullptr && mine->has_everything()) {
      // Its share of this one is over and it has started the next one of the same name.
      if (has_deferred(*op, peer)) {
        refuse(Status(Code::kProtocol, "rank " + std::to_string(peer.value) + " announced " +
                                           to_string(announce->descriptor) +
                                           " again before the last one could have ended"));
        return;
      }
      defer(*op, arrival);
      return;
    }
    Status place = check_place(*op, header, *announce);
    if (place.is_ok() && op->may_lack_some() && op->state != OpState::kGathering &&
        !agrees(*op, header, *announce, roster)) {
      place = Status(Code::kMismatch, late_mismatch_text(*op, header, *announce));
    }
    if (!place.is_ok()) {
      refuse(place);
      return;
    }
  } else {
    op = &open_op(now, header, *announce, roster);
  }
  keep_time(now, *op, *announce);
  if (!agrees(*op, header, *announce, roster)) op->disagreed = true;
  Participant& participant = add_participant(*op, header, *announce);
  if (!data.empty()) keep_data(*op, participant, arrival, data.size());
  participant.announced = now;
  delivery_->note(*op, header, rest);
  after_announce(now, *op);
}

/// The first announce of it says what it is.
Op& Engine::Impl::open_op(Instant now, const wire::Header& header, const wire::Announce& announce,
                          const Roster& roster) {
  Op& op = create_op(key_of(header), now);
  op.shape = announce;
  op.chunks = chunk_count(announce);
  op.is_one_hop = (header.flags & wire::kFlagOneHop) != 0;
  const bool is_join = (header.flags & wire::kFlagJoin) != 0;
  if (is_join || !roster.empty()) {
    op.backup = std::make_unique<Backup>();
    op.backup->is_join = is_join;
    op.backup->roster = roster;
    op.backup->in = members_of(roster);
  }
  live_.emplace(op.key, op.id);
  return op;
}

/// The first deadline of all who have announced it counts, and a stall from the first on who is in haste.
void Engine::Impl::keep_time(Instant now, Op& op, const wire::Announce& announce) {
  if (op.state != OpState::kGathering) return;
  const Duration timeout = std::chrono::milliseconds(announce.timeout_ms);
  const bool is_first_in_haste = timeout < kNoHaste && op.hasty_since == Instant::max();
  if (now + timeout >= op.deadline && !is_first_in_haste) return;
  if (now + timeout < op.deadline) {
    op.deadline = now + timeout;
    op.timeout = timeout;
  }
  if (is_first_in_haste) {
    op.hasty_since = now;
    if (config_.stall_warning < timeout) op.stalls_at = now + config_.stall_warning;
  }
  set_timer(op, std::min(op.timer, op.due()));
}

Status Engine::Impl::check_announce(const wire::Header& header, const wire::Announce& announce,
                                    std::span<const std::byte> data) const {
  const std::string who = "announce of rank " + std::to_string(header.sender) + ": ";
  const auto wrong = [&](const std::string& what) { return Status(Code::kProtocol, who + what); };
  const std::uint32_t chunks = chunk_count(announce);
  if (header.tag == 0 || (header.tag >> 63) != 0 || ((header.tag + chunks) >> 63) != 0) return wrong("bad result tag");
  if (header.count == 0 || header.count > config_.workers) return wrong("bad number of announcers");
  if (announce.contributor_count > config_.workers) {
    return wrong(std::to_string(announce.contributor_count) + " contributors in a job of " +
                 std::to_string(config_.workers) + " workers");
  }
  const std::uint64_t last = announce.first_rank + std::uint64_t{announce.rank_count - 1} * announce.rank_stride;
  if (last >= config_.workers) {
    return wrong("ranks outside the job");
  }
  if (chunks > 0 && announce.chunk_bytes > config_.max_chunk_bytes) {
    return Status(Code::kInvalidArgument, who + "chunks of " + std::to_string(announce.chunk_bytes) +
                                              " bytes; this server takes at most " +
                                              std::to_string(config_.max_chunk_bytes) +
                                              ". Set HERRING_CHUNK_BYTES to the same value everywhere");
  }
  if ((header.flags & wire::kFlagOneHop) != 0) {
    const bool is_plain = (header.flags & (wire::kFlagJoin | wire::kFlagRoster)) == 0;
    if (!config_.near_worker) return wrong("in one hop; this server is not in a worker's process");
    const bool is_large = announce.shard_bytes > config_.max_eager_bytes;
    if (!is_plain || (is_large && !reduces(announce.descriptor.collective))) {
      return wrong("in one hop, of what cannot go so");
    }
  }
  const bool eager = (header.flags & wire::kFlagEager) != 0;
  if ((header.flags & wire::kFlagApart) != 0) {
    constexpr std::uint16_t kNotTogether = wire::kFlagEager | wire::kFlagOneHop | wire::kFlagJoin | wire::kFlagRoster;
    if ((header.flags & kNotTogether) != 0) return wrong("in two messages, of what cannot go so");
    if (header.tag + chunks >= wire::kApartTag) return wrong("bad result tag");
  }
  if (!eager && !data.empty()) return wrong("data without the eager flag");
  if (eager) {
    if (announce.owned_count == 0 || !is_pusher(announce)) return wrong("eager data where none belongs");
    if (data.size() != owned_bytes(announce)) return wrong("eager data of the wrong size");
    if (data.size() > config_.max_eager_bytes) return wrong("eager data beyond the limit");
    if (workers_[header.sender].eager >= config_.eager_window) return wrong("too many unfinished eager announces");
  }
  if (workers_[header.sender].ops >= config_.max_ops_per_worker) {
    return Status(Code::kInvalidArgument, who + "more than " + std::to_string(config_.max_ops_per_worker) +
                                              " operations in flight; wait for some before starting more");
  }
  if (reduces(announce.descriptor.collective)) {
    return check({announce.descriptor.dtype, announce.descriptor.reduce, announce.average_over});
  }
  return Status::ok();
}

/// An operation of this key that failed and that this process has not yet heard of: it does now.
bool Engine::Impl::join_tombstone(Instant now, const wire::Header& header, const wire::Announce& announce) {
  const auto failed = failed_.find(key_of(header));
  if (failed == failed_.end()) return false;
  for (const std::uint64_t id : failed->second) {
    Op& op = *find_op(id);
    const bool known = std::any_of(op.participants.begin(), op.participants.end(), [&](const Participant& participant) {
      return participant.peer.value == header.sender;
    });
    if (known) continue;
    add_participant(op, header, announce);
    send_error(PeerId{header.sender}, op.key, header.tag, 0, op.failure);
    if (is_one_way(header)) note_one_way_over(now, PeerId{header.sender});
    return true;
  }
  return false;
}

/// Whether there is room for this process in an operation that others have announced.
Status Engine::Impl::check_place(const Op& op, const wire::Header& header, const wire::Announce& announce) const {
  const auto wrong = [&](const std::string& what) {
    return Status(Code::kProtocol, "rank " + std::to_string(header.sender) + " announced " +
                                       to_string(announce.descriptor) + " " + what);
  };
  if (op.find(PeerId{header.sender}) != nullptr) return wrong("twice");
  if (announce.contributor >= op.owners.size()) return Status::ok();
  const auto& owners = op.owners[announce.contributor];
  if (owners.empty()) return Status::ok();
  const Participant& first = op.participants[owners.front()];
  if (owners.size() >= first.announcers || header.count != first.announcers) {
    return wrong("as contributor " + std::to_string(announce.contributor) + ", which rank " +
                 std::to_string(first.peer.value) + " stands for");
  }
  if (op.disagreed || !same_shape(announce, op.shape)) return Status::ok();
  for (const std::uint32_t index : owners) {
    const wire::Announce& other = op.participants[index].announce;
    if (announce.owned_count > 0 && other.owned_count > 0 &&
        announce.owned_first < other.owned_first + other.owned_count &&
        other.owned_first < announce.owned_first + announce.owned_count) {
      return wrong("with chunks that rank " + std::to_string(op.participants[index].peer.value) + " owns");
    }
  }
  return Status::ok();
}

bool Engine::Impl::agrees(const Op& op, const wire::Header& header, const wire::Announce& announce,
                          const Roster& roster) const {
  const bool is_join = (header.flags & wire::kFlagJoin) != 0;
  const bool is_one_hop = (header.flags & wire::kFlagOneHop) != 0;
  if (!same_shape(announce, op.shape) || is_one_hop != op.is_one_hop || is_join != op.is_join()) return false;
  return is_join || (op.backup == nullptr ? roster.empty() : roster == op.backup->roster);
}

Participant& Engine::Impl::add_participant(Op& op, const wire::Header& header, const wire::Announce& announce) {
  Participant participant;
  participant.peer = PeerId{header.sender};
  participant.announce = announce;
  participant.tag = header.tag;
  participant.announcers = header.count;
  participant.is_join = (header.flags & wire::kFlagJoin) != 0;
  participant.is_one_way = is_one_way(header);
  participant.is_apart = (header.flags & wire::kFlagApart) != 0;
  op.has_near |= config_.near_worker == participant.peer;
  if (op.is_live()) {
    ++workers_[header.sender].ops;
    participant.counted = true;
  }
  charge(op, participant);
  Participant& added = op.add(std::move(participant));
  place_participant(op, static_cast<std::uint32_t>(op.participants.size() - 1));
  return added;
}

/// Its data is the end of the body, which stays where it is.
void Engine::Impl::keep_data(Op& op, Participant& participant, Arrival& arrival, std::size_t bytes) {
  participant.eager = op.any_eager = true;
  participant.data = arrival.body.last(bytes);
  participant.data_token = arrival.token;
  arrival.is_kept = true;
  stats_.bytes_received += bytes;
  ++workers_[participant.peer.value].eager;
}

void Engine::Impl::place_participant(Op& op, std::uint32_t index) {
  const Participant& participant = op.participants[index];
  const wire::Announce& announce = participant.announce;
  if (op.owners.size() < announce.contributor_count) op.owners.resize(announce.contributor_count);
  auto& owners = op.owners[announce.contributor];
  const auto place = std::upper_bound(owners.begin(), owners.end(), index, [&op](std::uint32_t a, std::uint32_t b) {
    return op.participants[a].announce.owned_first < op.participants[b].announce.owned_first;
  });
  owners.insert(place, index);
  if (owners.size() != op.participants[owners.front()].announcers) return;
  ++op.contributors_complete;
  if (op.backup != nullptr && is_in(op.backup->roster, announce.contributor)) ++op.backup->in_complete;
}

void Engine::Impl::after_announce(Instant now, Op& op) {
  for (const PeerId peer : lost_) {
    if (needs(op, peer)) {
      fail(now, op, Status(Code::kPeerLost, workers_[peer.value].why_lost));
      return;
    }
  }
  for (const PeerId peer : left_) {
    if (waits_in_vain(op, peer)) {
      fail(now, op, Status(Code::kPeerLost, workers_[peer.value].why_lost));
      return;
    }
  }
  if (op.disagreed) {
    if (op.everyone_announced()) {
      fail(now, op, Status(Code::kMismatch, mismatch_text(op)));
    } else {
      // The others follow soon, and the text should name them too.
      set_timer(op, std::min({op.timer, op.due(), now + config_.mismatch_grace}));
    }
    return;
  }
  if (op.may_lack_some()) {
    after_rostered(now, op);
  } else if (op.everyone_announced()) {
    make_ready(now, op);
  }
}

void Engine::Impl::count_lateness(const Op& op, Participant& participant) {
  const Duration late = participant.announced - op.first_announce;
  const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(late).count();
  participant.late = static_cast<std::uint32_t>(std::min<std::int64_t>(microseconds, wire::kWasLast - 1));
  Lateness& sum = lateness_[participant.peer.value];
  ++sum.announces;
  sum.total += late;
}

/// What moved here from a lost lane says nothing about who is slow.
void Engine::Impl::note_lateness(Op& op) {
  if (op.participants.size() < 2 || op.moved_by != 0) return;
  Participant* last = &op.participants.front();
  for (Participant& participant : op.participants) {
    count_lateness(op, participant);
    if (participant.announced >= last->announced) last = &participant;
  }
  if (op.absentees() > 0) return;  // Somebody will come later.
  last->late |= wire::kWasLast;
  ++lateness_[last->peer.value].last;
}

void Engine::Impl::make_ready(Instant now, Op& op) {
  GroupMembers ranks;
  for (const auto& owners : op.owners) {
    if (owners.empty()) continue;  // Not in, and not here yet.
    std::uint64_t covered = 0;
    for (const std::uint32_t index : owners) covered += op.participants[index].announce.owned_count;
    const Participant& first = op.participants[owners.front()];
    if (covered != op.chunks) {
      fail(now, op,
           Status(Code::kProtocol, "the processes of contributor " + std::to_string(first.announce.contributor) + " (" +
                                       rank_list(ranks_of(first)) + ") cover " + std::to_string(covered) + " of " +
                                       std::to_string(op.chunks) + " chunks"));
      return;
    }
    ranks.push_back(first.announce.ranks());
  }
  if (!op.may_lack_some() && (groups_.size() < kMaxGroups || groups_.contains(op.key.op.group))) {
    groups_[op.key.op.group] = std::move(ranks);
  }
  op.state = OpState::kReady;
  if (!op.may_lack_some()) note_lateness(op);
  for (Participant& participant : op.participants) {
    if (participant.announce.owned_count == 0) {
      if (!participant.is_one_way) send_result(op, participant, kNone, {});
    } else if (!participant.eager && delivery_->needs_grants(participant)) {
      participant.push_tag = next_tag_;
      next_tag_ += op.chunks;
    }
  }
  if (op.chunks == 0) {
    finish_op(now, op);
  } else if (op.absentees() > 0 && !take_room(op)) {
    roomless_.push_back(op.id);
  } else {
    line_up(op);
  }
}

}  // namespace herring::server
