#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <utility>

#include "tcp/endpoint.h"
#include "tcp/text.h"

namespace herring::tcp {
namespace {

using transport::CompletionKind;

constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // In one call.
constexpr std::size_t kMostParts = 192;                   // 64 messages; the system takes 1,024.

}  // namespace

void TcpEndpoint::mark_dirty(Peer& peer) {
  if (std::exchange(peer.is_dirty, true)) return;
  dirty_.push_back(&peer);
}

void TcpEndpoint::flush_dirty() {
  if (dirty_.empty()) return;
  const std::vector<Peer*> peers = std::exchange(dirty_, {});
  for (Peer* const peer : peers) {
    peer->is_dirty = false;
    flush(*peer);
  }
}

/// The next call's worth: frame, first and second span of each message.
std::size_t TcpEndpoint::gather(const Peer& peer, std::span<iovec> parts, std::size_t& bytes) const {
  std::size_t count = 0;
  std::size_t skipped = peer.sent;
  bytes = 0;
  for (const Send* send = peer.first; send != nullptr && bytes < kMostBytes && count + 3 <= parts.size();
       send = send->next) {
    if (skipped < kFrameBytes) {
      // iovec has no const; what is sent is not written to.
      parts[count++] = {const_cast<std::byte*>(send->frame.data()) + skipped, kFrameBytes - skipped};
      bytes += kFrameBytes - skipped;
    }
    const std::size_t from = skipped < kFrameBytes ? 0 : skipped - kFrameBytes;
    const std::size_t most = std::min(send->memory.size() - from, kMostBytes);
    count = send->memory.slice(from, most, parts, count);
    bytes += most;
    skipped = 0;
    if (most < send->memory.size() - from) break;
  }
  return count;
}

/// Sends what the socket takes.
void TcpEndpoint::flush(Peer& peer) {
  if (peer.connection == nullptr) ensure_connection(peer);
  while (peer.first != nullptr && peer.connection != nullptr) {
    Connection& connection = *peer.connection;
    if (connection.stage != Stage::kOpen || !connection.is_writable) return;
    std::array<iovec, kMostParts> parts;
    std::size_t bytes = 0;
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = gather(peer, parts, bytes);
    const ssize_t result = sendmsg(connection.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    ++stats_.send_calls;
    if (result < 0 && errno == EINTR) continue;
    if (result < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      const std::string why = error_text(errno);
      // What came before it broke is there to be read.
      std::string ignored;
      while (receiver_.read(connection.in, ignored) == Receiver::Outcome::kMore) {
      }
      return close_connection(connection, why);
    }
    const std::size_t sent = result > 0 ? static_cast<std::size_t>(result) : 0;
    stats_.bytes_sent += sent;
    advance(peer, sent);
    if (sent < bytes) connection.is_writable = false;  // The system tells when there is room.
  }
}

void TcpEndpoint::advance(Peer& peer, std::size_t bytes) {
  peer.sent += bytes;
  peer.bytes -= bytes;
  while (peer.first != nullptr && peer.sent >= peer.first->total()) {
    peer.sent -= peer.first->total();
    Send* const send = pop_send(peer);
    ready_.push_back({send->token, CompletionKind::kSend, 0, {}});
    ++stats_.messages_sent;
    --sends_;
    send_pool_.give_back(send);
  }
}

Send* TcpEndpoint::pop_send(Peer& peer) {
  Send* const send = peer.first;
  peer.first = send->next;
  if (peer.first == nullptr) peer.last = nullptr;
  --peer.count;
  return send;
}

void TcpEndpoint::fail_sends(Peer& peer, Code code, const std::string& why) {
  while (peer.first != nullptr) {
    Send* const send = pop_send(peer);
    ready_.push_back(
        {send->token, CompletionKind::kSend, 0,
         Status(code, "send of " + std::to_string(send->memory.size()) + " bytes, tag " + hex(send->tag.value) +
                          ", to peer " + std::to_string(peer.id.value) + " at " + peer.text + ": " + why)});
    --sends_;
    send_pool_.give_back(send);
  }
  peer.sent = 0;
  peer.bytes = 0;
}

}  // namespace herring::tcp
