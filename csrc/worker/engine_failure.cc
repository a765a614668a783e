#include <algorithm>
#include <string>
#include <utility>

#include "core/seconds_text.h"
#include "worker/delivery.h"

namespace herring::worker {
void Engine::Impl::abort(Instant now, const Operation& operation, const Status& why) {
  now_ = now;
  Op* op = find_op(operation.key);
  if (op != nullptr && op->is_over) return;
  if (op != nullptr) {
    fail(now, *op, why.is_ok() ? Status(Code::kCancelled, "given up by its owner") : why);
  } else if (check_operation(config_, operation).is_ok() || operation.memory.empty()) {
    cancel_unknown(operation, why);
  }
}

/// Nobody has heard of it from this process: as if it had begun, and waited for credits.
void Engine::Impl::cancel_unknown(const Operation& operation, const Status& why) {
  if (operation.contributor >= operation.contributor_count || losses_.size() == lanes_.size()) return;
  Op op;
  op.operation = operation;
  op.is_one_hop = goes_in_one_hop(config_, operation);
  op.failure = why;
  make_parts(op);
  if (op.parts.empty()) {  // It has no bytes of it: no lane waits for it.
    const std::uint32_t home = home_lane(config_, operation.key, operation.rails);
    add_parts(op, home, plan_part(config_, operation)[home], true);
  }
  cancel_unannounced(op);
}

/// A lane that has not heard from this process cannot finish without it, and has a process of each contributor, which
/// tells the others of its host. The home lane, or one of the others: where that is shared out by lane, the home lane
/// may have all that it needs from the others of this host.
void Engine::Impl::cancel_unannounced(const Op& op) {
  const LanePart* told = nullptr;
  for (const LanePart& part : op.parts) {
    if (part.is_announced || part.is_closing || part.is_done || lanes_[part.lane].lost) continue;
    if (told == nullptr || part.is_home) told = &part;
  }
  if (told == nullptr) return;
  const Operation& operation = op.operation;
  wire::Header header = header_to(operation.key, wire::MessageType::kCancel);
  header.shard = shard_of(*told);
  header.chunk = operation.contributor;
  header.offset = operation.contributor_count;
  header.count = told->announcers;
  send(lanes_[told->lane].peer, kControlTag, header, wire::encode_reason(op.failure), {}, {});
}

/// The first error wins; the operation completes when no lane can write to its memory any more, or after lane_grace.
void Engine::Impl::fail(Instant now, Op& op, const Status& why) {
  if (op.has_failed) return;
  op.has_failed = true;
  op.failure = why;
  set_timer(op, now + config_.lane_grace);
  cancel_unannounced(op);
  for (std::size_t i = 0; i < op.parts.size(); ++i) {
    LanePart& part = op.parts[i];
    if (!part.is_closing && !part.is_done) {
      give_up_part(op, i);
    } else if (part.is_one_way && part.is_announced) {
      cancel(op, i, false);  // The workers there wait for an answer.
    }
  }
  complete_if_done(op);
}

void Engine::Impl::give_up_part(Op& op, std::size_t index) {
  LanePart& part = op.parts[index];
  Lane& lane = lanes_[part.lane];
  if (!part.is_announced) {
    std::erase(lane.queue, std::pair{op.id, index});
    finish_part(part, op);
    return;
  }
  cancel(op, index, !part.has_error);
  drain_part(op, part, false);
}

void Engine::Impl::cancel(Op& op, std::size_t index, bool wants_answer) {
  const LanePart& part = op.parts[index];
  if (lanes_[part.lane].lost) return;
  wire::Header header = header_to(op.operation.key, wire::MessageType::kCancel);
  header.shard = shard_of(part);
  header.tag = part.tag;
  header.offset = part.sequence;
  header.count = part.pushed;
  header.chunk = wants_answer ? 0 : 1;
  send(lanes_[part.lane].peer, kControlTag, header, wire::encode_reason(op.failure), {}, {op.id, index, false, false});
}

/// Gives the receives of a failed operation back once no Result can be on its way: the lane's Error says how many it
/// sent.
void Engine::Impl::drain_part(Op& op, LanePart& part, bool force) {
  if (part.is_done) return;
  const bool over = force || lanes_[part.lane].lost || (part.has_error && part.received >= part.results_sent);
  if (!over) return;
  if (lanes_[part.lane].lost && delivery_->abandon_lost(op, part)) return;
  part.is_closing = true;
  for (const std::uint64_t token : part.receives) {
    if (token == 0 || std::exchange(receives_.at(token).is_withdrawn, true)) continue;
    actions_.emplace_back(CancelReceiveAction{Token{token}});
  }
  close_part(op, part);
}

/// A part ends when the last of its receives has been given back; their slots are free one by one.
void Engine::Impl::close_part(Op& op, LanePart& part) {
  const std::uint32_t lane = part.lane;
  const bool waits =
      std::any_of(part.receives.begin(), part.receives.end(), [](std::uint64_t token) { return token != 0; });
  if (!waits) finish_part(part, op);
  delivery_->serve_grants(lane);
}

void Engine::Impl::on_withdrawn(Instant now, Token token) {
  const auto found = receives_.find(token.value);
  if (found == receives_.end() || !found->second.is_withdrawn) return;  // Abandoned: its memory stays where it is.
  now_ = now;
  Receive receive = found->second;
  receives_.erase(found);
  Op& op = *find_op(receive.op);
  LanePart& part = op.parts[receive.part];
  part.receives[receive.chunk - part.owned.first] = 0;
  delivery_->release(part, receive);
  close_part(op, part);
  complete_if_done(op);
}

void Engine::Impl::on_peer_lost(Instant now, PeerId peer, const std::string& why) {
  now_ = now;
  const auto lane = lane_index_.find(peer);
  if (lane != lane_index_.end()) {
    if (lanes_[lane->second].lost) return;
    const bool moves = delivery_->may_move(lane->second);
    lanes_[lane->second].lost = true;
    one_way_ -= std::exchange(lanes_[lane->second].one_way, 0);
    lanes_[lane->second].why_lost = why;
    delivery_->note_loss(lane->second);
    if (moves) return delivery_->move_lane(now, lane->second);
  } else if (!lost_workers_.emplace(peer, why).second) {
    return;
  }
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : ops_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const std::uint64_t id : ids) {
    Op* op = find_op(id);
    if (op == nullptr) continue;
    bool uses_lane = false;
    for (LanePart& part : op->parts) {
      if (losses_.size() == lanes_.size() && part.is_done && !part.is_settled) {
        // No lane is left through which anybody could ask for it.
        part.is_settled = true;
        --op->unsettled;
      }
      if (lane == lane_index_.end() || part.lane != lane->second || part.is_done) continue;
      uses_lane = true;
      if (op->has_failed) drain_part(*op, part, false);
    }
    // Who belongs to another group is for its lanes to know; group 0 is everybody.
    const bool uses_worker = lane == lane_index_.end() && op->operation.key.group == GroupId{0};
    if ((uses_lane || uses_worker) && !op->has_failed) {
      fail(now, *op, Status(Code::kPeerLost, why));
    } else {
      complete_if_done(*op);
    }
  }
}

bool Engine::Impl::is_needed() const { return delivery_->is_needed(); }

Instant Engine::Impl::next_deadline() const {
  return std::min(timers_.empty() ? Instant::max() : timers_.begin()->first, delivery_->next_deadline());
}

void Engine::Impl::on_tick(Instant now) {
  now_ = now;
  delivery_->on_tick(now);
  while (!timers_.empty() && timers_.begin()->first <= now) {
    Op& op = *find_op(timers_.begin()->second);
    if (!op.has_failed && op.is_one_hop && now < deadline_of(op)) {
      hold_no_longer(op);
      complete_if_done(op);
      continue;
    }
    if (!op.has_failed) {
      fail(now, op,
           op.suspicion.is_ok()
               ? Status(Code::kTimeout, timeout_text(op))
               : Status(op.suspicion.code(), to_string(op.operation.descriptor) +
                                                 ": could not send to a server: " + op.suspicion.message()));
      continue;
    }
    // The lanes had their time to say what is on its way.
    set_timer(op, Instant::max());
    for (LanePart& part : op.parts) drain_part(op, part, true);
    complete_if_done(op);
  }
}

std::string Engine::Impl::timeout_text(const Op& op) const {
  std::string lanes;
  for (const LanePart& part : op.parts) {
    if (part.is_done) continue;
    lanes += (lanes.empty() ? "" : ", ") + std::to_string(part.lane) + " (peer " +
             std::to_string(lanes_[part.lane].peer.value) + ", " + std::to_string(part.received) + " of " +
             std::to_string(part.expected()) + " answers" + (part.is_announced ? "" : ", not announced") + ")";
  }
  const std::string seconds = round_seconds_text(op.operation.timeout + config_.lane_grace);
  std::string text = "after " + seconds + " rank " + std::to_string(config_.self.value) + " had no answer about " +
                     to_string(op.operation.descriptor) + " from server lane " + lanes +
                     "; see whether these servers are alive and reachable";
  if (text.size() > wire::kMaxReasonText) text.resize(wire::kMaxReasonText);
  return text;
}

}  // namespace herring::worker
