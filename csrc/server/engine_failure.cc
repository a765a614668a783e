#include <algorithm>
#include <string>
#include <utility>

#include "server/delivery.h"

namespace herring::server {
namespace {

/// How many Cancels of one worker may wait for the announce that they overtook.
constexpr std::size_t kMaxHeldCancels = 1024;
/// Answers to one worker's Cancels that may be on their way; more wait as their key and tag.
constexpr std::uint32_t kMaxAnswers = 64;

}  // namespace

/// Tells everybody who has announced, and keeps the operation to tell those who announce later. The first reason wins.
void Engine::Impl::fail(Instant now, Op& op, const Status& why) {
  if (!op.is_live()) return;
  retire_one_way(now, op);  // Also where the first one went another way: they disagree.
  for (Participant& participant : op.participants) retire(participant);
  delivery_->forget(op);
  forget_missing(op);
  std::erase(ready_, std::pair{op.id, op.key.op.group});
  std::erase(roomless_, op.id);
  const bool was_kept = op.state == OpState::kKept;
  if (op.is_join()) give_back_room(op);
  end_live(op);
  op.state = OpState::kFailed;
  op.failure = why;
  ++stats_.ops_failed;
  for (const Participant& participant : op.participants) {
    if (participant.silent || workers_[participant.peer.value].lost) continue;
    if (was_kept && participant.has_everything()) continue;
    send_error(participant.peer, op.key, participant.tag, participant.results, op.failure);
  }
  failed_[op.key].push_back(op.id);
  failed_order_.push_back(op.id);
  for (Deferred& deferred : op.deferred) replay_.push_back(std::move(deferred));
  op.deferred.clear();
  set_timer(op, now + config_.drain_grace);
  drain(now, op, false);
  while (failed_order_.size() > config_.max_tombstones && forget_oldest_failure()) {
  }
}

void Engine::Impl::handle_cancel(Instant now, const wire::Header& header, std::span<const std::byte> body) {
  if (header.tag == 0) {
    give_up_unannounced(now, header, wire::decode_reason(body));
    return;
  }
  const PeerId peer{header.sender};
  WorkerState& worker = workers_[header.sender];
  if (!worker.has_seen(header.offset)) {
    // It overtook its announce on the way: they are taken in the order in which they were sent.
    if (!may_announce(worker, peer, header.offset) || worker.held_cancels.size() >= kMaxHeldCancels ||
        header.offset - worker.next_sequence > (1u << 20)) {
      ++stats_.messages_rejected;
      return;
    }
    worker.held_cancels.try_emplace(header.offset, HeldCancel{header, {body.begin(), body.end()}});
    return;
  }
  Op* live = find_live(key_of(header));
  if (Participant* const mine = live == nullptr ? nullptr : live->find(peer);
      mine != nullptr && mine->tag == header.tag) {
    mine->gave_up_after = header.count;
    fail(now, *live, wire::decode_reason(body));
    return;
  }
  if (Op* failed = find_failed(key_of(header), peer, header.tag); failed != nullptr) {
    for (Participant& participant : failed->participants) {
      if (participant.peer == peer) participant.gave_up_after = header.count;
    }
    drain(now, *failed, false);
    return;
  }
  // Over on this side, with all Results sent. Where the worker has an Error of ours already it waits for nothing.
  if (header.chunk != 0) return;
  // Each of its announces is given up once at most, so a correct worker never has so many without an answer.
  if (worker.answers_waiting.size() >= config_.max_ops_per_worker) {
    ++stats_.messages_rejected;
    return;
  }
  worker.answers_waiting.emplace_back(key_of(header), header.tag);
  answer_cancels(peer, worker);
}

/// A worker that gives up and does not read the answers gets no more of them than have room.
void Engine::Impl::answer_cancels(PeerId peer, WorkerState& worker) {
  if (worker.lost) worker.answers_waiting.clear();
  while (!worker.answers_waiting.empty() && worker.answers_on_way < kMaxAnswers) {
    const auto [key, tag] = worker.answers_waiting.front();
    worker.answers_waiting.pop_front();
    ++worker.answers_on_way;
    send_error(peer, key, tag, wire::kAllResults,
               Status(Code::kCancelled, "this server had finished its share of the operation"), true);
  }
}

/// A worker will not take part in an operation that it has not announced here: those who wait for it fail.
void Engine::Impl::give_up_unannounced(Instant now, const wire::Header& header, const Status& why) {
  const PeerId peer{header.sender};
  if (header.chunk >= header.offset || header.offset > config_.workers || header.count == 0 ||
      header.count > config_.workers) {
    ++stats_.messages_rejected;
    return;
  }
  const auto takes_part = [peer](const Participant& participant) { return participant.peer == peer; };
  if (const auto failed = failed_.find(key_of(header)); failed != failed_.end()) {
    for (const std::uint64_t id : failed->second) {
      const auto& participants = find_op(id)->participants;
      if (std::none_of(participants.begin(), participants.end(), takes_part)) continue;
      return;  // It failed here before, and the worker was told: this is its answer.
    }
  }
  Op* op = find_live(key_of(header));
  if (op != nullptr) {
    if (const Participant* const mine = op->find(peer); mine != nullptr) {
      if (!mine->has_everything()) {
        ++stats_.messages_rejected;
        return;
      }
      op = nullptr;  // It means the next operation of this key.
    }
  }
  Participant participant;
  participant.peer = peer;
  participant.silent = true;
  participant.gave_up_after = 0;
  participant.announce.contributor = header.chunk;
  participant.announce.contributor_count = static_cast<std::uint32_t>(header.offset);
  participant.announcers = header.count;
  const bool fresh = op == nullptr;
  if (!has_room_for_records(peer, record_bytes_of(participant.announce.contributor_count, fresh))) {
    ++stats_.messages_rejected;
    return;
  }
  if (fresh) op = &create_op(key_of(header), now);
  charge(*op, participant);
  op->add(std::move(participant));
  const auto place = header.chunk;
  const bool room = place >= op->owners.size() || op->owners[place].empty() ||
                    op->owners[place].size() < op->participants[op->owners[place].front()].announcers;
  if (room) place_participant(*op, static_cast<std::uint32_t>(op->participants.size() - 1));
  if (fresh) live_.try_emplace(op->key, op->id);  // Not where the present one of this key is still under way.
  fail(now, *op, why);
}

/// Takes back what a failed operation holds: a slot whose push has arrived at once; a posted receive only when its
/// sender has said that nothing more is on its way (or is gone, or has been silent too long), so that no push meets no
/// receive.
void Engine::Impl::drain(Instant now, Op& op, bool force) {
  if (!op.drained) {
    for (auto it = op.in_flight.begin(); it != op.in_flight.end();) {
      Chunk& chunk = it->second;
      drain_chunk(op, chunk, force);
      const bool waits =
          std::any_of(chunk.inputs.begin(), chunk.inputs.end(), [](const Input& input) { return input.token != 0; });
      it = waits || chunk.sends > 0 || chunk.is_reducing ? std::next(it) : op.in_flight.erase(it);
    }
    if (!op.in_flight.empty() || op.sends > 0) return;
    bury(now, op);
  }
  if (may_forget(op)) erase_op(op.id);
}

void Engine::Impl::drain_chunk(Op& op, Chunk& chunk, bool force) {
  for (const std::uint32_t index : chunk.unready) --workers_[op.participants[index].peer.value].granted;
  chunk.unready.clear();
  for (Input& input : chunk.inputs) {
    if (input.token != 0) {
      Receive& receive = receives_.at(input.token);
      const Participant& owner = op.participants[receive.participant];
      const bool over =
          force || workers_[owner.peer.value].lost || (owner.gave_up_after && owner.pushed >= *owner.gave_up_after);
      if (over && !std::exchange(receive.is_withdrawn, true)) {
        actions_.emplace_back(CancelReceiveAction{Token{input.token}});
      }
      continue;
    }
    input.loan.reset();
    if (chunk.sends == 0 && !chunk.is_reducing) release_slots(chunk, input);
  }
}

/// Its slots are free only now: a sender that stopped in the middle of a message keeps them until it goes on, or is
/// lost.
void Engine::Impl::on_withdrawn(Instant now, Token token) {
  const auto found = receives_.find(token.value);
  if (found == receives_.end() || !found->second.is_withdrawn) return;
  const Receive receive = found->second;
  receives_.erase(found);
  Op& op = *find_op(receive.op);
  Chunk& chunk = op.in_flight.at(receive.chunk);
  Participant& owner = op.participants[receive.participant];
  chunk.inputs[receive.input].token = 0;
  --owner.outstanding;
  workers_[owner.peer.value].granted -= chunk.count;
  drain(now, op, false);
  follow_up(now);
}

/// Nothing is in flight any more: what is left is the answer for those who come late.
void Engine::Impl::bury(Instant now, Op& op) {
  op.drained = true;
  --undrained_;
  if (op.backup != nullptr) op.backup->kept.reset();
  give_back_room(op);
  drop_eager_data(op);
  set_timer(op, now + std::clamp<Duration>(op.timeout, config_.min_tombstone, config_.max_tombstone));
}

bool Engine::Impl::may_forget(const Op& op) const {
  if (!op.everyone_announced()) return false;
  return std::all_of(op.participants.begin(), op.participants.end(), [this](const Participant& participant) {
    return participant.gave_up_after || participant.has_everything() || workers_[participant.peer.value].lost;
  });
}

Op* Engine::Impl::find_failed(const Key& key, PeerId peer, std::uint64_t tag) {
  const auto failed = failed_.find(key);
  if (failed == failed_.end()) return nullptr;
  for (const std::uint64_t id : failed->second) {
    Op& op = *find_op(id);
    for (const Participant& participant : op.participants) {
      if (participant.peer == peer && participant.tag == tag) return &op;
    }
  }
  return nullptr;
}

void Engine::Impl::on_peer_lost(Instant now, PeerId peer, const std::string& why) {
  if (peer.value >= config_.workers || workers_[peer.value].lost) return;
  WorkerState& worker = workers_[peer.value];
  worker.lost = true;
  worker.why_lost = why;
  worker.held_cancels.clear();
  lost_.push_back(peer);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : ops_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const std::uint64_t id : ids) {
    Op* op = find_op(id);
    if (op == nullptr) continue;
    if (op->is_live() && needs(*op, peer)) {
      fail(now, *op, Status(Code::kPeerLost, why));
    } else if (op->state == OpState::kFailed) {
      drain(now, *op, false);
    } else if (op->state == OpState::kFinishing) {
      delivery_->on_peer_lost(now, *op);
    }
  }
  follow_up(now);
}

void Engine::Impl::on_peer_left(Instant now, PeerId worker, const std::string& why) {
  if (worker.value >= config_.workers || workers_[worker.value].left) return;
  workers_[worker.value].left = true;
  workers_[worker.value].why_lost = why;
  left_.push_back(worker);
  delivery_->after_announces(now);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : ops_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const std::uint64_t id : ids) {
    Op* op = find_op(id);
    if (op != nullptr && waits_in_vain(*op, worker)) fail(now, *op, Status(Code::kPeerLost, why));
  }
  follow_up(now);
}

/// An operation ends well on a worker only when all have announced it, so a worker that left has not ended this one.
/// Not looked at: what moved here from a lost lane, whose end others may know, and what backup workers may miss.
bool Engine::Impl::waits_in_vain(const Op& op, PeerId left) const {
  return op.state == OpState::kGathering && op.moved_by == 0 && config_.backup_workers == 0 && needs(op, left);
}

/// Whether an operation cannot finish without this worker. Where nobody knows yet who belongs to a group, it is not
/// said.
bool Engine::Impl::needs(const Op& op, PeerId peer) const {
  if (const Participant* const mine = op.find(peer); mine != nullptr) {
    return !mine->silent && (!mine->has_everything() || !mine->has_all_data());
  }
  if (op.absentees() > 0 && op.state != OpState::kGathering) return true;
  if (op.state != OpState::kGathering) return false;
  if (op.key.op.group == GroupId{0}) return true;
  const GroupMembers* known = members(op);
  if (known == nullptr) return false;
  for (std::size_t contributor = 0; contributor < known->size(); ++contributor) {
    const std::vector<std::uint32_t> ranks = wire::ranks_of((*known)[contributor]);
    if (std::binary_search(ranks.begin(), ranks.end(), peer.value)) return true;
  }
  return false;
}

}  // namespace herring::server
