// What ends badly: time-outs, lost workers, and how both ends learn of it.

#include <algorithm>
#include <cstdio>
#include <utility>

#include "core/seconds_text.h"
#include "point_to_point/engine_impl.h"
#include "wire/reason.h"

namespace herring::point_to_point {
namespace {

constexpr std::uint32_t kAllPushed = 0xFFFF'FFFF;  // Withdraw: the send was over; every chunk is on its way.
constexpr std::size_t kMaxHints = 3;
constexpr std::chrono::seconds kLastWord{1};  // For what a worker that left has said to arrive.

}  // namespace

std::string tag_text(std::uint64_t tag) {
  if ((tag & kReservedTagBit) == 0) return "tag " + std::to_string(tag);
  // Frameworks count the calls of a group; monitored barriers beside the others.
  constexpr std::uint64_t kMonitoredBit = kReservedTagBit >> 1;
  constexpr int kCollectiveShift = 56;
  const bool is_monitored = (tag & kMonitoredBit) != 0;
  const auto collective = static_cast<Collective>(tag >> kCollectiveShift & 0x3F);
  const std::string what = is_monitored                      ? "monitored_barrier"
                           : is_made_of_messages(collective) ? std::string(name(collective))
                                                             : "gather, scatter or all_to_all";
  return "the tag of " + what + " call " + std::to_string(tag & ((std::uint64_t{1} << kCollectiveShift) - 1)) +
         " of its group";
}

std::string rank_text(PeerId peer) { return "rank " + std::to_string(peer.value); }

std::string ranks_text(const std::vector<PeerId>& peers) {
  if (peers.size() == 1) return rank_text(peers.front());
  std::string text = "one of ranks ";
  for (std::size_t i = 0; i < peers.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(peers[i].value);
  return text;
}

std::string seconds_text(Duration duration) { return round_seconds_text(duration); }

/// The receiver ends a message, or answers a withdrawal.
void Engine::Impl::handle_close(Peer& peer, const wire::Header& header, std::span<const std::byte> body) {
  const bool is_answer = (header.flags & wire::kFlagAnswer) != 0;
  Send* const send = find_send(header.op);
  const bool known = send != nullptr && send->operation.to == peer.id && !send->is_queued && !send->is_over;
  const bool was_withdrawn = known && !send->failure.is_ok();
  if (!is_answer && !was_withdrawn) {
    wire::Header answer = header_to(wire::MessageType::kWithdraw, header.op);
    answer.flags = wire::kFlagAnswer;
    answer.chunk = known ? send->pushed : kAllPushed;
    enqueue(peer, answer, {body.begin(), body.end()});
  }
  if (!known) return;
  if (send->is_eager && !send->operation.data.empty()) --peer.eager_out;
  if (send->failure.is_ok()) send->failure = wire::decode_reason(body);
  send->is_over = true;
  complete_if_over(*send);
}

/// The sender gives a message up, or answers a close.
void Engine::Impl::handle_withdraw(Instant now, Peer& peer, const wire::Header& header,
                                   std::span<const std::byte> body) {
  const SendKey key{peer.id, header.op};
  if (is_being_copied(key)) return;  // Its Accept is the answer.
  if ((header.flags & wire::kFlagAnswer) == 0) {
    wire::Header answer = header_to(wire::MessageType::kClose, header.op);
    answer.flags = wire::kFlagAnswer;
    enqueue(peer, answer, {body.begin(), body.end()});
  }
  if (const auto found = unmatched_.find(key); found != unmatched_.end()) {
    const auto [group, arrival] = found->second;
    return drop(group, arrival);
  }
  const auto found = incoming_.find(key);
  if (found == incoming_.end()) return;
  Receive& receive = *find_receive(found->second);
  receive.pushed = header.chunk;
  if (!receive.has_failed) {
    receive.has_failed = true;
    receive.failure = wire::decode_reason(body);
    set_timer(receive, now + config_.grace);
  }
  drain(receive, false);
}

void Engine::Impl::fail(Instant now, Send& send, const Status& why) {
  if (send.is_over || send.is_copied || !send.failure.is_ok()) return;
  send.failure = why;
  Peer& peer = peer_of(send.operation.to);
  if (send.operation.to == config_.self) {
    const auto [group, arrival] = unmatched_.at({config_.self, send.id});
    static_cast<void>(take_unmatched(group, arrival));
    send.is_over = true;
  } else if (send.is_queued) {
    take_unsent(peer, std::erase_if(peer.queue, [&send](const Outgoing& out) { return out.send == send.id; }));
    send.is_queued = false;
    send.is_over = true;
  } else if (peer.lost || (peer.left && send.invited == 0)) {
    send.is_over = true;  // Nobody is there to answer.
  } else {
    set_timer(send, now + config_.grace);
    wire::Header header = header_to(wire::MessageType::kWithdraw, send.id);
    header.chunk = send.pushed;
    enqueue(peer, header, wire::encode_reason(why));
    return;
  }
  complete_if_over(send);
}

void Engine::Impl::fail(Instant now, Receive& receive, const Status& why) {
  if (receive.has_failed || receive.is_copied) return;
  if (!receive.is_matched) {
    unpost(receive);
    complete(receive, why);
    return;
  }
  Peer& peer = peer_of(receive.met.source);
  receive.has_failed = true;
  receive.failure = why;
  wire::Header header = header_to(wire::MessageType::kClose, receive.send_id);
  if (receive.is_waiting) header.flags = wire::kFlagAnswer;  // No chunk was invited: nothing to wait for.
  enqueue(peer, header, wire::encode_reason(why));
  set_timer(receive, now + config_.grace);
  drain(receive, false);
}

/// Ends a failed receive once nothing that was pushed can still be on its way: the sender says how much that is.
void Engine::Impl::drain(Receive& receive, bool force) {
  const bool has_come = receive.pushed && receive.received >= std::min(*receive.pushed, receive.invited);
  if (!force && !receive.is_waiting && !has_come && !peer_of(receive.met.source).lost) return;
  if (std::exchange(receive.is_closing, true)) return;
  set_timer(receive, Instant::max());
  Actions& actions = actions_[peer_of(receive.met.source).link];
  for (const auto& [chunk, token] : receive.open) actions.emplace_back(CancelReceiveAction{Token{token}});
  close(receive);
}

void Engine::Impl::close(Receive& receive) {
  if (!receive.open.empty()) return;
  end_incoming(receive);
  complete(receive, receive.failure);
  start_waiting();
}

void Engine::Impl::on_withdrawn(Token token) {
  const auto found = flights_.find(token.value);
  if (found == flights_.end() || found->second.kind != Flight::Kind::kReceive) return;
  const Flight flight = found->second;
  flights_.erase(found);
  Receive& receive = *find_receive(flight.id);
  receive.open.erase(flight.chunk);
  close(receive);
}

void Engine::Impl::cancel_unmatched_receives(const Status& why, std::optional<GroupId> group) {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, receive] : receives_) {
    const bool is_reserved = receive->operation.tag && (*receive->operation.tag & kReservedTagBit) != 0;
    const bool is_meant = !group || (receive->operation.group == *group && !is_reserved);
    if (is_meant && !receive->is_matched) ids.push_back(id);
  }
  for (const std::uint64_t id : ids) {
    Receive& receive = *find_receive(id);
    unpost(receive);
    complete(receive, why);
  }
}

void Engine::Impl::cancel(Instant now, GroupId group, std::uint64_t tag, const Status& why) {
  std::vector<std::uint64_t> sends;
  std::vector<std::uint64_t> receives;
  for (const auto& [id, send] : sends_) {
    if (send->operation.group == group && send->operation.tag == tag) sends.push_back(id);
  }
  for (const auto& [id, receive] : receives_) {
    if (receive->operation.group == group && receive->operation.tag == tag) receives.push_back(id);
  }
  for (const std::uint64_t id : sends) fail(now, *find_send(id), why);
  for (const std::uint64_t id : receives) fail(now, *find_receive(id), why);
}

void Engine::Impl::close_group(Instant now, GroupId group, const Status& why) {
  std::vector<std::uint64_t> sends;
  std::vector<std::uint64_t> receives;
  for (const auto& [id, send] : sends_) {
    if (send->operation.group == group) sends.push_back(id);
  }
  for (const auto& [id, receive] : receives_) {
    if (receive->operation.group == group) receives.push_back(id);
  }
  for (const std::uint64_t id : sends) fail(now, *find_send(id), why);
  for (const std::uint64_t id : receives) fail(now, *find_receive(id), why);
  while (boxes_.contains(group)) {
    const Envelope envelope = take_unmatched(group, boxes_[group].unmatched.begin()->first);
    if (!envelope.data.empty()) release(envelope.source, envelope.body);
    refuse(envelope, why);
  }
}

bool Engine::Impl::all_gone(const std::vector<PeerId>& peers) const {
  return std::all_of(peers.begin(), peers.end(),
                     [this](PeerId id) { return id != config_.self && peer_of(id).is_gone(); });
}

Status Engine::Impl::gone_status(const std::vector<PeerId>& peers) const {
  return Status(Code::kPeerLost, peer_of(peers.front()).why);
}

void Engine::Impl::on_peer_lost(Instant now, PeerId id, const std::string& why) {
  if (id.value >= peers_.size() || id == config_.self || peer_of(id).lost) return;
  Peer& peer = peer_of(id);
  take_unsent(peer, peer.queue.size());
  peer.queue.clear();
  if (!peer.left) unsent_ -= peer.unsent;
  peer.lost = true;
  peer.why = why;
  for (const auto& [number, held] : peer.held) {
    stats_.held_bytes -= held.body.bytes.size();
    if (held.body.is_kept) release(id, held.body.token);
  }
  peer.held.clear();
  drop_unmatched_of(id);
  std::vector<std::uint64_t> sends;
  for (const auto& [number, send] : sends_) {
    if (send->operation.to == id && !send->is_over) sends.push_back(number);
  }
  for (const std::uint64_t number : sends) {
    Send& send = *find_send(number);
    if (send.failure.is_ok()) send.failure = Status(Code::kPeerLost, why);
    send.is_queued = false;
    send.is_over = true;
    complete_if_over(send);
  }
  std::vector<std::uint64_t> receives;
  for (const auto& [number, receive] : receives_) {
    const bool needs_it = receive->is_matched ? receive->met.source == id : all_gone(receive->operation.sources);
    if (needs_it) receives.push_back(number);
  }
  for (const std::uint64_t number : receives) {
    Receive& receive = *find_receive(number);
    if (receive.has_failed) {
      drain(receive, true);
    } else {
      fail(now, receive, Status(Code::kPeerLost, why));  // Drains at once: the peer is lost.
    }
  }
}

void Engine::Impl::on_peer_left(Instant now, PeerId id, const std::string& why) {
  if (id.value >= peers_.size() || id == config_.self || peer_of(id).is_gone()) return;
  Peer& peer = peer_of(id);
  // Its endpoint may be closed: nobody waits for what goes to it, and the network may try for long.
  unsent_ -= peer.unsent;
  peer.left = true;
  peer.why = why;
  // What has begun to move is on its way; it has received the rest by now or never will, and its word may be, too.
  const Instant limit = now + config_.grace;
  const Instant soon = now + std::min<Duration>(config_.grace, kLastWord);
  for (const auto& [number, send] : sends_) {
    if (send->operation.to == id) set_timer(*send, std::min(send->timer, send->invited > 0 ? limit : soon));
  }
  std::vector<std::uint64_t> unmet;
  for (const auto& [number, receive] : receives_) {
    const bool needs_it = receive->is_matched ? receive->met.source == id : all_gone(receive->operation.sources);
    if (!needs_it || receive->is_closing || receive->is_copied) continue;
    if (receive->is_matched) {
      set_timer(*receive, std::min(receive->timer, limit));
    } else {
      unmet.push_back(number);
    }
  }
  // A send ends when it is received, and it has waited for all of its own.
  for (const std::uint64_t number : unmet) fail(now, *find_receive(number), Status(Code::kPeerLost, why));
}

void Engine::Impl::on_member_left(Instant now, GroupId group, PeerId peer, const std::string& why) {
  const Instant soon = now + std::min<Duration>(config_.grace, kLastWord);
  const Status doom(Code::kPeerLost, why);
  for (const auto& [number, send] : sends_) {
    const SendOperation& operation = send->operation;
    const bool is_meant = operation.group == group && operation.to == peer && (operation.tag & kReservedTagBit) == 0;
    if (!is_meant || send->invited > 0 || send->is_over || !send->failure.is_ok()) continue;
    send->doom = doom;
    set_timer(*send, std::min(send->timer, soon));
  }
  for (const auto& [number, receive] : receives_) {
    const ReceiveOperation& operation = receive->operation;
    const bool is_meant = operation.group == group && operation.sources == std::vector{peer} &&
                          (operation.tag.value_or(0) & kReservedTagBit) == 0;
    if (!is_meant || receive->is_matched) continue;
    receive->doom = doom;
    set_timer(*receive, std::min(receive->timer, soon));
  }
}

void Engine::Impl::on_tick(Instant now) {
  while (!timers_.empty() && std::get<0>(*timers_.begin()) <= now) {
    const auto [when, kind, id] = *timers_.begin();
    if (kind == Kind::kReceive) {
      Receive& receive = *find_receive(id);
      if (receive.has_failed) {
        drain(receive, true);
      } else if (const Status doom = std::exchange(receive.doom, {}); !doom.is_ok() && receive.is_matched) {
        set_timer(receive, now + config_.grace);  // It came all the same.
      } else {
        fail(now, receive, doom.is_ok() ? timeout_of(receive) : doom);
      }
      continue;
    }
    Send& send = *find_send(id);
    set_timer(send, Instant::max());
    if (send.failure.is_ok() && !send.is_over) {
      if (const Status doom = std::exchange(send.doom, {}); !doom.is_ok() && send.invited > 0) {
        set_timer(send, now + config_.grace);
      } else {
        fail(now, send, doom.is_ok() ? timeout_of(send) : doom);
      }
      continue;
    }
    // The other side had its time to answer. What still reads the memory is the transport's to end.
    send.is_over = true;
    complete_if_over(send);
  }
}

Status Engine::Impl::timeout_of(const Send& send) const {
  const SendOperation& operation = send.operation;
  if (operation.to != config_.self && peer_of(operation.to).is_gone()) return gone_status({operation.to});
  std::string text = "send of " + std::to_string(operation.data.size()) + " bytes with " + tag_text(operation.tag) +
                     " timed out after " + seconds_text(operation.timeout) + ": " + rank_text(operation.to);
  if (send.invited == 0) {
    text += " has not received it";
  } else {
    text += " has not taken all of it (" + std::to_string(send.pushed) + " of " + std::to_string(send.chunks) +
            " chunks were sent)";
  }
  return Status(Code::kTimeout, std::move(text));
}

Status Engine::Impl::timeout_of(const Receive& receive) const {
  const ReceiveOperation& operation = receive.operation;
  if (!receive.is_matched && all_gone(operation.sources)) return gone_status(operation.sources);
  std::string text = "receive of " + std::to_string(operation.memory.size()) + " bytes with " +
                     (operation.tag ? tag_text(*operation.tag) : "any tag") + " timed out after " +
                     seconds_text(operation.timeout) + ": " + rank_text(config_.self) + " waits for ";
  if (receive.is_matched) {
    text += rank_text(receive.met.source) + ", " + std::to_string(receive.received) + " of " +
            std::to_string(receive.chunks) + " chunks have come";
    return Status(Code::kTimeout, std::move(text));
  }
  text += ranks_text(operation.sources) + " to send it";
  const auto box = boxes_.find(operation.group);
  std::size_t hints = 0;
  for (auto next = box->second.unmatched.begin(); next != box->second.unmatched.end() && hints < kMaxHints; ++next) {
    const Envelope& other = next->second;
    if (std::find(operation.sources.begin(), operation.sources.end(), other.source) == operation.sources.end())
      continue;
    text += (hints++ == 0 ? " (unreceived here: " : ", ") + std::to_string(other.bytes) + " bytes with " +
            tag_text(other.tag) + " from " + rank_text(other.source);
  }
  if (hints > 0) text += ')';
  return Status(Code::kTimeout, std::move(text));
}

}  // namespace herring::point_to_point
