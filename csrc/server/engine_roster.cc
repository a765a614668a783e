#include <algorithm>
#include <string>
#include <utility>

#include "server/engine_impl.h"

/// Backup workers on the lane's side (docs/adr/0007-backup-workers.md): who is in an operation, and what is kept for
/// those who are not and have not come yet.
namespace herring::server {
namespace {

/// What an operation that is kept takes besides its results; so the number of them is bounded as well.
constexpr std::uint64_t kRecordBytes = 1024;

}  // namespace

/// What only announces with backup workers may say; takes the roster from the front of what follows the body.
Status Engine::Impl::take_roster(const wire::Header& header, const wire::Announce& announce,
                                 std::span<const std::byte>& rest, Roster& roster) const {
  const auto wrong = [&](const std::string& what) {
    return Status(Code::kProtocol, "announce of rank " + std::to_string(header.sender) + ": " + what);
  };
  const bool is_join = (header.flags & wire::kFlagJoin) != 0;
  const bool has_roster = (header.flags & wire::kFlagRoster) != 0;
  if (!is_join && !has_roster) return Status::ok();
  if (config_.backup_workers == 0) return wrong("with backup workers; here HERRING_BACKUP_WORKERS is 0");
  if (is_join && has_roster) return wrong("asks for the roster and has it");
  const ReduceOp reduce = announce.descriptor.reduce;
  if (!reduces(announce.descriptor.collective) || (reduce != ReduceOp::kSum && reduce != ReduceOp::kAverage)) {
    return wrong("only sums and averages can do without a contribution");
  }
  if (header.count != 1) return wrong("with backup workers each process is a contributor");
  const std::uint32_t words = roster_words(announce.contributor_count);
  if (is_join) {
    const bool is_first = header.part == 0 && header.shard == 0;
    if (!is_first || announce.descriptor.part_bytes != 0 || !rest.empty()) return wrong("joins with data");
    return (header.tag + words) >> 63 == 0 ? Status::ok() : wrong("bad result tag");
  }
  const std::size_t bytes = std::size_t{words} * sizeof(std::uint64_t);
  if (header.shard != wire::kRosterShard || rest.size() < bytes) return wrong("a roster of the wrong size");
  roster = wire::decode_list(rest.first(bytes), words).value_or(Roster{});
  rest = rest.subspan(bytes);
  if (!is_sane(roster, announce.contributor_count)) return wrong("a roster of contributors that do not exist");
  const std::uint64_t owned = std::uint64_t{announce.owned_count} * announce.chunk_bytes;
  if (announce.owned_first != 0 || owned < announce.shard_bytes) return wrong("with a roster it owns all chunks");
  if ((header.flags & wire::kFlagEager) != 0 && !is_in(roster, announce.contributor)) {
    return wrong("data from a contributor that is not in the roster");
  }
  return Status::ok();
}

/// The last participant has just announced.
void Engine::Impl::after_rostered(Instant now, Op& op) {
  if (op.state != OpState::kGathering) return serve_late(now, op, op.participants.back());
  if (!op.is_join()) {
    if (op.backup->in_complete == op.backup->in.size()) make_ready(now, op);
    return;
  }
  if (op.everyone_announced()) return decide(now, op);
  const std::uint32_t needed =
      std::max(op.shape.contributor_count, config_.backup_workers + 1) - config_.backup_workers;
  if (op.contributors_complete < needed || op.backup->waits_for_all) return;
  if (op.backup->decide_at == Instant::max()) op.backup->decide_at = now + config_.backup_grace;
  if (are_missing_behind(op)) op.backup->decide_at = now;
  try_to_decide(now, op);
}

/// Whether nobody is missing but those who have not come to earlier operations either. The grace is for the others: who
/// is behind would be waited for in each operation until it has caught up, and nothing would be gained.
bool Engine::Impl::are_missing_behind(const Op& op) const {
  for (std::uint32_t contributor = 0; contributor < op.owners.size(); ++contributor) {
    if (op.owners[contributor].empty() && !behind_.contains({op.key.op.group, contributor})) return false;
  }
  return true;
}

void Engine::Impl::note_missing(const Op& op) {
  for (std::uint32_t contributor = 0; contributor < op.owners.size(); ++contributor) {
    if (op.owners[contributor].empty()) ++behind_[{op.key.op.group, contributor}];
  }
}

void Engine::Impl::note_came(const Op& op, std::uint32_t contributor) {
  const auto found = behind_.find({op.key.op.group, contributor});
  if (found != behind_.end() && --found->second == 0) behind_.erase(found);
}

/// The operation fails: nobody will come to it any more.
void Engine::Impl::forget_missing(const Op& op) {
  if (!op.is_join() || op.state != OpState::kKept) return;
  for (std::uint32_t contributor = 0; contributor < op.owners.size(); ++contributor) {
    if (op.owners[contributor].empty()) note_came(op, contributor);
  }
}

/// Without everybody: after the grace, and where those who are missing are not owed too much. Else it waits for them:
/// it does not look again, for who is always late would then hold all up and still never be in.
void Engine::Impl::try_to_decide(Instant now, Op& op) {
  if (now < op.backup->decide_at) {
    set_timer(op, std::min(op.backup->decide_at, op.due()));
    return;
  }
  if (take_room(op)) return decide(now, op);
  op.backup->waits_for_all = true;
  set_timer(op, op.due());
}

void Engine::Impl::decide(Instant now, Op& op) {
  set_timer(op, op.due());
  op.state = OpState::kReady;
  op.backup->roster.assign(roster_words(op.shape.contributor_count), 0);
  for (const Participant& participant : op.participants) add_to(op.backup->roster, participant.announce.contributor);
  op.backup->in = members_of(op.backup->roster);
  stats_.dropped += op.absentees();
  note_missing(op);
  note_lateness(op);
  for (Participant& participant : op.participants) send_roster(op, participant);
  finish_op(now, op);
}

void Engine::Impl::send_roster(Op& op, Participant& participant) {
  for (std::uint32_t word = 0; word < op.backup->roster.size(); ++word) {
    wire::Header header = header_to(op.key, wire::MessageType::kRoster);
    header.tag = participant.tag + word;
    header.chunk = word;
    header.offset = op.backup->roster[word];
    header.count = participant.late;
    ++participant.results;
    ++op.sends;
    send(participant.peer, Tag{header.tag}, header, {}, {}, {op.id, kNone, participant.peer, true});
  }
  retire(participant);
}

/// Who is slow is known best of those that nobody waits for.
void Engine::Impl::note_late_join(Op& op, Participant& participant) {
  count_lateness(op, participant);
  if (op.absentees() > 0) return;
  participant.late |= wire::kWasLast;
  ++lateness_[participant.peer.value].last;
}

/// One who is not in, and comes when it has been decided or the others' data is being summed.
void Engine::Impl::serve_late(Instant now, Op& op, Participant& participant) {
  room_changed_ = true;
  if (op.is_join()) {
    note_late_join(op, participant);
    send_roster(op, participant);
    note_came(op, participant.announce.contributor);
    if (op.absentees() == 0) give_back_room(op);
  } else if (op.chunks == 0) {
    send_result(op, participant, kNone, {});
  } else {
    for (std::uint32_t chunk = 0; chunk < op.backup->is_kept.size(); ++chunk) {
      if (op.backup->is_kept[chunk]) send_kept(op, participant, chunk);
    }
  }
  if (op.state == OpState::kKept) finish_op(now, op);
}

void Engine::Impl::send_kept(Op& op, Participant& participant, std::uint32_t chunk) {
  wire::Header header = header_to(op.key, wire::MessageType::kResult);
  header.chunk = chunk;
  header.offset = op.chunk_offset(chunk);
  header.tag = participant.tag + chunk;
  ++participant.results;
  if (participant.has_everything()) retire(participant);
  ++op.sends;
  const std::span<const std::byte> payload(op.backup->kept.get() + std::size_t{chunk} * op.shape.chunk_bytes,
                                           op.run_bytes(chunk, 1));
  stats_.bytes_sent += payload.size();
  send(participant.peer, Tag{header.tag}, header, {}, payload, {op.id, kNone, participant.peer, true});
  std::get<SendAction>(actions_.back()).is_unregistered = true;
}

/// Actions are carried out in order: the copy is made before the result's own memory can be used again.
void Engine::Impl::keep(Op& op, std::uint32_t number, std::span<const std::byte> output) {
  std::byte* const place = op.backup->kept.get() + std::size_t{number} * op.shape.chunk_bytes;
  actions_.emplace_back(CopyAction{output, {place, output.size()}, op.backup->kept});
  op.backup->is_kept[number] = true;
}

/// False where it would be more than may be kept, or than those who are missing may be owed.
bool Engine::Impl::take_room(Op& op) {
  std::uint64_t& used = op.is_join() ? owed_bytes_ : stats_.kept_bytes;
  const std::uint64_t bytes = op.is_join() ? op.shape.descriptor.op_bytes / config_.lanes : op.shape.shard_bytes;
  const std::uint64_t room = bytes + kRecordBytes;
  if (room > config_.backup_bytes || used > config_.backup_bytes - room) return false;
  used += room;
  op.backup->room = room;
  if (op.is_join()) return true;
  stats_.kept_peak = std::max(stats_.kept_peak, stats_.kept_bytes);
  op.backup->kept = std::make_shared_for_overwrite<std::byte[]>(bytes);
  op.backup->is_kept.resize(op.chunks);
  return true;
}

void Engine::Impl::give_back_room(Op& op) {
  if (op.backup == nullptr || op.backup->room == 0) return;
  (op.is_join() ? owed_bytes_ : stats_.kept_bytes) -= std::exchange(op.backup->room, 0);
  room_changed_ = true;
}

/// Memory was given back, or somebody came who was not waited for: what waited for that may go on.
void Engine::Impl::look_for_room() {
  room_changed_ = false;
  for (const std::uint64_t id : std::exchange(roomless_, {})) {
    Op& op = *find_op(id);
    if (op.absentees() > 0 && !take_room(op)) {
      roomless_.push_back(id);
    } else {
      line_up(op);
    }
  }
}

}  // namespace herring::server
