#include <algorithm>
#include <string>

#include "server/delivery.h"

namespace herring::server {
namespace {

/// Most losses that a job can have; a plan has no more lanes.
constexpr std::uint32_t kMaxLosses = 65536;

}  // namespace

Status Engine::Impl::RecoverableDelivery::check(const wire::Header& header, const wire::Announce& announce,
                                                std::span<const std::byte> data) const {
  const auto wrong = [&](const std::string& what) {
    return Status(Code::kProtocol, "announce of rank " + std::to_string(header.sender) + ": " + what);
  };
  const bool is_moved = (header.flags & wire::kFlagHeld) != 0;
  const bool is_ready = (header.flags & wire::kFlagReady) != 0;
  if ((header.flags & wire::kFlagOneHop) != 0) return wrong("in one hop; this server is not in a worker's process");
  const auto& unsettled = workers_[header.sender].unsettled;
  if (unsettled.size() >= engine_.config_.max_ops_per_worker) return wrong("too many unsettled ones");
  if (unsettled.contains(header.tag)) return wrong("a tag that is in use");
  const bool is_eager = (header.flags & wire::kFlagEager) != 0;
  if (!is_moved) return is_eager && !is_ready ? wrong("eager without receives") : Status::ok();
  if (is_ready || is_eager) return wrong("moved, but with receives for what is not granted");
  if (header.chunk == 0 || header.chunk > kMaxLosses) return wrong("moved by a loss that cannot be");
  const std::size_t bits = std::max<std::size_t>(announce.owned_count, 1);
  if (bits > wire::kMaxHeldChunks || data.size() != (bits + 7) / 8) return wrong("a bitmap of the wrong size");
  return Status::ok();
}

void Engine::Impl::RecoverableDelivery::note(Op& op, const wire::Header& header, std::span<const std::byte> data) {
  Participant& participant = op.participants.back();
  participant.ready = (header.flags & wire::kFlagReady) != 0;
  if (op.is_live()) workers_[header.sender].unsettled.emplace(header.tag, op.id);
  if ((header.flags & wire::kFlagHeld) == 0) return;
  op.moved_by = header.chunk;
  const std::size_t bits = std::max<std::size_t>(participant.announce.owned_count, 1);
  participant.held.resize(bits);
  for (std::size_t i = 0; i < bits; ++i) {
    participant.held[i] = (data[i / 8] & static_cast<std::byte>(1u << (i % 8))) != std::byte{0};
    op.any_held |= participant.held[i];
  }
}

/// Receives are posted for chunks that this process does not push.
void Engine::Impl::RecoverableDelivery::handle_ready(Instant now, const wire::Header& header) {
  Op* op = engine_.find_live(key_of(header));
  if (op == nullptr || op->state != OpState::kReady) {
    const Op* const failed = engine_.find_failed(key_of(header), PeerId{header.sender}, header.offset);
    if (failed == nullptr) ++engine_.stats_.messages_rejected;
    return;
  }
  const Participant* const mine = op->find(PeerId{header.sender});
  if (mine == nullptr || mine->tag != header.offset || mine->silent || header.count > op->chunks ||
      header.chunk > op->chunks - header.count) {
    ++engine_.stats_.messages_rejected;
    return;
  }
  const auto index = static_cast<std::uint32_t>(mine - op->participants.data());
  const std::uint64_t id = op->id;
  for (std::uint32_t number = header.chunk; number < header.chunk + header.count; ++number) {
    const auto chunk = op->in_flight.find(number);
    if (chunk == op->in_flight.end() || std::erase(chunk->second.unready, index) == 0) {
      ++engine_.stats_.messages_rejected;
      continue;
    }
    --engine_.workers_[header.sender].granted;
    if (--chunk->second.missing > 0) continue;
    engine_.window_.on_complete(now - chunk->second.granted, 1);
    engine_.finish_chunk(now, *op, number);
    op = engine_.find_op(id);
  }
}

void Engine::Impl::RecoverableDelivery::handle_receipt(Instant now, const wire::Header& header,
                                                       std::span<const std::byte> body) {
  const auto tags = wire::decode_list(body, wire::kMaxTagList);
  if (!tags) {
    ++engine_.stats_.messages_rejected;
    return;
  }
  for (const std::uint64_t tag : *tags) {
    WorkerState& worker = workers_[header.sender];
    const auto known = worker.unsettled.find(tag);
    if (known == worker.unsettled.end()) continue;  // Failed or given up here.
    Op& op = *engine_.find_op(known->second);
    Participant* const mine = op.find(PeerId{header.sender});
    if (mine == nullptr || mine->tag != tag) continue;
    if (!mine->has_everything() || mine->receipted) {
      ++engine_.stats_.messages_rejected;
      continue;
    }
    mine->receipted = true;
    op.urgent |= (header.flags & wire::kFlagUrgent) != 0;
    settle(now, op);
  }
}

/// Over where all Results are handed out and sent, and everybody who lives has them. May end the operation.
void Engine::Impl::RecoverableDelivery::settle(Instant now, Op& op) {
  if (op.state != OpState::kFinishing || op.sends > 0) return;
  const bool is_settled =
      std::all_of(op.participants.begin(), op.participants.end(), [this](const Participant& participant) {
        return participant.receipted || engine_.workers_[participant.peer.value].lost;
      });
  if (!is_settled && !op.given_up) return;
  tell_settled(now, op);
  --engine_.undrained_;
  --engine_.stats_.unsettled;
  engine_.erase_op(op.id);
}

void Engine::Impl::RecoverableDelivery::tell_settled(Instant now, Op& op) {
  for (const Participant& participant : op.participants) {
    WorkerState& worker = workers_[participant.peer.value];
    // Where somebody is not waited for any more, whoever has all need not keep it; whoever has not knows by its
    // deadline.
    const bool is_lost = engine_.workers_[participant.peer.value].lost;
    if (is_lost || participant.silent || (op.given_up && !participant.receipted)) continue;
    worker.settled.add(participant.tag);
    if (op.urgent) worker.settled.hurry();
    settled_due_ = std::min(settled_due_, now + wire::TagBatch::kDelay);
    flush_settled(participant.peer, false);
  }
}

void Engine::Impl::RecoverableDelivery::flush_settled(PeerId peer, bool is_due) {
  WorkerState& worker = workers_[peer.value];
  if (!worker.settled.is_ready(is_due) || engine_.workers_[peer.value].lost) return;
  wire::Header header = engine_.header_to({}, wire::MessageType::kSettled);
  std::vector<std::byte> body = worker.settled.take(header);
  engine_.send(peer, kControlTag, header, std::move(body), {}, {0, kNone, peer, false, true});
}

void Engine::Impl::RecoverableDelivery::finish(Instant now, Op& op) {
  engine_.set_timer(op, now + op.timeout);
  ++engine_.stats_.unsettled;
}

void Engine::Impl::RecoverableDelivery::after_sends(Instant now, Op& op) {
  engine_.drop_eager_data(op);
  settle(now, op);
}

/// Somebody's Receipt is too late: it failed over there, after all had been sent from here.
void Engine::Impl::RecoverableDelivery::on_timer(Instant now, Op& op) {
  op.given_up = true;
  settle(now, op);
}

void Engine::Impl::RecoverableDelivery::forget(const Op& op) {
  for (const Participant& participant : op.participants) {
    auto& unsettled = workers_[participant.peer.value].unsettled;
    const auto known = unsettled.find(participant.tag);
    if (known != unsettled.end() && known->second == op.id) unsettled.erase(known);
  }
}

void Engine::Impl::RecoverableDelivery::on_sent_settled(PeerId peer) {
  workers_[peer.value].settled.sent();
  flush_settled(peer, true);
}

void Engine::Impl::RecoverableDelivery::on_tick(Instant now) {
  if (now < settled_due_) return;
  settled_due_ = Instant::max();
  for (std::uint32_t worker = 0; worker < workers_.size(); ++worker) flush_settled(PeerId{worker}, true);
}

void Engine::Impl::RecoverableDelivery::handle_moved(Instant now, const wire::Header& header) {
  WorkerState& worker = workers_[header.sender];
  if (header.chunk >= kMaxLosses || concluded_.contains(header.chunk) ||
      !worker.moved.emplace(header.chunk, header.offset).second) {
    ++engine_.stats_.messages_rejected;
    return;
  }
  after_announces(now);
}

void Engine::Impl::RecoverableDelivery::after_announces(Instant now) {
  std::vector<std::uint32_t> losses;
  for (std::size_t worker = 0; worker < workers_.size(); ++worker) {
    if (engine_.workers_[worker].lost || engine_.workers_[worker].left) continue;
    for (const auto& [loss, before] : workers_[worker].moved) losses.push_back(loss);
    break;
  }
  for (const std::uint32_t loss : losses) {
    if (!has_all_moved(loss)) continue;
    for (WorkerState& worker : workers_) worker.moved.erase(loss);
    concluded_.insert(loss);
    conclude(now, loss);
  }
}

/// All have said that they announced what they had there, and these announces are here.
bool Engine::Impl::RecoverableDelivery::has_all_moved(std::uint32_t loss) const {
  for (std::size_t worker = 0; worker < workers_.size(); ++worker) {
    const server::WorkerState& state = engine_.workers_[worker];
    if (state.lost || state.left) continue;
    const auto said = workers_[worker].moved.find(loss);
    if (said == workers_[worker].moved.end() || state.next_sequence < said->second) return false;
  }
  return true;
}

/// All that moved here because of a loss is announced. What somebody has results of and not everybody has announced is
/// settled: a result is made only when all have announced, and only who was told so has forgotten it since.
void Engine::Impl::RecoverableDelivery::conclude(Instant now, std::uint32_t loss) {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : engine_.ops_) {
    if (op->state == OpState::kGathering && op->moved_by == loss + 1 && op->any_held) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  for (const std::uint64_t id : ids) {
    Op& op = *engine_.find_op(id);
    for (Participant& participant : op.participants) engine_.retire(participant);
    engine_.end_live(op);
    op.urgent = true;
    tell_settled(now, op);
    --engine_.undrained_;
    engine_.erase_op(id);
  }
}

std::uint64_t Engine::Impl::RecoverableDelivery::record_bytes(const wire::Announce& announce) const {
  return announce.owned_count / 8 + kNodeBytes;
}

}  // namespace herring::server
