#include "control/reception.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "control/handshake.h"
#include "core/descriptors.h"
#include "core/hmac.h"
#include "core/status.h"

namespace herring::control {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxFullBatches = 64;       // 16384 events in a row: by then everybody has been read.
constexpr std::uint64_t kListenerId = 0;  // Ids in epoll; connections count from kFirstConnection.
constexpr std::uint64_t kDoorbellId = 1;
constexpr ConnectionId kFirstConnection = 2;

}  // namespace

Reception::Reception(const Options& options, UniqueFd listener, House& house)
    : options_(options),
      the_name_("the " + options.name),
      house_(house),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      door_(std::move(listener)),
      lingering_(std::numeric_limits<std::size_t>::max(), options.linger, 0),
      next_id_(kFirstConnection) {
  if (!epoll_) throw Error(Code::kTransport, "epoll_create1 failed: " + errno_text(errno));
  watch_door();
  watch(doorbell_.fd(), kDoorbellId, EPOLL_CTL_ADD, EPOLLIN);
}

void Reception::watch(int fd, std::uint64_t id, int operation, std::uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) {
    throw Error(Code::kTransport, "epoll_ctl failed: " + errno_text(errno));
  }
}

void Reception::watch_door() {
  if (watches_door_ || door_.fd() < 0) return;
  watch(door_.fd(), kListenerId, EPOLL_CTL_ADD, EPOLLIN);
  watches_door_ = true;
}

bool Reception::wait(Instant until) {
  std::array<epoll_event, 256> events;
  const Instant wakeup = std::min({until, door_.next_wakeup(), lingering_.next_wakeup()});
  const int ready =
      ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms(wakeup, Clock::now()));
  if (ready < 0 && errno != EINTR) throw Error(Code::kTransport, "epoll_wait failed: " + errno_text(errno));
  const Instant now = Clock::now();
  for (int i = 0; i < ready; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    const std::uint64_t id = event.data.u64;
    if (id == kListenerId) {
      accept_some(now);
    } else if (id == kDoorbellId) {
      doorbell_.clear();
    } else {
      const auto found = connections_.find(id);
      if (found == connections_.end()) continue;
      if ((event.events & EPOLLOUT) != 0) mark(id, found->second);
      if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) readable(id, now);
    }
  }
  expire(now);
  watch_door();
  full_batches_ = ready == static_cast<int>(events.size()) ? full_batches_ + 1 : 0;
  return full_batches_ % kMaxFullBatches == 0;
}

void Reception::accept_some(Instant now) {
  const auto take = [this](UniqueFd fd) {
    ++counters_.accepted;
    const ConnectionId id = next_id_++;
    watch(fd.get(), id, EPOLL_CTL_ADD, EPOLLIN);
    connections_.try_emplace(id, std::move(fd));
    return id;
  };
  const auto evict = [this](ConnectionId id) {
    ++counters_.slow_strangers;
    connections_.erase(id);
  };
  const int listener = door_.fd();
  door_.expect(house_.missing());
  door_.accept_some(now, take, evict);
  if (!watches_door_ || door_.fd() >= 0) return;
  if (options_.logger) {
    options_.logger->log_limited(LogLevel::kWarning, options_.name + ".descriptors",
                                 the_name_ + " cannot accept connections for now" + descriptor_hint());
  }
  watch(listener, kListenerId, EPOLL_CTL_DEL, 0);
  watches_door_ = false;
}

void Reception::expire(Instant now) {
  for (const ConnectionId id : door_.overdue(now)) {
    ++counters_.slow_strangers;
    if (const auto found = connections_.find(id); found != connections_.end()) {
      log_stranger(found->second, "did not finish the handshake in time");
      connections_.erase(found);
    }
  }
  for (const ConnectionId id : lingering_.overdue(now)) connections_.erase(id);
}

void Reception::readable(ConnectionId id, Instant now) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = found->second;
  const bool open = connection.socket.receive();
  if (connection.phase == Phase::kIn) house_.alive(id, now);
  Frame frame;
  for (;;) {
    const FrameReader::Result result = connection.socket.next(frame);
    if (result == FrameReader::Result::kNeedMore) break;
    const bool is_frame = result == FrameReader::Result::kFrame;
    if (is_frame && take(id, connection, frame, now)) continue;
    const std::string what =
        is_frame ? "a frame that no correct process sends at that point" : connection.socket.ending();
    if (connection.phase == Phase::kIn) {
      ++counters_.protocol_errors;
      house_.ended(id, "dropped: it sent " + what, now);
    } else if (connection.phase != Phase::kLingering) {
      bad_stranger(connection, is_frame ? "a frame that is not the handshake" : what);
    }
    return forget(id);
  }
  if (!open) broken(id, connection, now);
}

/// False: it is dropped.
bool Reception::take(ConnectionId id, Connection& connection, const Frame& frame, Instant now) {
  switch (connection.phase) {
    case Phase::kHello:
      return greet(id, connection, frame, now);
    case Phase::kProof: {
      const House::Entry entry = house_.enter(id, frame, now);
      if (entry == House::Entry::kStranger) return false;
      door_.leave(id);
      if (entry == House::Entry::kRefused || connection.phase != Phase::kProof) return true;
      connection.phase = Phase::kIn;
      connection.socket.trust();
      connection.socket.set_user_timeout(options_.patience);
      return true;
    }
    case Phase::kIn:
      return house_.receive(id, frame, now);
    case Phase::kLingering:
      break;  // Too late.
  }
  return true;
}

bool Reception::greet(ConnectionId id, Connection& connection, const Frame& frame, Instant now) {
  Nonce nonce;
  random_bytes(nonce);
  const HostFacts facts{the_name_, options_.secret, options_.master_port, house_.has_started()};
  const auto answer = answer_hello(frame, facts, nonce);
  if (!answer) return false;
  connection.socket.send(answer->type, answer->body);
  mark(id, connection);
  if (answer->keys) {
    connection.socket.seal_with(answer->keys->to_member, answer->keys->to_hub);
    connection.phase = Phase::kProof;
  } else {
    ++counters_.refused;
    close(id, now);
  }
  return true;
}

/// The peer has ended the connection.
void Reception::broken(ConnectionId id, Connection& connection, Instant now) {
  const std::string& ending = connection.socket.ending();
  if (connection.phase == Phase::kProof) {
    ++counters_.failed_handshakes;
    house_.failed_handshake();
    log_stranger(connection, "ended the handshake; it most likely has another HERRING_SECRET");
  } else if (connection.phase == Phase::kIn) {
    house_.ended(id, ending + (ending == "connection closed" ? ": the process died" : ""), now);
  }
  forget(id);
}

void Reception::bad_stranger(const Connection& connection, const std::string& what) {
  ++counters_.bad_strangers;
  log_stranger(connection, "sent " + what);
}

void Reception::log_stranger(const Connection& connection, const std::string& what) {
  if (!options_.logger) return;
  options_.logger->log_limited(
      LogLevel::kWarning, options_.name + ".stranger",
      "dropped a connection to " + the_name_ + " from " + connection.socket.peer_name() + ": it " + what);
}

void Reception::mark(ConnectionId id, Connection& connection) {
  if (connection.is_dirty) return;
  connection.is_dirty = true;
  dirty_.push_back(id);
}

void Reception::forget(ConnectionId id) {
  door_.leave(id);
  lingering_.leave(id);
  connections_.erase(id);
}

void Reception::send(ConnectionId id, FrameType type, const SharedBody& body) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  found->second.socket.send(type, body);
  mark(id, found->second);
}

void Reception::close(ConnectionId id, Instant now) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second.phase == Phase::kLingering) return;
  door_.leave(id);
  found->second.phase = Phase::kLingering;
  lingering_.enter(id, now);
  mark(id, found->second);
}

void Reception::flush(Instant now) {
  // A broken connection may make more output: the others are told.
  while (!dirty_.empty()) {
    for (const ConnectionId id : std::exchange(dirty_, {})) {
      const auto found = connections_.find(id);
      if (found == connections_.end()) continue;
      found->second.is_dirty = false;
      write(id, found->second, now);
    }
  }
}

void Reception::write(ConnectionId id, Connection& connection, Instant now) {
  const std::uint64_t before = connection.socket.written();
  const bool open = connection.socket.flush();
  const std::uint64_t written = connection.socket.written() - before;
  counters_.bytes_sent += written;
  if (!open) {
    if (connection.phase != Phase::kIn) return forget(id);
    // What the peer said before it went (a goodbye, say) is still to be read.
    const std::string ending = connection.socket.ending();
    readable(id, now);
    const auto still = connections_.find(id);
    if (still == connections_.end() || still->second.phase != Phase::kIn) return;
    house_.ended(id, ending, now);
    return forget(id);
  }
  // It was full, and has room again: the peer has taken what it was sent.
  if (connection.waits_for_room && written > 0 && connection.phase == Phase::kIn) house_.alive(id, now);
  const bool waits = connection.socket.has_output();
  if (waits != connection.waits_for_room) {
    connection.waits_for_room = waits;
    watch(connection.socket.fd(), id, EPOLL_CTL_MOD, waits ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }
  if (!waits && connection.phase == Phase::kLingering && !connection.half_closed) {
    connection.half_closed = true;
    connection.socket.half_close();
  }
}

void Reception::close_door() {
  door_.close();
  watches_door_ = false;
}

void Reception::close_all() {
  close_door();
  connections_.clear();
}

void Reception::abandon() {
  close_all();
  epoll_.reset();
  doorbell_.close();  // In the parent another thread may be ringing it.
}

}  // namespace herring::control
