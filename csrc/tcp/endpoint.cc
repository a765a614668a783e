#include "tcp/endpoint.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/clock.h"
#include "core/hmac.h"
#include "tcp/text.h"
#include "transport/limits.h"

namespace herring::tcp {
namespace {

using transport::Completion;
using transport::kMaxOperations;

constexpr std::size_t kFlushBytes = 64 << 10;   // Worth a call of its own; smaller sends leave together, with poll().
constexpr std::size_t kEnoughBytes = 64 << 10;  // Read in one poll, where something is complete.
constexpr std::size_t kMostTurns = 4;           // Reads of what is known to be there, before others are looked for.

Status shut() { return Status(Code::kTransport, "the endpoint is shut down"); }

}  // namespace

TcpEndpoint::TcpEndpoint(const Options& options)
    : options_(options), congestion_(options.congestion), connect_timeout_(duration_of(options.connect_timeout_s)) {
  sources_ = choose_candidates(options);
  own_.socket = sources_.front().socket;
  own_.instance = options.instance;
  if (own_.instance == Instance{}) random_bytes(own_.instance);
  description_ = "tcp (builtin, " + sources_.front().name;
  for (std::size_t i = 1; i < sources_.size(); ++i) description_ += (i == 1 ? "; also " : ", ") + sources_[i].name;
  description_ += ')';
  open_listener();
  address_ = encode_address(own_);
}

TcpEndpoint::~TcpEndpoint() { shut_down(); }

void TcpEndpoint::shut_down() {
  if (std::exchange(is_shut_, true)) return;
  for (const auto& connection : connections_) {
    if (connection == nullptr) continue;
    // In a fork()ed child these are copies: the connection is its parent's.
    if (guard_.in_owner()) farewell(*connection);
    close(connection->socket);
  }
  if (listener_ >= 0) close(std::exchange(listener_, -1));
  connections_.clear();
  strangers_.clear();
  readable_.clear();
  waiting_.clear();
  dirty_.clear();
  peers_.clear();
  ready_.clear();
}

Status TcpEndpoint::post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                              Token token) {
  if (is_shut_) return shut();
  const auto found = peers_.find(to.value);
  if (found == peers_.end()) {
    return Status(Code::kInvalidArgument,
                  "post_send: peer " + std::to_string(to.value) + " is not known; add_peer() first");
  }
  Peer& peer = *found->second;
  const TwoSpans<const std::byte> memory{first, second};
  if (memory.size() > kMaxMessageBytes) {
    return Status(Code::kInvalidArgument, "post_send of " + std::to_string(memory.size()) + " bytes to peer " +
                                              std::to_string(to.value) + "; a message has at most 4 GiB");
  }
  if (!takes_sends() || !transport::takes_send(sends_, peer.count)) return Status::again();
  Send* const send = send_pool_.take();
  send->token = token;
  send->tag = tag;
  send->memory = memory;
  send->frame = encode_frame({tag, static_cast<std::uint32_t>(memory.size())});
  (peer.last != nullptr ? peer.last->next : peer.first) = send;
  peer.last = send;
  ++peer.count;
  peer.bytes += send->total();
  ++sends_;
  if (peer.is_waiting) return Status::ok();
  if (peer.bytes >= kFlushBytes) {
    flush(peer);
  } else {
    mark_dirty(peer);
  }
  return Status::ok();
}

Status TcpEndpoint::post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) {
  if (is_shut_) return shut();
  if (posts() >= kMaxOperations) return Status::again();
  receiver_.post(tag, {first, second}, token);
  return Status::ok();
}

void TcpEndpoint::cancel_receive(Token token) {
  if (!is_shut_) receiver_.cancel(token, std::chrono::steady_clock::now());
}

std::size_t TcpEndpoint::poll(std::span<Completion> completions) {
  if (is_shut_) return 0;
  flush_dirty();
  if (ready_.size() < completions.size()) {
    for (const std::uint32_t index : receiver_.take_resumed()) set_readable(*connections_[index]);
    if (readable_.empty() || ++turns_ >= kMostTurns) {
      turns_ = 0;
      handle_events();
    }
    read_some();
    run_timers();
  }
  std::size_t count = 0;
  for (; count < completions.size() && !ready_.empty(); ++count) {
    completions[count] = std::move(ready_.front());
    ready_.pop_front();
  }
  return count;
}

void TcpEndpoint::handle_events() {
  for (const epoll_event& event : events_.look()) {
    if (event.data.u64 == Events::kWake) continue;
    if (event.data.u64 == kListener) {
      accept_some();
      continue;
    }
    Connection* connection = find(event.data.u64);
    if (connection == nullptr) continue;
    if ((event.events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) {
      connection->is_writable = true;
      if (connection->stage == Stage::kConnecting) {
        on_connected(*connection);
      } else if (connection->stage == Stage::kOpen && connection->peer != nullptr) {
        flush(*connection->peer);
      }
      connection = find(event.data.u64);
      if (connection == nullptr || connection->stage == Stage::kConnecting) continue;
    }
    if ((event.events & (EPOLLRDHUP | EPOLLERR | EPOLLHUP)) != 0) connection->in.is_ending = true;
    if ((event.events & (EPOLLIN | EPOLLRDHUP | EPOLLERR | EPOLLHUP)) != 0) set_readable(*connection);
  }
}

void TcpEndpoint::set_readable(Connection& connection) {
  if (std::exchange(connection.is_readable, true)) return;
  readable_.push_back(connection.name());
}

/// One turn for each connection that has something.
void TcpEndpoint::read_some() {
  if (readable_.empty()) return;
  const std::uint64_t before = stats_.bytes_received;
  for (const std::uint64_t name : std::exchange(readable_, {})) {
    Connection* const connection = find(name);
    if (connection == nullptr) continue;
    if (stats_.bytes_received - before >= kEnoughBytes && !ready_.empty()) {
      readable_.push_back(name);  // With the next poll.
      continue;
    }
    connection->is_readable = false;
    if (connection->stage != Stage::kOpen && !greet(*connection)) continue;
    if (connection->stage != Stage::kOpen) continue;
    std::string why;
    switch (receiver_.read(connection->in, why)) {
      case Receiver::Outcome::kDrained:
      case Receiver::Outcome::kPaused:
        break;
      case Receiver::Outcome::kMore:
        set_readable(*connection);
        break;
      case Receiver::Outcome::kClosed:
        close_connection(*connection, why);
        break;
    }
  }
}

Instant TcpEndpoint::next_timer() const { return std::min(receiver_.next_tick(), next_connect_timer()); }

void TcpEndpoint::run_timers() {
  if (next_timer() == Instant::max()) return;
  const Instant now = std::chrono::steady_clock::now();
  if (now >= receiver_.next_tick()) receiver_.tick(now);
  run_connect_timers(now);
}

/// False where there may be something to poll already.
bool TcpEndpoint::begin_wait(Instant& deadline) {
  if (is_shut_) return true;
  flush_dirty();
  for (const std::uint32_t index : receiver_.take_resumed()) set_readable(*connections_[index]);
  if (!ready_.empty() || !readable_.empty() || events_.has_events()) return false;
  deadline = std::min(deadline, next_timer());
  return true;
}

void TcpEndpoint::wait(Instant deadline, std::span<const int> also) {
  if (!begin_wait(deadline) || events_.take_wake()) return;
  events_.wait(deadline, also);
}

bool TcpEndpoint::prepare_wait(std::vector<int>& descriptors, Instant& deadline) {
  if (!begin_wait(deadline) || events_.take_wake()) return false;
  descriptors.push_back(events_.descriptor());
  return true;
}

std::unique_ptr<Endpoint> open_endpoint(const Options& options) { return std::make_unique<TcpEndpoint>(options); }

}  // namespace herring::tcp
