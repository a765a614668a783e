// Control messages between two workers: numbered, taken in in order, never more than `credits` on their way.

#include <algorithm>
#include <utility>

#include "point_to_point/engine_impl.h"
#include "point_to_point/message.h"

namespace herring::point_to_point {

void Engine::Impl::add_unsent(Peer& peer) {
  ++peer.unsent;
  if (!peer.is_gone()) ++unsent_;
}

void Engine::Impl::take_unsent(Peer& peer, std::size_t count) {
  peer.unsent -= count;
  if (!peer.is_gone()) unsent_ -= count;
}

wire::Header Engine::Impl::header_to(wire::MessageType type, std::uint64_t send_id) const {
  wire::Header header;
  header.type = type;
  header.job_id = config_.job_id;
  header.epoch = config_.epoch.value;
  header.sender = config_.self.value;
  header.op = send_id;
  return header;
}

void Engine::Impl::enqueue(Peer& peer, wire::Header header, std::vector<std::byte> body) {
  if (peer.lost) return;
  header.payload_bytes = static_cast<std::uint32_t>(body.size());
  peer.queue.push_back({header, std::move(body), 0});
  add_unsent(peer);
  dispatch(peer);
}

void Engine::Impl::dispatch(Peer& peer) {
  while (!peer.queue.empty() && peer.credits > 0) {
    Outgoing out = std::move(peer.queue.front());
    peer.queue.pop_front();
    take_unsent(peer);
    --peer.credits;
    Flight flight{Flight::Kind::kControl, peer.id};
    std::span<const std::byte> payload;
    if (out.send != 0) fill_envelope(peer, out, payload, flight);
    out.header.offset = peer.next_out++;
    out.header.part = std::exchange(peer.to_return, 0);
    post_send(peer, kControlTag, out.header, std::move(out.body), payload, flight);
  }
}

/// Whether a small message may travel inside is known only now.
void Engine::Impl::fill_envelope(Peer& peer, Outgoing& out, std::span<const std::byte>& payload, Flight& flight) {
  Send& send = *find_send(out.send);
  const LinkConfig& link = link_config(peer);
  const std::span<const std::byte> data = send.operation.data;
  send.is_queued = false;
  const bool may_be_eager = data.size() <= link.eager_bytes && peer.eager_out < link.eager_window;
  send.is_eager = data.empty() || (may_be_eager && send.operation.refusal.is_ok());
  out.header = header_to(wire::MessageType::kEnvelope, send.id);
  out.header.group = send.operation.group.value;
  out.header.tag = send.operation.tag;
  out.header.count = send.operation.dtype ? static_cast<std::uint32_t>(*send.operation.dtype) : 0;
  const auto body = encode_envelope(data.size());
  out.body.assign(body.begin(), body.end());
  if (send.is_eager) {
    out.header.flags = wire::kFlagEager;
    payload = data;
    if (!data.empty()) {
      ++peer.eager_out;
      ++send.flying;
      flight.id = send.id;
    }
  }
  out.header.payload_bytes = static_cast<std::uint32_t>(body.size() + payload.size());
}

void Engine::Impl::post_send(Peer& peer, Tag tag, const wire::Header& header, std::vector<std::byte> body,
                             std::span<const std::byte> payload, const Flight& flight) {
  const Token token{next_token_++};
  flights_.emplace(token.value, flight);
  add_unsent(peer);
  actions_[peer.link].emplace_back(SendAction{peer.id, tag, header, std::move(body), payload, token});
}

void Engine::Impl::on_sent(Instant now, Token token, const Status& status) {
  const auto found = flights_.find(token.value);
  if (found == flights_.end() || found->second.kind == Flight::Kind::kReceive) return;
  const Flight flight = found->second;
  flights_.erase(found);
  take_unsent(peer_of(flight.peer));
  Send* const send = flight.id == 0 ? nullptr : find_send(flight.id);
  if (send != nullptr) --send->flying;
  if (!status.is_ok()) {
    if (flight.kind == Flight::Kind::kControl) {
      // A gap in the numbers: nothing that comes later could be taken in.
      on_peer_lost(now, flight.peer, rank_text(flight.peer) + " cannot be reached: " + status.message());
      if (flight.id != 0) {
        if (Send* const still = find_send(flight.id)) complete_if_over(*still);
      }
      return;
    }
    if (send != nullptr && !send->is_over && send->failure.is_ok()) return fail(now, *send, status);
  }
  if (send != nullptr) complete_if_over(*send);
}

bool Engine::Impl::on_control(Instant now, std::uint32_t link, const wire::Header& header,
                              std::span<const std::byte> bytes, Token token) {
  const bool known = header.job_id == config_.job_id && header.epoch == config_.epoch.value &&
                     header.sender < peers_.size() && peers_[header.sender].link == link &&
                     !peers_[header.sender].lost && header.payload_bytes == bytes.size();
  if (!known) {
    ++stats_.messages_rejected;
    return false;
  }
  Peer& peer = peers_[header.sender];
  if (header.type == wire::MessageType::kReturn) {
    if (header.part == 0 || !bytes.empty() || !take_credits(peer, header)) ++stats_.messages_rejected;
    dispatch(peer);
    return false;
  }
  const bool numbered = header.type == wire::MessageType::kEnvelope || header.type == wire::MessageType::kAccept ||
                        header.type == wire::MessageType::kInvite || header.type == wire::MessageType::kClose ||
                        header.type == wire::MessageType::kWithdraw;
  const bool in_window = header.offset >= peer.next_in && header.offset - peer.next_in < link_config(peer).credits;
  if (!numbered || !in_window || peer.held.contains(header.offset) ||
      bytes.size() > max_body_bytes(link_config(peer)) || !take_credits(peer, header)) {
    ++stats_.messages_rejected;
    return false;
  }
  Body body{bytes, token};
  if (header.offset != peer.next_in) {
    body.is_kept = !bytes.empty();
    peer.held.emplace(header.offset, Held{header, body});
    hold_bytes(bytes.size());
  } else {
    take_in(now, peer, header, body);
    take_in_held(now, peer);
  }
  dispatch(peer);
  return_credits(peer);
  return body.is_kept;
}

/// Those whose turn has come.
void Engine::Impl::take_in_held(Instant now, Peer& peer) {
  while (!peer.lost && !peer.held.empty() && peer.held.begin()->first == peer.next_in) {
    Held next = peer.held.begin()->second;
    peer.held.erase(peer.held.begin());
    stats_.held_bytes -= next.body.bytes.size();
    const bool was_kept = std::exchange(next.body.is_kept, false);
    take_in(now, peer, next.header, next.body);
    if (was_kept && !next.body.is_kept) release(peer.id, next.body.token);
  }
}

bool Engine::Impl::take_credits(Peer& peer, const wire::Header& header) {
  if (header.part > link_config(peer).credits - peer.credits) return false;
  peer.credits += header.part;
  return true;
}

void Engine::Impl::return_credits(Peer& peer) {
  if (peer.copying > 0) return;  // With the Accepts that come next.
  if (peer.lost || peer.to_return < link_config(peer).credits / 2) return;
  wire::Header header = header_to(wire::MessageType::kReturn, 0);
  header.part = std::exchange(peer.to_return, 0);
  post_send(peer, kControlTag, header, {}, {}, {Flight::Kind::kControl, peer.id});
}

void Engine::Impl::hold_bytes(std::size_t bytes) {
  stats_.held_bytes += bytes;
  stats_.held_bytes_peak = std::max(stats_.held_bytes_peak, stats_.held_bytes);
}

void Engine::Impl::take_in(Instant now, Peer& peer, const wire::Header& header, Body& body) {
  ++peer.next_in;
  ++peer.to_return;
  switch (header.type) {
    case wire::MessageType::kEnvelope:
      return handle_envelope(peer, header, body);
    case wire::MessageType::kAccept:
      return handle_accept(peer, header);
    case wire::MessageType::kInvite:
      return handle_invite(now, peer, header);
    case wire::MessageType::kClose:
      return handle_close(peer, header, body.bytes);
    case wire::MessageType::kWithdraw:
      return handle_withdraw(now, peer, header, body.bytes);
    default:
      ++stats_.messages_rejected;
  }
}

void Engine::Impl::handle_envelope(Peer& peer, const wire::Header& header, Body& body) {
  const std::optional<std::uint64_t> bytes = decode_envelope(body.bytes);
  const SendKey key{peer.id, header.op};
  if (!bytes || header.op == 0 || unmatched_.contains(key) || incoming_.contains(key)) {
    ++stats_.messages_rejected;
    return;
  }
  const LinkConfig& link = link_config(peer);
  Envelope envelope;
  envelope.source = peer.id;
  envelope.send_id = header.op;
  envelope.group = GroupId{header.group};
  envelope.tag = header.tag;
  envelope.bytes = *bytes;
  envelope.dtype = header.count;
  envelope.is_eager = (header.flags & wire::kFlagEager) != 0;
  const std::span<const std::byte> data = body.bytes.subspan(kEnvelopeBytes);
  const bool is_whole = envelope.is_eager ? data.size() == *bytes : data.empty() && *bytes > 0;
  const bool fits_window = data.empty() || (data.size() <= link.eager_bytes && peer.eager_in < link.eager_window);
  if (!is_whole || !fits_window) {
    ++stats_.messages_rejected;
    refuse(envelope,
           Status(Code::kProtocol, rank_text(config_.self) + " got a message of " + std::to_string(*bytes) +
                                       " bytes with " + std::to_string(data.size()) + " inside from " +
                                       rank_text(peer.id) + "; are the HERRING_* settings the same on both?"));
    return;
  }
  envelope.data = data;
  envelope.body = body.token;
  body.is_kept = arrive(std::move(envelope));
}

void Engine::Impl::handle_accept(Peer& peer, const wire::Header& header) {
  Send* const send = find_send(header.op);
  const bool expected = send != nullptr && send->operation.to == peer.id && !send->is_queued && !send->is_over &&
                        (send->is_eager || send->pushed == send->chunks);
  if (!expected) {
    ++stats_.messages_rejected;
    return;
  }
  if (send->is_eager && !send->operation.data.empty()) --peer.eager_out;
  send->is_over = true;
  send->failure = Status::ok();  // Given up too late: it has arrived.
  complete_if_over(*send);
}

}  // namespace herring::point_to_point
