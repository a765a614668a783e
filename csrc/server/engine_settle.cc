#include <algorithm>
#include <string>

#include "server/engine_impl.h"

/// Failover on the lane's side (docs/adr/0005-server-failover.md): who has everything, and what moves here from a lane
/// that died.
namespace herring::server {
namespace {

/// Settled that nobody waits for goes so many tags at once, or after so long.
constexpr std::size_t kSettledBatch = 32;
constexpr Duration kSettledDelay = std::chrono::milliseconds(10);
/// Most losses that a job can have; a plan has no more lanes.
constexpr std::uint32_t kMaxLosses = 65536;

}  // namespace

/// What only announces with failover may say; `data` is what follows the body.
Status Engine::Impl::check_failover(const wire::Header& header, const wire::Announce& announce,
                                    std::span<const std::byte> data) const {
  const auto wrong = [&](const std::string& what) {
    return Status(Code::kProtocol, "announce of rank " + std::to_string(header.sender) + ": " + what);
  };
  const bool is_moved = (header.flags & wire::kFlagHeld) != 0;
  const bool is_ready = (header.flags & wire::kFlagReady) != 0;
  if (!config_.failover) {
    const std::uint32_t shard = (header.flags & wire::kFlagRoster) != 0 ? wire::kRosterShard : 0;
    if (is_moved || is_ready || header.shard != shard) return wrong("of a job with failover; here it is off");
    return Status::ok();
  }
  if (workers_[header.sender].unsettled.size() >= config_.max_ops_per_worker) return wrong("too many unsettled ones");
  if (workers_[header.sender].unsettled.contains(header.tag)) return wrong("a tag that is in use");
  const bool is_eager = (header.flags & wire::kFlagEager) != 0;
  if (!is_moved) return is_eager && !is_ready ? wrong("eager without receives") : Status::ok();
  if (is_ready || is_eager) return wrong("moved, but with receives for what is not granted");
  if (header.chunk == 0 || header.chunk > kMaxLosses) return wrong("moved by a loss that cannot be");
  const std::size_t bits = std::max<std::size_t>(announce.owned_count, 1);
  if (bits > wire::kMaxHeldChunks || data.size() != (bits + 7) / 8) return wrong("a bitmap of the wrong size");
  return Status::ok();
}

/// The last participant is the one whose announce this is.
void Engine::Impl::note_failover(Op& op, const wire::Header& header, std::span<const std::byte> bitmap) {
  Participant& participant = op.participants.back();
  participant.ready = (header.flags & wire::kFlagReady) != 0;
  if (op.is_live()) workers_[header.sender].unsettled.emplace(header.tag, op.id);
  if ((header.flags & wire::kFlagHeld) == 0) return;
  op.moved_by = header.chunk;
  const std::size_t bits = std::max<std::size_t>(participant.announce.owned_count, 1);
  participant.held.resize(bits);
  for (std::size_t i = 0; i < bits; ++i) {
    participant.held[i] = (bitmap[i / 8] & static_cast<std::byte>(1u << (i % 8))) != std::byte{0};
    op.any_held |= participant.held[i];
  }
}

/// Receives are posted for chunks that this process does not push.
void Engine::Impl::handle_ready(Instant now, const wire::Header& header) {
  Op* op = find_live(key_of(header));
  const auto mine = [&](const Participant& participant) {
    return participant.peer.value == header.sender && participant.tag == header.offset && !participant.silent;
  };
  if (op == nullptr || op->state != OpState::kReady) {
    if (find_failed(key_of(header), PeerId{header.sender}, header.offset) == nullptr) ++stats_.messages_rejected;
    return;
  }
  const auto found = std::find_if(op->participants.begin(), op->participants.end(), mine);
  if (found == op->participants.end() || header.count > op->chunks || header.chunk > op->chunks - header.count) {
    ++stats_.messages_rejected;
    return;
  }
  const auto index = static_cast<std::uint32_t>(found - op->participants.begin());
  const std::uint64_t id = op->id;
  for (std::uint32_t number = header.chunk; number < header.chunk + header.count; ++number) {
    const auto chunk = op->in_flight.find(number);
    if (chunk == op->in_flight.end() || std::erase(chunk->second.unready, index) == 0) {
      ++stats_.messages_rejected;
      continue;
    }
    --workers_[header.sender].granted;
    if (--chunk->second.missing > 0) continue;
    window_.on_complete(now - chunk->second.granted, 1);
    finish_chunk(now, *op, number);
    op = find_op(id);
  }
}

void Engine::Impl::handle_receipt(Instant now, const wire::Header& header, std::span<const std::byte> body) {
  const auto tags = wire::decode_list(body, wire::kMaxTagList);
  if (!config_.failover || !tags) {
    ++stats_.messages_rejected;
    return;
  }
  for (const std::uint64_t tag : *tags) {
    WorkerState& worker = workers_[header.sender];
    const auto known = worker.unsettled.find(tag);
    if (known == worker.unsettled.end()) continue;  // Failed or given up here.
    Op& op = *find_op(known->second);
    for (Participant& participant : op.participants) {
      if (participant.peer.value != header.sender || participant.tag != tag) continue;
      if (!participant.has_everything() || participant.receipted) {
        ++stats_.messages_rejected;
        break;
      }
      participant.receipted = true;
      op.urgent |= (header.flags & wire::kFlagUrgent) != 0;
      settle_op(now, op);
      break;
    }
  }
}

/// Over where all Results are handed out and sent, and everybody who lives has them. May end the operation.
void Engine::Impl::settle_op(Instant now, Op& op) {
  if (op.state != OpState::kFinishing || op.sends > 0) return;
  const bool is_settled =
      std::all_of(op.participants.begin(), op.participants.end(), [this](const Participant& participant) {
        return participant.receipted || workers_[participant.peer.value].lost;
      });
  if (!is_settled && !op.given_up) return;
  tell_settled(now, op);
  --undrained_;
  --stats_.unsettled;
  erase_op(op.id);
}

void Engine::Impl::tell_settled(Instant now, Op& op) {
  for (const Participant& participant : op.participants) {
    WorkerState& worker = workers_[participant.peer.value];
    // Where somebody is not waited for any more, whoever has all need not keep it; whoever has not knows by its
    // deadline.
    if (worker.lost || participant.silent || (op.given_up && !participant.receipted)) continue;
    worker.settled.push_back(participant.tag);
    worker.settled_urgent |= op.urgent;
    settled_due_ = std::min(settled_due_, now + kSettledDelay);
    flush_settled(participant.peer, false);
  }
}

/// One Settled to a worker at a time: what comes meanwhile goes with the next.
void Engine::Impl::flush_settled(PeerId peer, bool is_due) {
  WorkerState& worker = workers_[peer.value];
  if (worker.settled_on_way || worker.settled.empty() || worker.lost) return;
  if (!is_due && !worker.settled_urgent && worker.settled.size() < kSettledBatch) return;
  const std::size_t count = std::min(worker.settled.size(), wire::kMaxTagList);
  wire::Header header = header_to({}, wire::MessageType::kSettled);
  header.count = static_cast<std::uint32_t>(count);
  Send record{0, kNone, peer, false, true};
  send(peer, kControlTag, header, wire::encode_list(std::span(worker.settled).first(count)), {}, record);
  worker.settled.erase(worker.settled.begin(), worker.settled.begin() + static_cast<std::ptrdiff_t>(count));
  worker.settled_on_way = true;
  if (worker.settled.empty()) worker.settled_urgent = false;
}

/// All Results of a finishing operation are sent. May end it.
void Engine::Impl::after_sends(Instant now, Op& op) {
  if (config_.failover) {
    drop_eager_data(op);
    settle_op(now, op);
    return;
  }
  --undrained_;
  erase_op(op.id);
}

/// Somebody's Receipt is too late: it failed over there, after all had been sent from here.
void Engine::Impl::stop_waiting(Instant now, Op& op) {
  op.given_up = true;
  settle_op(now, op);
}

void Engine::Impl::forget_tags(Op& op) {
  if (!config_.failover) return;
  for (const Participant& participant : op.participants) {
    WorkerState& worker = workers_[participant.peer.value];
    const auto known = worker.unsettled.find(participant.tag);
    if (known != worker.unsettled.end() && known->second == op.id) worker.unsettled.erase(known);
  }
}

void Engine::Impl::on_peer_left(Instant now, PeerId worker, const std::string& why) {
  if (worker.value >= config_.workers || workers_[worker.value].left) return;
  workers_[worker.value].left = true;
  workers_[worker.value].why_lost = why;
  left_.push_back(worker);
  if (config_.failover) conclude_moves(now);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : ops_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const std::uint64_t id : ids) {
    Op* op = find_op(id);
    if (op != nullptr && waits_in_vain(*op, worker)) fail(now, *op, Status(Code::kPeerLost, why));
  }
  follow_up(now);
}

void Engine::Impl::handle_moved(Instant now, const wire::Header& header) {
  WorkerState& worker = workers_[header.sender];
  if (!config_.failover || header.chunk >= kMaxLosses || concluded_.contains(header.chunk) ||
      !worker.moved.emplace(header.chunk, header.offset).second) {
    ++stats_.messages_rejected;
    return;
  }
  conclude_moves(now);
}

void Engine::Impl::conclude_moves(Instant now) {
  std::vector<std::uint32_t> losses;
  for (const WorkerState& worker : workers_) {
    if (worker.lost || worker.left) continue;
    if (worker.moved.empty()) return;
    for (const auto& [loss, before] : worker.moved) losses.push_back(loss);
    break;
  }
  for (const std::uint32_t loss : losses) {
    const bool is_complete = std::all_of(workers_.begin(), workers_.end(), [loss](const WorkerState& worker) {
      const auto said = worker.moved.find(loss);
      return worker.lost || worker.left || (said != worker.moved.end() && worker.next_sequence >= said->second);
    });
    if (!is_complete) continue;
    for (WorkerState& worker : workers_) worker.moved.erase(loss);
    concluded_.insert(loss);
    conclude(now, loss);
  }
}

/// All that moved here because of a loss is announced. What somebody has results of and not everybody has announced is
/// settled: a result is made only when all have announced, and only who was told so has forgotten it since.
void Engine::Impl::conclude(Instant now, std::uint32_t loss) {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : ops_) {
    if (op->state == OpState::kGathering && op->moved_by == loss + 1 && op->any_held) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  for (const std::uint64_t id : ids) {
    Op& op = *find_op(id);
    for (Participant& participant : op.participants) retire(participant);
    end_live(op);
    op.urgent = true;
    tell_settled(now, op);
    --undrained_;
    erase_op(id);
  }
}

}  // namespace herring::server
