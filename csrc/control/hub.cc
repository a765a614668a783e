#include "control/hub.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "control/doorway.h"
#include "control/membership.h"
#include "control/port.h"
#include "control/protocol.h"
#include "control/socket.h"
#include "core/hmac.h"
#include "core/process.h"
#include "core/status.h"
#include "core/text.h"

namespace herring::control {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Duration kLingerPatience = std::chrono::seconds(1);
constexpr Duration kDrainPatience = std::chrono::seconds(1);
constexpr Duration kClosePatience = std::chrono::milliseconds(500);
constexpr int kMaxFullBatches = 64;       // 16384 events in a row: by then every member has been read.
constexpr std::uint64_t kListenerId = 0;  // Ids in epoll; connections count from kFirstConnection.
constexpr std::uint64_t kStopId = 1;
constexpr std::uint64_t kNewsId = 2;
constexpr ConnectionId kFirstConnection = 3;

enum class Phase : std::uint8_t {
  kHello,      // Waits for Hello.
  kJoin,       // Has sent the challenge.
  kMember,     // Belongs to the membership.
  kLingering,  // Sends what is left, then waits for the peer to close, so that nothing sent is lost in a reset.
};

struct Connection {
  explicit Connection(UniqueFd fd) : socket(std::move(fd)) {}
  FrameSocket socket;
  Phase phase = Phase::kHello;
  bool waits_for_room = false;  // EPOLLOUT is on.
  bool half_closed = false;
};

const HubOptions& checked(const HubOptions& options) {
  if (options.workers == 0) throw Error(Code::kInvalidArgument, "a job needs at least 1 worker, not 0");
  if (options.heartbeat <= Duration::zero() || options.dead_after <= options.heartbeat) {
    throw Error(Code::kInvalidArgument, "dead_after (" + seconds_text(options.dead_after) +
                                            ") must be longer than heartbeat (" + seconds_text(options.heartbeat) +
                                            "), and both positive");
  }
  return options;
}

}  // namespace

class Hub::Impl final {
 public:
  explicit Impl(const HubOptions& options);
  ~Impl();
  std::uint16_t port() const { return port_; }
  HubCounters counters() const {
    const std::lock_guard lock(mutex_);
    return published_;
  }
  bool in_forked_child() const { return !guard_.in_owner(); }
  void never_comes(Role role, std::uint32_t rank, const std::string& why) {
    {
      const std::lock_guard lock(mutex_);
      lost_.push_back({role, rank, why});
    }
    news_.raise();
  }
  /// In a forked child: the thread is not here, and the connections belong to the parent.
  void abandon();

 private:
  void run();
  void step();
  void take_news();
  Instant next_wakeup() const;
  bool finished(Instant now);
  void watch(int fd, std::uint64_t id, int operation, std::uint32_t events) const;
  void accept_some(Instant now);
  void watch_door();
  void readable(ConnectionId id, Instant now);
  void dispatch(ConnectionId id, Connection& connection, const Frame& frame, Instant now);
  void greet(ConnectionId id, Connection& connection, const Frame& frame, Instant now);
  void refuse_stranger(ConnectionId id, Connection& connection, RefuseCode code, std::string text, Instant now);
  void bad_stranger(ConnectionId id);
  void log_stranger(const Connection& connection, std::string_view what);
  void linger(ConnectionId id, Connection& connection, Instant now);
  /// The connection is no more.
  void ended(ConnectionId id);
  void perform(Instant now);
  void flush(Instant now);
  void publish();

  const HubOptions options_;
  const ForkGuard guard_;
  std::uint16_t port_ = 0;
  UniqueFd epoll_;
  Signal stop_;
  Signal news_;

  // The thread's own.
  Membership membership_;
  std::optional<Doorway> door_;
  bool watches_door_ = false;
  Lobby lingering_{std::numeric_limits<std::size_t>::max(), kLingerPatience, 0};
  std::unordered_map<ConnectionId, Connection> connections_;
  std::vector<ConnectionId> dirty_;  // Have output to be written.
  ConnectionId next_id_ = kFirstConnection;
  int full_batches_ = 0;
  bool stopping_ = false;
  bool closed_ = false;
  Instant stop_deadline_ = Instant::max();
  HubCounters counters_;

  struct Lost {
    Role role = Role::kWorker;
    std::uint32_t rank = 0;
    std::string why;
  };

  mutable std::mutex mutex_;
  HubCounters published_;   // Guarded by mutex_, as
  std::vector<Lost> lost_;  // What the thread is to hear of who never joins.
  std::thread thread_;
};

Hub::Impl::Impl(const HubOptions& options)
    : options_(checked(options)),
      membership_({options.workers, options.servers, options.heartbeat, options.dead_after, options.job_id,
                   options.lead, options.doubt_for, options.settle, Clock::now()}) {
  raise_file_limit(std::size_t{options.workers} + options.servers);
  door_.emplace(options.lead ? listen_alone(options, port_) : listen_on(options.listen_host, options.ports, port_));
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) throw Error(Code::kTransport, "epoll_create1 failed: " + errno_text(errno));
  watch_door();
  watch(stop_.fd(), kStopId, EPOLL_CTL_ADD, EPOLLIN);
  watch(news_.fd(), kNewsId, EPOLL_CTL_ADD, EPOLLIN);
  thread_ = start_thread("herring-hub", [this] { run(); });
}

Hub::Impl::~Impl() {
  stop_.raise();
  thread_.join();
}

void Hub::Impl::abandon() {
  door_.reset();
  epoll_.reset();
  stop_.close();
  news_.close();
  connections_.clear();
  thread_.detach();
}

void Hub::Impl::run() {
  try {
    while (!finished(Clock::now())) step();
  } catch (const std::exception&) {
    // Out of memory or out of kernel objects. Closed connections tell every member at once.
    door_->close();
    connections_.clear();
  }
}

Instant Hub::Impl::next_wakeup() const {
  return std::min({membership_.next_wakeup(), door_->next_wakeup(), lingering_.next_wakeup(), stop_deadline_});
}

void Hub::Impl::step() {
  std::array<epoll_event, 256> events{};
  const int ready =
      ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms(next_wakeup(), Clock::now()));
  if (ready < 0 && errno != EINTR) throw Error(Code::kTransport, "epoll_wait failed: " + errno_text(errno));
  const Instant now = Clock::now();
  for (int i = 0; i < ready; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    const std::uint64_t id = event.data.u64;
    if (id == kListenerId) {
      accept_some(now);
    } else if (id == kStopId) {
      stop_.clear();
      stopping_ = true;
      stop_deadline_ = now + (membership_.started() ? kDrainPatience : Duration::zero());
      door_->close();  // The next hub can have the port.
      watches_door_ = false;
    } else if (id == kNewsId) {
      take_news();
    } else {
      if ((event.events & EPOLLOUT) != 0) dirty_.push_back(id);
      if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) readable(id, now);
    }
  }
  for (const ConnectionId id : door_->overdue(now)) {
    ++counters_.slow_strangers;
    if (const auto found = connections_.find(id); found != connections_.end()) {
      log_stranger(found->second, "did not finish the handshake in time");
      connections_.erase(found);
    }
  }
  for (const ConnectionId id : lingering_.overdue(now)) connections_.erase(id);
  watch_door();
  // With a full batch more may wait to be read: nobody is called silent before it was.
  full_batches_ = ready == static_cast<int>(events.size()) ? full_batches_ + 1 : 0;
  if (full_batches_ % kMaxFullBatches == 0) membership_.tick(now);
  perform(now);
  flush(now);
  publish();
}

void Hub::Impl::take_news() {
  news_.clear();
  std::vector<Lost> lost;
  {
    const std::lock_guard lock(mutex_);
    lost.swap(lost_);
  }
  for (const Lost& one : lost) membership_.never_comes(one.role, one.rank, one.why);
}

bool Hub::Impl::finished(Instant now) {
  if (!stopping_) return false;
  if (!closed_ && (membership_.connected() == 0 || now >= stop_deadline_)) {
    closed_ = true;
    stop_deadline_ = now + kClosePatience;
    membership_.close();
    perform(now);
    flush(now);
    publish();
  }
  return closed_ && (lingering_.size() == 0 || now >= stop_deadline_);
}

void Hub::Impl::watch(int fd, std::uint64_t id, int operation, std::uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) {
    throw Error(Code::kTransport, "epoll_ctl failed: " + errno_text(errno));
  }
}

void Hub::Impl::accept_some(Instant now) {
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
  const int listener = door_->fd();
  door_->accept_some(now, take, evict);
  if (watches_door_ && door_->fd() < 0) {
    if (options_.logger) {
      options_.logger->log_limited(LogLevel::kWarning, "hub.descriptors",
                                   "the hub cannot accept connections for now" + descriptor_hint());
    }
    watch(listener, kListenerId, EPOLL_CTL_DEL, 0);
    watches_door_ = false;
  }
}

void Hub::Impl::watch_door() {
  if (watches_door_ || door_->fd() < 0) return;
  watch(door_->fd(), kListenerId, EPOLL_CTL_ADD, EPOLLIN);
  watches_door_ = true;
}

void Hub::Impl::readable(ConnectionId id, Instant now) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = found->second;
  const bool open = connection.socket.receive();
  Frame frame;
  for (;;) {
    const FrameReader::Result result = connection.socket.next(frame);
    if (result == FrameReader::Result::kNeedMore) break;
    if (result == FrameReader::Result::kBad) {
      if (connection.phase == Phase::kMember) {
        ++counters_.protocol_errors;
        membership_.disconnected(id, "dropped: it sent " + connection.socket.ending(), now);
      } else if (connection.phase != Phase::kLingering) {
        ++counters_.bad_strangers;
        log_stranger(connection, "sent " + connection.socket.ending());
      }
      return ended(id);
    }
    dispatch(id, connection, frame, now);
    perform(now);
    if (!connections_.contains(id)) return;
  }
  if (open) return;
  if (connection.phase == Phase::kJoin) {
    ++counters_.failed_handshakes;
    membership_.note_failed_handshake();
    log_stranger(connection, "ended the handshake; it most likely has another HERRING_SECRET");
  }
  if (connection.phase == Phase::kMember) {
    const std::string& ending = connection.socket.ending();
    membership_.disconnected(id, ending + (ending == "connection closed" ? ": the process died" : ""), now);
  }
  ended(id);
}

void Hub::Impl::ended(ConnectionId id) {
  door_->leave(id);
  lingering_.leave(id);
  connections_.erase(id);
}

void Hub::Impl::bad_stranger(ConnectionId id) {
  ++counters_.bad_strangers;
  if (const auto found = connections_.find(id); found != connections_.end()) {
    log_stranger(found->second, "sent what is not the handshake");
  }
  ended(id);
}

void Hub::Impl::log_stranger(const Connection& connection, std::string_view what) {
  if (!options_.logger) return;
  options_.logger->log_limited(
      LogLevel::kWarning, "hub.stranger",
      "dropped a connection to the hub from " + connection.socket.peer_name() + ": it " + std::string(what));
}

void Hub::Impl::dispatch(ConnectionId id, Connection& connection, const Frame& frame, Instant now) {
  switch (connection.phase) {
    case Phase::kHello:
      return greet(id, connection, frame, now);
    case Phase::kJoin: {
      const auto join = frame.type == FrameType::kJoin ? decode_join(frame.body) : std::nullopt;
      if (!join) return bad_stranger(id);
      door_->leave(id);
      membership_.join(id, *join, now);
      if (!membership_.is_member(id)) return;  // Refused: an action closes it.
      connection.phase = Phase::kMember;
      connection.socket.trust();
      connection.socket.set_user_timeout(options_.dead_after);
      return;
    }
    case Phase::kMember:
      return membership_.receive(id, frame, now);
    case Phase::kLingering:
      return;  // Too late.
  }
}

void Hub::Impl::greet(ConnectionId id, Connection& connection, const Frame& frame, Instant now) {
  const auto hello = frame.type == FrameType::kHello ? decode_hello(frame.body) : std::nullopt;
  if (!hello) return bad_stranger(id);
  if (hello->version != kProtocolVersion) {
    return refuse_stranger(id, connection, RefuseCode::kVersion,
                           "it speaks version " + std::to_string(hello->version) +
                               " of the control protocol, the hub " + std::to_string(kProtocolVersion) +
                               "; install the same Herring everywhere",
                           now);
  }
  if (hello->features != kProtocolFeatures) {
    return refuse_stranger(id, connection, RefuseCode::kFeatures,
                           "it has the control features " + std::to_string(hello->features) + ", the hub " +
                               std::to_string(kProtocolFeatures) + "; install the same Herring everywhere",
                           now);
  }
  Challenge challenge;
  random_bytes(challenge.nonce);
  challenge.master_port = options_.master_port;
  challenge.started = membership_.started();
  const Digest said = transcript(*hello, challenge);
  challenge.proof = hub_proof(options_.secret, said);
  connection.socket.send(FrameType::kChallenge, make_body(encode(challenge)));
  dirty_.push_back(id);
  const SessionKeys keys = session_keys(options_.secret, said);
  connection.socket.seal_with(keys.to_member, keys.to_hub);
  connection.phase = Phase::kJoin;
}

void Hub::Impl::refuse_stranger(ConnectionId id, Connection& connection, RefuseCode code, std::string text,
                                Instant now) {
  ++counters_.refused;
  connection.socket.send(FrameType::kRefuse, make_body(encode(Refuse{code, std::move(text)})));
  linger(id, connection, now);
}

void Hub::Impl::linger(ConnectionId id, Connection& connection, Instant now) {
  door_->leave(id);
  connection.phase = Phase::kLingering;
  lingering_.enter(id, now);
  dirty_.push_back(id);
}

void Hub::Impl::perform(Instant now) {
  for (auto& action : membership_.take_actions()) {
    const auto found = connections_.find(action.connection);
    if (found == connections_.end()) continue;
    if (action.kind == Membership::Action::Kind::kClose) {
      linger(action.connection, found->second, now);
    } else {
      found->second.socket.send(action.type, action.body);
      dirty_.push_back(action.connection);
    }
  }
}

void Hub::Impl::flush(Instant now) {
  // A broken connection may make more output: the others are told.
  while (!dirty_.empty()) {
    for (const ConnectionId id : std::exchange(dirty_, {})) {
      const auto found = connections_.find(id);
      if (found == connections_.end()) continue;
      Connection& connection = found->second;
      const std::uint64_t written = connection.socket.written();
      const bool open = connection.socket.flush();
      counters_.bytes_sent += connection.socket.written() - written;
      if (!open) {
        // What the peer said before it went (a goodbye, say) is still to be read.
        if (connection.phase == Phase::kMember) {
          readable(id, now);
          const auto still = connections_.find(id);
          if (still != connections_.end() && still->second.phase == Phase::kMember) {
            membership_.disconnected(id, still->second.socket.ending(), now);
            ended(id);
          }
          perform(now);
        } else {
          ended(id);
        }
        continue;
      }
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
  }
}

void Hub::Impl::publish() {
  const Membership::Counters& members = membership_.counters();
  const std::lock_guard lock(mutex_);
  published_ = counters_;
  published_.joined = members.joined;
  published_.refused += members.refused;
  published_.lost = members.lost;
  published_.protocol_errors += members.protocol_errors;
  published_.exchanges = members.exchanges;
}

Hub::Hub(const HubOptions& options) : impl_(std::make_unique<Impl>(options)) {}

Hub::~Hub() {
  if (impl_->in_forked_child()) {
    impl_->abandon();
    (void)impl_.release();  // Its thread's state cannot be taken down from here.
  }
}

std::uint16_t Hub::port() const { return impl_->port(); }
void Hub::never_comes(Role role, std::uint32_t rank, const std::string& why) { impl_->never_comes(role, rank, why); }
HubCounters Hub::counters() const { return impl_->counters(); }

}  // namespace herring::control
