// Who gets which message: the earliest receive that fits, the earliest message that fits.

#include <algorithm>

#include "point_to_point/engine_impl.h"
#include "wire/reason.h"

namespace herring::point_to_point {

void Engine::Impl::drop_if_empty(GroupId group) {
  const auto found = boxes_.find(group);
  if (found != boxes_.end() && found->second.is_empty()) boxes_.erase(found);
}

void Engine::Impl::post(Receive& receive) {
  Box& box = box_of(receive.operation.group);
  if (receive.is_wild()) {
    box.wild_receives.insert(receive.id);
  } else {
    box.receives.emplace(receive.operation.sources.front(), *receive.operation.tag, receive.id);
  }
}

void Engine::Impl::unpost(Receive& receive) {
  Box& box = box_of(receive.operation.group);
  if (receive.is_wild()) {
    box.wild_receives.erase(receive.id);
  } else {
    box.receives.erase({receive.operation.sources.front(), *receive.operation.tag, receive.id});
  }
  drop_if_empty(receive.operation.group);
}

bool Engine::Impl::fits(const Receive& receive, const Envelope& envelope) {
  const ReceiveOperation& operation = receive.operation;
  if (operation.tag ? *operation.tag != envelope.tag : (envelope.tag & kReservedTagBit) != 0) return false;
  return std::find(operation.sources.begin(), operation.sources.end(), envelope.source) != operation.sources.end();
}

/// Arrival of the earliest message that fits, or 0.
std::uint64_t Engine::Impl::find_envelope(const Receive& receive) const {
  const auto found = boxes_.find(receive.operation.group);
  if (found == boxes_.end()) return 0;
  const Box& box = found->second;
  if (!receive.is_wild()) {
    const PeerId source = receive.operation.sources.front();
    const std::uint64_t tag = *receive.operation.tag;
    const auto first = box.unmatched_index.lower_bound({source, tag, 0});
    if (first == box.unmatched_index.end() || std::get<0>(*first) != source || std::get<1>(*first) != tag) return 0;
    return std::get<2>(*first);
  }
  for (const auto& [arrival, envelope] : box.unmatched) {
    if (fits(receive, envelope)) return arrival;
  }
  return 0;
}

Receive* Engine::Impl::find_receive_for(const Envelope& envelope) {
  const auto found = boxes_.find(envelope.group);
  if (found == boxes_.end()) return nullptr;
  const Box& box = found->second;
  Receive* exact = nullptr;
  const auto first = box.receives.lower_bound({envelope.source, envelope.tag, 0});
  if (first != box.receives.end() && std::get<0>(*first) == envelope.source && std::get<1>(*first) == envelope.tag) {
    exact = find_receive(std::get<2>(*first));
  }
  for (const std::uint64_t id : box.wild_receives) {
    if (exact != nullptr && exact->id < id) break;
    Receive* const wild = find_receive(id);
    if (fits(*wild, envelope)) return wild;
  }
  return exact;
}

bool Engine::Impl::arrive(Envelope envelope) {
  Receive* const receive = find_receive_for(envelope);
  if (receive != nullptr) {
    unpost(*receive);
    return meet(*receive, envelope);
  }
  if (envelope.source != config_.self && peer_of(envelope.source).unmatched >= config_.max_unmatched) {
    refuse(envelope,
           Status(Code::kUnavailable, rank_text(config_.self) + " takes no more messages of " +
                                          rank_text(envelope.source) + ": " + std::to_string(config_.max_unmatched) +
                                          " of them wait for a receive; receive some first"));
    return false;
  }
  const bool has_data = !envelope.data.empty();
  keep(std::move(envelope));
  return has_data;
}

void Engine::Impl::keep(Envelope envelope) {
  envelope.arrival = next_arrival_++;
  if (envelope.source != config_.self) {
    Peer& peer = peer_of(envelope.source);
    ++peer.unmatched;
    if (!envelope.data.empty()) ++peer.eager_in;
    hold_bytes(envelope.data.size());
  }
  ++stats_.unmatched;
  Box& box = box_of(envelope.group);
  box.unmatched_index.emplace(envelope.source, envelope.tag, envelope.arrival);
  unmatched_.emplace(SendKey{envelope.source, envelope.send_id}, std::pair{envelope.group, envelope.arrival});
  box.unmatched.emplace(envelope.arrival, std::move(envelope));
}

/// The body that its data lies in is the caller's to release.
Envelope Engine::Impl::take_unmatched(GroupId group, std::uint64_t arrival) {
  Box& box = box_of(group);
  const auto found = box.unmatched.find(arrival);
  Envelope envelope = std::move(found->second);
  box.unmatched.erase(found);
  box.unmatched_index.erase({envelope.source, envelope.tag, arrival});
  unmatched_.erase({envelope.source, envelope.send_id});
  if (envelope.source != config_.self) {
    Peer& peer = peer_of(envelope.source);
    --peer.unmatched;
    if (!envelope.data.empty()) --peer.eager_in;
    stats_.held_bytes -= envelope.data.size();
  }
  --stats_.unmatched;
  drop_if_empty(group);
  return envelope;
}

/// Nobody will receive it.
void Engine::Impl::drop(GroupId group, std::uint64_t arrival) {
  const Envelope envelope = take_unmatched(group, arrival);
  if (!envelope.data.empty()) release(envelope.source, envelope.body);
}

void Engine::Impl::drop_unmatched_of(PeerId peer) {
  for (auto next = unmatched_.lower_bound({peer, 0}); next != unmatched_.end() && next->first.first == peer;) {
    const auto [group, arrival] = (next++)->second;
    drop(group, arrival);
  }
}

void Engine::Impl::release(PeerId source, Token body) {
  actions_[peer_of(source).link].emplace_back(ReleaseAction{body});
}

/// A message has found its receive, which is in no box any more.
bool Engine::Impl::meet(Receive& receive, const Envelope& envelope) {
  receive.is_matched = true;
  receive.met = {envelope.source, envelope.tag, envelope.bytes};
  receive.send_id = envelope.send_id;
  if (envelope.source == config_.self) {
    meet_own(receive, envelope);
    return false;
  }
  if (const Status why = compare(receive, envelope); !why.is_ok()) {
    refuse(envelope, why);
    complete(receive, why);
    return false;
  }
  if (!envelope.is_eager) {
    start_incoming(receive);
    return false;
  }
  if (envelope.data.empty()) {
    accept(receive);
    return false;
  }
  Peer& peer = peer_of(envelope.source);
  ++peer.copying;
  copy(receive, envelope.data, 0, envelope.body, actions_[peer.link]);
  return true;
}

bool Engine::Impl::is_being_copied(const SendKey& key) const {
  return std::ranges::any_of(copies_, [&](const Copy& copy) {
    const Receive& receive = *receives_.at(copy.receive);
    return receive.met.source == key.first && receive.send_id == key.second;
  });
}

void Engine::Impl::accept(Receive& receive) {
  enqueue(peer_of(receive.met.source), header_to(wire::MessageType::kAccept, receive.send_id));
  complete(receive, Status::ok());
}

/// From here on it ends well, whatever happens.
void Engine::Impl::copy(Receive& receive, std::span<const std::byte> from, std::uint64_t own_send, Token body,
                        Actions& actions) {
  const Token token{next_token_++};
  copies_.push_back({token, receive.id, own_send, body});
  receive.is_copied = true;
  set_timer(receive, Instant::max());
  actions.emplace_back(CopyAction{from, receive.operation.memory, {}, token});
}

void Engine::Impl::on_copied(Token token) {
  const auto found = std::ranges::find(copies_, token, &Copy::token);
  if (found == copies_.end()) return;
  const Copy copy = *found;
  copies_.erase(found);
  Receive& receive = *find_receive(copy.receive);
  if (copy.send != 0) return end_own(*find_send(copy.send), receive, Status::ok());
  Peer& peer = peer_of(receive.met.source);
  --peer.copying;
  release(peer.id, copy.body);
  accept(receive);
  return_credits(peer);
}

Status Engine::Impl::compare(const Receive& receive, const Envelope& envelope) const {
  const ReceiveOperation& operation = receive.operation;
  if (!operation.refusal.is_ok()) return operation.refusal;
  const bool same_type =
      !operation.dtype || envelope.dtype == 0 || envelope.dtype == static_cast<std::uint32_t>(*operation.dtype);
  if (same_type && envelope.bytes == operation.memory.size()) return Status::ok();
  std::string theirs = std::to_string(envelope.bytes) + " bytes",
              ours = std::to_string(operation.memory.size()) + " bytes";
  if (envelope.bytes == operation.memory.size()) {
    theirs = name(static_cast<DataType>(std::min(envelope.dtype, 0xFFu)));
    ours = name(*operation.dtype);
  }
  return Status(Code::kMismatch, rank_text(envelope.source) + " sends " + theirs + " with " + tag_text(envelope.tag) +
                                     " to " + rank_text(config_.self) + ", which expects " + ours);
}

/// A message of this worker to itself.
void Engine::Impl::meet_own(Receive& receive, const Envelope& envelope) {
  Send& send = *find_send(envelope.send_id);
  const std::span<const std::byte> from = send.operation.data;
  const Status status = send.operation.refusal.is_ok() ? compare(receive, envelope) : send.operation.refusal;
  if (!status.is_ok() || from.empty() || from.data() == receive.operation.memory.data()) {
    return end_own(send, receive, status);
  }
  send.is_copied = true;
  set_timer(send, Instant::max());
  copy(receive, from, send.id, {}, own_actions_);
}

void Engine::Impl::end_own(Send& send, Receive& receive, const Status& status) {
  send.failure = status;
  send.is_over = true;
  complete(receive, status);
  complete_if_over(send);
}

void Engine::Impl::refuse(const Envelope& envelope, const Status& why) {
  wire::Header header = header_to(wire::MessageType::kClose, envelope.send_id);
  header.flags = wire::kFlagAnswer;
  enqueue(peer_of(envelope.source), header, wire::encode_reason(why));
}

}  // namespace herring::point_to_point
