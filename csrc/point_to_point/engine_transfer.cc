// Large messages: the receiver posts receives into the caller's memory, invites the chunks, and accepts the whole.

#include <algorithm>

#include "point_to_point/engine_impl.h"

namespace herring::point_to_point {
namespace {

constexpr std::uint32_t kMaxRetries = 8;

}  // namespace

void Engine::Impl::handle_invite(Instant now, Peer& peer, const wire::Header& header) {
  Send* const send = find_send(header.op);
  const bool expected = send != nullptr && send->operation.to == peer.id && !send->is_queued && !send->is_eager &&
                        header.count > 0 && header.chunk == send->invited &&
                        header.count <= send->chunks - send->invited && header.tag != 0 &&
                        header.tag < (std::uint64_t{1} << 62);
  if (!expected) {
    ++stats_.messages_rejected;
    return;
  }
  send->invited += header.count;
  if (!send->operation.refusal.is_ok()) return fail(now, *send, send->operation.refusal);
  if (send->is_over || !send->failure.is_ok()) return;  // The withdrawal says how many were pushed.
  const std::uint64_t chunk_bytes = link_config(peer).chunk_bytes;
  for (std::uint32_t i = 0; i < header.count; ++i) {
    const std::uint32_t chunk = header.chunk + i;
    const std::uint64_t offset = chunk * chunk_bytes;
    wire::Header data = header_to(wire::MessageType::kData, send->id);
    data.tag = header.tag + i;
    data.offset = offset;
    data.chunk = chunk;
    const std::span<const std::byte> bytes =
        send->operation.data.subspan(offset, std::min(chunk_bytes, send->operation.data.size() - offset));
    data.payload_bytes = static_cast<std::uint32_t>(bytes.size());
    ++send->pushed;
    ++send->flying;
    post_send(peer, Tag{data.tag}, data, {}, bytes, {Flight::Kind::kData, peer.id, send->id});
  }
}

void Engine::Impl::start_incoming(Receive& receive) {
  Peer& peer = peer_of(receive.met.source);
  incoming_.emplace(SendKey{peer.id, receive.send_id}, receive.id);
  if (peer.incoming >= config_.max_incoming_of_peer || incoming_now_ >= config_.max_incoming) {
    receive.is_waiting = true;
    peer.waiting.push_back(receive.id);
    ++waiting_now_;
    return;
  }
  receive.is_waiting = false;
  ++peer.incoming;
  ++incoming_now_;
  stats_.incoming_peak = std::max<std::uint64_t>(stats_.incoming_peak, incoming_now_);
  const std::uint64_t chunk_bytes = link_config(peer).chunk_bytes;
  receive.chunks = static_cast<std::uint32_t>((receive.met.bytes + chunk_bytes - 1) / chunk_bytes);
  receive.base_tag = next_tag_;
  next_tag_ += receive.chunks;
  advance(receive);
}

/// Gives free places to those who wait, peer by peer.
void Engine::Impl::start_waiting() {
  const auto count = static_cast<std::uint32_t>(peers_.size());
  std::uint32_t fruitless = 0;
  while (waiting_now_ > 0 && incoming_now_ < config_.max_incoming && fruitless < count) {
    Peer& peer = peers_[next_turn_];
    next_turn_ = (next_turn_ + 1) % count;
    ++fruitless;
    if (peer.waiting.empty() || peer.incoming >= config_.max_incoming_of_peer) continue;
    fruitless = 0;
    Receive& receive = *find_receive(peer.waiting.front());
    peer.waiting.pop_front();
    --waiting_now_;
    incoming_.erase({peer.id, receive.send_id});
    start_incoming(receive);
  }
}

/// Invites what the window allows, half a window at a time; ends with the last chunk.
void Engine::Impl::advance(Receive& receive) {
  Peer& peer = peer_of(receive.met.source);
  const std::uint32_t window = link_config(peer).window;
  const std::uint32_t outstanding = receive.invited - receive.received;
  if (receive.received == receive.chunks) {
    enqueue(peer, header_to(wire::MessageType::kAccept, receive.send_id));
    end_incoming(receive);
    complete(receive, Status::ok());
    start_waiting();
    return;
  }
  if (receive.invited == receive.chunks || outstanding > window / 2) return;
  wire::Header header = header_to(wire::MessageType::kInvite, receive.send_id);
  header.chunk = receive.invited;
  header.count = std::min(window - outstanding, receive.chunks - receive.invited);
  header.tag = receive.base_tag + receive.invited;
  for (std::uint32_t i = 0; i < header.count; ++i) post_chunk(receive, receive.invited + i, 0);
  receive.invited += header.count;
  enqueue(peer, header);
}

void Engine::Impl::post_chunk(Receive& receive, std::uint32_t chunk, std::uint32_t retries) {
  const Peer& peer = peer_of(receive.met.source);
  const std::uint64_t chunk_bytes = link_config(peer).chunk_bytes;
  const std::uint64_t offset = chunk * chunk_bytes;
  const std::span<std::byte> memory =
      receive.operation.memory.subspan(offset, std::min(chunk_bytes, receive.met.bytes - offset));
  const Token token{next_token_++};
  flights_.emplace(token.value, Flight{Flight::Kind::kReceive, peer.id, receive.id, chunk, retries});
  receive.open.emplace(chunk, token.value);
  actions_[peer.link].emplace_back(PostReceiveAction{Tag{receive.base_tag + chunk}, memory, token});
}

bool Engine::Impl::is_expected(const Receive& receive, std::uint32_t chunk, const wire::Header& header) const {
  const std::uint64_t chunk_bytes = link_config(peer_of(receive.met.source)).chunk_bytes;
  const std::uint64_t offset = chunk * chunk_bytes;
  return header.type == wire::MessageType::kData && header.job_id == config_.job_id &&
         header.epoch == config_.epoch.value && header.sender == receive.met.source.value &&
         header.op == receive.send_id && header.tag == receive.base_tag + chunk && header.chunk == chunk &&
         header.offset == offset && header.payload_bytes == std::min(chunk_bytes, receive.met.bytes - offset);
}

void Engine::Impl::on_received(Instant now, Token token, const Status& status, const wire::Header& header) {
  const auto found = flights_.find(token.value);
  if (found == flights_.end() || found->second.kind != Flight::Kind::kReceive) return;
  const Flight flight = found->second;
  Receive& receive = *find_receive(flight.id);
  if (receive.is_closing) return;  // Withdrawn.
  flights_.erase(found);
  receive.open.erase(flight.chunk);
  if (status.is_ok() && is_expected(receive, flight.chunk, header)) {
    ++receive.received;
    if (receive.has_failed) {
      drain(receive, false);
    } else {
      advance(receive);
    }
    return;
  }
  ++stats_.messages_rejected;
  const bool is_enough = status.code() == Code::kCorrupted || flight.retries >= kMaxRetries;
  // What was invited has to meet a receive, or its memory there is never free again.
  if (has_arrived(status)) post_chunk(receive, flight.chunk, flight.retries + 1);
  if (receive.has_failed) return drain(receive, false);
  if (has_arrived(status) && !is_enough) return;
  const std::string what = "receive of " + std::to_string(receive.met.bytes) + " bytes with " +
                           tag_text(receive.met.tag) + " from " + rank_text(receive.met.source) + ": ";
  fail(now, receive,
       status.is_ok() ? Status(Code::kTransport, what + "other messages came in its place")
                      : Status(status.code(), what + status.message()));
}

/// The receive is no longer one of those coming in. start_waiting() comes after its completion.
void Engine::Impl::end_incoming(Receive& receive) {
  Peer& peer = peer_of(receive.met.source);
  incoming_.erase({peer.id, receive.send_id});
  if (receive.is_waiting) {
    std::erase(peer.waiting, receive.id);
    --waiting_now_;
    return;
  }
  --peer.incoming;
  --incoming_now_;
}

}  // namespace herring::point_to_point
