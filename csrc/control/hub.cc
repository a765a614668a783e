#include "control/hub.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "control/membership.h"
#include "control/port.h"
#include "control/protocol.h"
#include "control/reception.h"
#include "control/socket.h"
#include "core/process.h"
#include "core/status.h"

namespace herring::control {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Duration kLingerPatience = std::chrono::seconds(1);
constexpr Duration kDrainPatience = std::chrono::seconds(1);
constexpr Duration kClosePatience = std::chrono::milliseconds(500);

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

/// Carries out what the Membership decides.
class Hub::Impl final : private House {
 public:
  explicit Impl(const HubOptions& options);
  ~Impl() override;
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
    reception_->wake();
  }
  /// In a forked child: the thread is not here, and the connections belong to the parent.
  void abandon() {
    reception_->abandon();
    thread_.detach();
  }

 private:
  bool has_started() const override { return membership_.started(); }
  std::size_t missing() const override {
    return membership_.started() ? 0 : std::size_t{options_.workers} + options_.servers - membership_.connected();
  }
  Entry enter(ConnectionId connection, const Frame& frame, Instant now) override;
  bool receive(ConnectionId connection, const Frame& frame, Instant now) override;
  void alive(ConnectionId connection, Instant now) override { membership_.alive(connection, now); }
  void ended(ConnectionId connection, const std::string& reason, Instant now) override;
  void failed_handshake() override { membership_.note_failed_handshake(); }

  void run();
  void step();
  void take_news(Instant now);
  bool finished(Instant now);
  void perform(Instant now);
  void publish();

  const HubOptions options_;
  const ForkGuard guard_;
  std::uint16_t port_ = 0;

  // The thread's own.
  Membership membership_;
  const DescriptorClaim descriptors_;
  std::optional<Reception> reception_;
  bool stopping_ = false;
  bool closed_ = false;
  Instant stop_deadline_ = Instant::max();

  struct Lost {
    Role role = Role::kWorker;
    std::uint32_t rank = 0;
    std::string why;
  };

  mutable std::mutex mutex_;
  HubCounters published_;   // Guarded by mutex_, as
  std::vector<Lost> lost_;  // What the thread is to hear of who never joins, and
  bool stop_ = false;       // That it is to stop.
  std::thread thread_;
};

Hub::Impl::Impl(const HubOptions& options)
    : options_(checked(options)),
      membership_({options.workers, options.servers, options.heartbeat, options.dead_after, options.job_id,
                   options.lead, options.doubt_for, options.start_delay, Clock::now()}),
      descriptors_(door_descriptors("the hub", std::uint64_t{options.workers} + options.servers)) {
  UniqueFd listener =
      options.lead ? listen_alone(options, port_) : listen_on(options.listen_host, options.ports, port_);
  Reception::Options reception;
  reception.name = "hub";
  reception.secret = options.secret;
  reception.master_port = options.master_port;
  reception.patience = options.dead_after;
  reception.linger = kLingerPatience;
  reception.logger = options.logger;
  reception_.emplace(reception, std::move(listener), static_cast<House&>(*this));
  thread_ = start_thread("herring-hub", [this] { run(); });
}

Hub::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  reception_->wake();
  thread_.join();
}

void Hub::Impl::run() {
  try {
    while (!finished(Clock::now())) step();
  } catch (const std::exception&) {
    // Out of memory or out of kernel objects. Closed connections tell every member at once.
    reception_->close_all();
  }
}

void Hub::Impl::step() {
  const bool all_read = reception_->wait(std::min(membership_.next_wakeup(), stop_deadline_));
  const Instant now = Clock::now();
  take_news(now);
  // Nobody is called silent before what came was read.
  if (all_read) membership_.tick(now);
  perform(now);
  reception_->flush(now);
  publish();
}

void Hub::Impl::take_news(Instant now) {
  std::vector<Lost> lost;
  bool stop = false;
  {
    const std::lock_guard lock(mutex_);
    lost.swap(lost_);
    stop = stop_;
  }
  for (const Lost& one : lost) membership_.never_comes(one.role, one.rank, one.why);
  if (!stop || stopping_) return;
  stopping_ = true;
  stop_deadline_ = now + (membership_.started() ? kDrainPatience : Duration::zero());
  reception_->close_door();  // The next hub can have the port.
}

bool Hub::Impl::finished(Instant now) {
  if (!stopping_) return false;
  if (!closed_ && (membership_.connected() == 0 || now >= stop_deadline_)) {
    closed_ = true;
    stop_deadline_ = now + kClosePatience;
    membership_.close();
    perform(now);
    reception_->flush(now);
    publish();
  }
  return closed_ && (reception_->lingering() == 0 || now >= stop_deadline_);
}

House::Entry Hub::Impl::enter(ConnectionId connection, const Frame& frame, Instant now) {
  const auto join = frame.type == FrameType::kJoin ? decode_join(frame.body) : std::nullopt;
  if (!join) return Entry::kStranger;
  membership_.join(connection, *join, now);
  perform(now);
  return membership_.is_member(connection) ? Entry::kIn : Entry::kRefused;
}

bool Hub::Impl::receive(ConnectionId connection, const Frame& frame, Instant now) {
  membership_.receive(connection, frame, now);
  perform(now);
  return true;
}

void Hub::Impl::ended(ConnectionId connection, const std::string& reason, Instant now) {
  membership_.disconnected(connection, reason, now);
  perform(now);
}

void Hub::Impl::perform(Instant now) {
  for (const auto& action : membership_.take_actions()) {
    if (action.kind == Membership::Action::Kind::kClose) {
      reception_->close(action.connection, now);
    } else {
      reception_->send(action.connection, action.type, action.body);
    }
  }
}

void Hub::Impl::publish() {
  const Membership::Counters& members = membership_.counters();
  const Reception::Counters& seen = reception_->counters();
  const std::lock_guard lock(mutex_);
  published_ = {seen.accepted,       seen.bad_strangers,
                seen.slow_strangers, seen.failed_handshakes,
                members.joined,      seen.refused + members.refused,
                members.lost,        seen.protocol_errors + members.protocol_errors,
                members.exchanges,   seen.bytes_sent};
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
