#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "control/connect.h"
#include "control/hub.h"
#include "control/line.h"
#include "control/protocol.h"
#include "control/socket.h"
#include "core/process.h"
#include "core/status.h"

namespace herring::control {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Duration kQueryPatience = std::chrono::milliseconds(500);
constexpr Duration kLeavePatience = std::chrono::seconds(1);
constexpr Duration kThreadPatience = std::chrono::seconds(2);

/// One call of exchange().
struct Pending {
  Blobs blobs;  // Those that came; by index.
  Wants wants = Wants::kBlobs;
  bool done = false;
  Status failed;
  std::optional<std::string> missing;  // The hub's answer to who is missing.
};

}  // namespace

class HubClient::Impl final : private Ear {
 public:
  explicit Impl(const HubClientOptions& options) : options_(options) {}
  ~Impl() override {
    if (line_) leave();
  }
  /// Once, before anything else.
  void join(Instant deadline);

  std::uint64_t job_id() const { return job_id_; }
  std::uint32_t worker_count() const { return workers_; }
  std::uint32_t server_count() const { return static_cast<std::uint32_t>(roster_.members.size()) - workers_; }
  Member member(std::size_t index) const;
  std::vector<Member> members(std::size_t first, std::size_t last) const;
  int event_fd() const { return events_waiting_.fd(); }

  Blobs gather(const std::string& name, std::span<const std::byte> blob, Instant deadline, Wants wants);
  bool next_event(HubEvent& event);
  void report_failure(const std::string& reason);
  void report_unreachable(const Unreachable& unreachable);
  void report_group_abort(const AbortGroup& abort);
  void report_group_left(const LeaveGroup& leave);
  void leave();
  bool in_forked_child() const { return !guard_.in_owner(); }
  void abandon();

 private:
  enum class End : std::uint8_t { kNone, kLeft, kHubLost };

  bool join_once(HubSearch& search, Session session, Instant deadline);
  /// Guarded by mutex_.
  std::string lost_text() const { return options_.holder + ", which runs the job's hub, is lost: " + end_reason_; }
  bool hear(const Frame& frame) override;
  void ended(const LineEnd& end) override;
  std::string words_of(const LineEnd& end) const;
  bool on_roster(const Frame& frame);
  bool on_event(const Frame& frame);
  bool on_gathered(const Frame& frame);
  bool on_exchange_failed(const Frame& frame);
  bool on_missing(const Frame& frame);
  void check_usable() const;  // mutex_ held.

  const HubClientOptions options_;
  const ForkGuard guard_;
  Signal events_waiting_;
  Duration dead_after_{};
  Instant heard_{};  // The hub, before it went away.

  // The line's thread's own.
  std::string closing_reason_;

  // Written by the thread before started_, read-only after.
  std::uint64_t job_id_ = 0;
  Roster roster_;
  std::uint32_t workers_ = 0;  // 0: not known yet.

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool started_ = false;
  bool leaving_ = false;
  End end_ = End::kNone;
  std::string end_reason_;
  std::deque<HubEvent> events_;
  std::map<std::string, std::shared_ptr<Pending>> exchanges_;
  std::optional<std::string> join_missing_;
  Status start_failure_;  // The job will never start.

  std::optional<Line> line_;  // Last: its thread uses all of the above.
};

void HubClient::Impl::join(Instant deadline) {
  const Instant begin = Clock::now();
  HubSearch search(options_);
  Instant back_until = Instant::max();  // A hub that went away may come back for so long.
  while (Clock::now() < deadline) {
    if (auto session = search.try_ports(std::min(deadline, back_until))) {
      if (join_once(search, std::move(*session), deadline)) return;
      back_until = std::min(back_until, heard_ + dead_after_);
    }
    const Instant now = Clock::now();
    if (now >= back_until) throw search.hub_lost();
    if (options_.is_over && options_.is_over()) {
      throw Error(Code::kPeerLost, "the job ended before all processes had joined");
    }
    if (now < deadline) std::this_thread::sleep_until(std::min(deadline, now + search.pause()));
  }
  throw search.failure(Clock::now() - begin);
}

/// True when the job has started; false where the hub went away before. Throws at the deadline, naming who is missing.
bool HubClient::Impl::join_once(HubSearch& search, Session session, Instant deadline) {
  {
    const std::lock_guard lock(mutex_);
    end_ = End::kNone;
  }
  dead_after_ = session.welcome.dead_after;
  closing_reason_.clear();
  roster_ = {};
  line_.emplace(std::move(session.socket), Line::Options{"herring-member", dead_after_}, static_cast<Ear&>(*this));
  std::unique_lock lock(mutex_);
  const auto settled = [this] { return started_ || end_ != End::kNone || !start_failure_.is_ok(); };
  if (!changed_.wait_until(lock, deadline, settled)) {
    line_->post(FrameType::kQuery, encode_text(""));
    changed_.wait_until(lock, Clock::now() + kQueryPatience, [&] { return settled() || join_missing_; });
    if (!settled()) {
      const std::string missing = join_missing_.value_or("the hub did not say who is missing");
      throw Error(Code::kTimeout,
                  to_string(options_.self) + " gave up joining the job: " + missing +
                      ". Check that these processes were started with the same MASTER_ADDR and MASTER_PORT (or "
                      "HERRING_HUB), and what they printed");
    }
  }
  if (started_) return true;
  start_failure_.or_throw();
  search.note_lost(end_reason_);
  lock.unlock();
  line_.reset();
  return false;
}

void HubClient::Impl::abandon() {
  line_.reset();
  events_waiting_.close();
}

bool HubClient::Impl::hear(const Frame& frame) {
  switch (frame.type) {
    case FrameType::kRoster:
      return on_roster(frame);
    case FrameType::kEvent:
      return on_event(frame);
    case FrameType::kGathered:
      return on_gathered(frame);
    case FrameType::kExchangeFailed:
      return on_exchange_failed(frame);
    case FrameType::kMissing:
      return on_missing(frame);
    case FrameType::kClosing:
      closing_reason_ = decode_text(frame.body).value_or("the hub is closing");
      return true;
    default:
      return false;
  }
}

bool HubClient::Impl::on_roster(const Frame& frame) {
  auto part = decode_roster(frame.body);
  if (!part || workers_ > 0 || part->first != roster_.members.size()) return false;
  const std::uint32_t said = roster_.members.empty() ? part->total : roster_.total;
  // A server that was not told the number of workers learns it here.
  const std::size_t total = options_.workers == 0 ? said : std::size_t{options_.workers} + options_.servers;
  if (part->total != total || total <= options_.servers) return false;
  if (roster_.members.empty()) {
    roster_ = std::move(*part);
  } else {
    roster_.add(std::move(*part));
  }
  if (roster_.members.size() < total) return true;
  job_id_ = roster_.job_id;
  workers_ = static_cast<std::uint32_t>(total - options_.servers);
  const std::lock_guard lock(mutex_);
  started_ = true;
  changed_.notify_all();
  return true;
}

Member HubClient::Impl::member(std::size_t index) const {
  const Roster::Place& place = roster_.members.at(index);
  const Roster::Host& host = roster_.hosts[place.host];
  const bool is_worker = index < workers_;
  return {is_worker ? Role::kWorker : Role::kServer,
          static_cast<std::uint32_t>(is_worker ? index : index - workers_),
          place.pid,
          host.identity,
          host.name,
          {},
          host.nodes};
}

std::vector<Member> HubClient::Impl::members(std::size_t first, std::size_t last) const {
  std::vector<Member> result;
  for (std::size_t i = first; i < last; ++i) result.push_back(member(i));
  return result;
}

bool HubClient::Impl::on_event(const Frame& frame) {
  auto event = decode_event(frame.body);
  if (!event) return false;
  const std::lock_guard lock(mutex_);
  if (workers_ > 0 && event->index >= roster_.members.size()) return false;
  if (leaving_) return true;
  if (workers_ == 0) {
    const bool other_job = event->kind == HubEvent::Kind::kFailed;  // Nothing else fails before the start.
    start_failure_ = Status(other_job ? Code::kMismatch : Code::kPeerLost, std::move(event->reason));
    changed_.notify_all();
    return true;
  }
  events_.push_back(
      {event->kind, member(event->index), std::move(event->reason), options_.holder, event->group, event->calls});
  events_waiting_.raise();
  return true;
}

bool HubClient::Impl::on_gathered(const Frame& frame) {
  auto gathered = decode_gathered(frame.body);
  if (!gathered) return false;
  const std::lock_guard lock(mutex_);
  const auto found = exchanges_.find(gathered->name);
  if (found == exchanges_.end()) return leaving_;
  Pending& pending = *found->second;
  const std::size_t total = roster_.members.size();
  if (pending.done || gathered->blobs.empty() != (pending.wants == Wants::kNothing)) return false;
  if (gathered->first != pending.blobs.size() || gathered->first + gathered->blobs.size() > total) {
    return false;
  }
  if (pending.blobs.empty()) {
    pending.blobs = std::move(gathered->blobs);
  } else {
    pending.blobs.add(gathered->blobs);
  }
  if (pending.wants == Wants::kNothing || pending.blobs.size() == total) {
    pending.done = true;
    changed_.notify_all();
  }
  return true;
}

bool HubClient::Impl::on_exchange_failed(const Frame& frame) {
  const auto failed = decode_exchange_failed(frame.body);
  if (!failed) return false;
  const std::lock_guard lock(mutex_);
  const auto found = exchanges_.find(failed->name);
  if (found == exchanges_.end()) return leaving_;
  found->second->failed = Status(Code::kPeerLost, "exchange \"" + failed->name + "\" cannot complete: " + failed->text);
  changed_.notify_all();
  return true;
}

bool HubClient::Impl::on_missing(const Frame& frame) {
  auto missing = decode_missing(frame.body);
  if (!missing) return false;
  const std::lock_guard lock(mutex_);
  auto& [name, text] = *missing;
  if (name.empty()) {
    join_missing_ = std::move(text);
  } else if (const auto found = exchanges_.find(name); found != exchanges_.end()) {
    found->second->missing = std::move(text);
  }
  changed_.notify_all();
  return true;
}

std::string HubClient::Impl::words_of(const LineEnd& end) const {
  if (!closing_reason_.empty()) return closing_reason_;
  switch (end.kind) {
    case LineEnd::Kind::kClosed:
      return end.text + ": worker 0's process died, or the network to it; last heard from " + seconds_text(end.silent) +
             " before";
    case LineEnd::Kind::kSilent:
      return "the hub was silent for " + seconds_text(end.silent);
    case LineEnd::Kind::kProtocol:
      return "the hub broke the protocol: it sent " + end.text;
    case LineEnd::Kind::kGoodbye:
    case LineEnd::Kind::kFailed:
      break;
  }
  return end.text;
}

void HubClient::Impl::ended(const LineEnd& end) {
  const std::lock_guard lock(mutex_);
  end_ = leaving_ ? End::kLeft : End::kHubLost;
  end_reason_ = words_of(end);
  heard_ = Clock::now() - end.silent;
  if (!leaving_ && started_) {
    events_.push_back({HubEvent::Kind::kHubLost, member(0), end_reason_, options_.holder});
    events_waiting_.raise();
  }
  changed_.notify_all();
}

void HubClient::Impl::check_usable() const {
  if (leaving_ || end_ == End::kLeft) throw Error(Code::kShutdown, to_string(options_.self) + " has left the job");
  if (end_ == End::kHubLost) throw Error(Code::kPeerLost, lost_text());
}

Blobs HubClient::Impl::gather(const std::string& name, std::span<const std::byte> blob, Instant deadline, Wants wants) {
  if (name.empty() || name.size() > kMaxName) {
    throw Error(Code::kInvalidArgument, "an exchange's name has 1 to " + std::to_string(kMaxName) + " bytes, not " +
                                            std::to_string(name.size()));
  }
  if (blob.size() > kMaxBlob) {
    throw Error(Code::kInvalidArgument, "exchange \"" + name + "\": a blob has at most " + std::to_string(kMaxBlob) +
                                            " bytes, not " + std::to_string(blob.size()));
  }
  auto body = encode(Exchange{name, blob, wants});
  std::unique_lock lock(mutex_);
  check_usable();
  const auto pending = std::make_shared<Pending>();
  pending->wants = wants;
  if (!exchanges_.emplace(name, pending).second) {
    throw Error(Code::kInvalidArgument, "exchange \"" + name +
                                            "\" is under way or has timed out in this process; "
                                            "use another name");
  }
  line_->post(FrameType::kExchange, std::move(body));
  const auto settled = [&] { return pending->done || !pending->failed.is_ok() || leaving_ || end_ != End::kNone; };
  if (!changed_.wait_until(lock, deadline, settled)) {
    line_->post(FrameType::kQuery, encode_text(name));
    changed_.wait_until(lock, Clock::now() + kQueryPatience, [&] { return settled() || pending->missing; });
  }
  if (!settled()) {
    // The name stays taken: its round may still complete at the hub, and the answer must not meet a later call.
    throw Error(Code::kTimeout, "exchange \"" + name + "\" of " + to_string(options_.self) +
                                    " timed out: " + pending->missing.value_or("the hub did not say who is missing"));
  }
  exchanges_.erase(name);
  if (pending->done) return std::move(pending->blobs);
  pending->failed.or_throw();
  check_usable();
  throw Error(Code::kInternal, "exchange \"" + name + "\" ended without a reason");
}

bool HubClient::Impl::next_event(HubEvent& event) {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) return false;
  event = std::move(events_.front());
  events_.pop_front();
  if (events_.empty()) events_waiting_.clear();
  return true;
}

void HubClient::Impl::report_failure(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (leaving_ || end_ != End::kNone) return;
  line_->post(FrameType::kFail, encode_text(reason));
  if (!started_) return;
  events_.push_back({HubEvent::Kind::kFailed, options_.self, reason, options_.holder});
  events_waiting_.raise();
}

void HubClient::Impl::report_unreachable(const Unreachable& unreachable) {
  const std::lock_guard lock(mutex_);
  if (leaving_ || end_ != End::kNone) return;
  line_->post(FrameType::kUnreachable, encode(unreachable));
}

void HubClient::Impl::report_group_abort(const AbortGroup& abort) {
  const std::lock_guard lock(mutex_);
  if (leaving_ || end_ != End::kNone) return;
  line_->post(FrameType::kAbortGroup, encode(abort));
}

void HubClient::Impl::report_group_left(const LeaveGroup& leave) {
  const std::lock_guard lock(mutex_);
  if (leaving_ || end_ != End::kNone) return;
  line_->post(FrameType::kLeaveGroup, encode(leave));
}

void HubClient::Impl::leave() {
  std::unique_lock lock(mutex_);
  if (!leaving_ && end_ == End::kNone) {
    leaving_ = true;
    line_->post(FrameType::kLeave, {});
    line_->hang_up(kLeavePatience);
    changed_.notify_all();
  }
  changed_.wait_until(lock, Clock::now() + kThreadPatience, [this] { return end_ != End::kNone; });
}

HubClient::HubClient(const HubClientOptions& options, Instant deadline) : impl_(std::make_unique<Impl>(options)) {
  impl_->join(deadline);  // Where it throws, ~Impl stops the thread.
}

HubClient::~HubClient() {
  if (impl_->in_forked_child()) {
    impl_->abandon();
    (void)impl_.release();  // Its thread's state cannot be taken down from here.
  }
}

std::uint64_t HubClient::job_id() const { return impl_->job_id(); }
std::uint32_t HubClient::worker_count() const { return impl_->worker_count(); }
std::uint32_t HubClient::server_count() const { return impl_->server_count(); }
Member HubClient::member(std::size_t index) const { return impl_->member(index); }
std::vector<Member> HubClient::workers() const { return impl_->members(0, worker_count()); }
std::vector<Member> HubClient::servers() const {
  return impl_->members(worker_count(), std::size_t{worker_count()} + server_count());
}
int HubClient::event_fd() const { return impl_->event_fd(); }

Blobs HubClient::gather(const std::string& name, std::span<const std::byte> blob, Instant deadline, Wants wants) {
  return impl_->gather(name, blob, deadline, wants);
}

bool HubClient::next_event(HubEvent& event) { return impl_->next_event(event); }
void HubClient::report_failure(const std::string& reason) { impl_->report_failure(reason); }
void HubClient::report_unreachable(std::span<const std::uint32_t> indices, std::uint32_t of, std::uint32_t answering,
                                   Duration silent) {
  impl_->report_unreachable({silent, of, answering, {indices.begin(), indices.end()}});
}
void HubClient::report_group_abort(const UsedGroup& group, const std::string& reason) {
  impl_->report_group_abort({group, reason});
}
void HubClient::report_group_left(const UsedGroup& group, std::uint64_t calls) {
  impl_->report_group_left({group, calls});
}
void HubClient::leave() { impl_->leave(); }

}  // namespace herring::control
