// Who drives, and for how long: the loop around what progress*.cc does in one turn.

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "core/relax.h"
#include "core/short_turns.h"
#include "runtime/poll.h"
#include "runtime/progress.h"

namespace herring::runtime {
namespace {

constexpr Duration kIdleWait = std::chrono::seconds(1);
// Threads that wait drive by themselves, one operation after the other: so long after the last of them the network is
// looked after by nobody, where nothing is known to be under way. What it costs to look whether one is there is little
// beside it.
constexpr Duration kVisitPause = std::chrono::milliseconds(1);

}  // namespace

void Progress::loop() {
  const ShortTurns turns(std::chrono::microseconds(config_.slice_us));
  while (!stop_.load()) {
    {
      const auto seat = seat_->take();
      start_driving();
      run_until([this] { return seat_->is_wanted() || may_leave(); }, Instant::max(), false);
    }
    wait_to_drive();
  }
  const auto seat = seat_->take();
  seat_->close();
  Status why(Code::kShutdown, "the runtime was shut down before this operation finished");
  {
    const std::scoped_lock lock(mutex_);
    if (!requested_failure_.is_ok()) why = requested_failure_;  // Nobody has looked at it yet, or it has been said.
  }
  fail_everything(why);
  publish();
}

void Progress::drive(const Work& work, Instant deadline) {
  if (stop_.load()) return;
  start_driving();
  run_until([&work] { return work.is_done(); }, deadline, true);
  leave_to_others();
}

/// Without the seat: until there is something to do for the progress thread.
void Progress::wait_to_drive() {
  const bool watches = !lanes_.empty() || (watches_network_ && !has_failed_.load());
  if (!watches) {
    if (!stop_.load()) seat_->park(kIdleWait);
    return;
  }
  while (!stop_.load() && !seat_->park(kVisitPause) && seat_->is_visited(kVisitPause)) {
  }
}

void Progress::start_driving() {
  const std::scoped_lock lock(mutex_);
  is_driven_ = true;
}

/// Something is under way. The caller holds the lock and the seat.
bool Progress::is_needed() const {
  const bool failure_waits = failure_.is_ok() && !requested_failure_.is_ok();
  return pending_.load() > 0 || (host_ && host_->has_backlog()) || failure_waits || !commands_.is_empty() ||
         (servers_ && servers_->has_unsent()) ||
         std::ranges::any_of(lanes_, [](const Lane* lane) { return !lane->is_quiet(); });
}

/// True where the progress thread may leave until the next submit, which then knows that nobody drives.
bool Progress::may_leave() {
  const std::scoped_lock lock(mutex_);
  is_driven_ = is_needed() || (servers_ && servers_->is_open()) || !lanes_.empty();
  return !is_driven_;
}

/// A thread that waited has what it wanted.
void Progress::leave_to_others() {
  publish_lanes();
  bool is_needed_now = false;
  {
    const std::scoped_lock lock(mutex_);
    is_driven_ = is_needed_now = is_needed();
  }
  if (is_needed_now) seat_->unpark();
}

void Progress::publish_lanes() {
  if (lanes_.empty()) return;
  const Instant now = std::chrono::steady_clock::now();
  for (Lane* lane : lanes_) lane->publish(now);
}

void Progress::run_until(const std::function<bool()>& is_over, Instant deadline, bool is_caller) {
  Instant busy_until{};
  Instant idle_since = std::chrono::steady_clock::now();
  Duration spin = is_caller ? spin_.time() : spin_.shortest();
  while (!stop_.load()) {
    const Instant now = std::chrono::steady_clock::now();
    const bool busy = turn(now);
    if (is_over() || now >= deadline) return;
    if (busy) {
      if (is_caller && watches_network_) spin = spin_.found(now - idle_since);
      idle_since = now;
      busy_until = now + spin;
    } else if (now < busy_until && wait_.yield(now)) {
      continue;
    } else if (now < std::min(busy_until, idle_since + spin_.shortest())) {
      relax();
    } else {
      if (is_caller && watches_network_ && now >= busy_until) spin = spin_.in_vain();
      publish();
      publish_lanes();
      sleep(std::min({next_deadline(), now + kIdleWait, deadline}));
    }
  }
}

bool Progress::turn(Instant now) {
  bool busy = true;
  try {
    busy = is_broken_ ? take_commands(now) : do_turn(now);
  } catch (const std::exception& problem) {
    break_down(problem);
  }
  for (Lane* lane : lanes_) busy |= lane->turn(now);
  return busy;
}

void Progress::break_down(const std::exception& problem) {
  is_broken_ = true;
  const std::string text = std::string("Herring's communication stopped: ") + problem.what();
  fail_everything(Status(Code::kInternal, text));
  if (options_.hub != nullptr) options_.hub->report_failure(text);
}

void Progress::wake_up(bool needs_thread) {
  if (needs_thread) seat_->unpark();
  if (asleep_.exchange(false)) ring();
}

void Progress::ring() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

Instant Progress::next_deadline() const {
  Instant next = operations_->next_deadline();
  if (host_) next = std::min(next, host_->next_deadline());
  if (servers_) next = std::min(next, servers_->next_deadline());
  if (messages_) next = std::min(next, messages_->next_deadline());
  for (const Lane* lane : lanes_) next = std::min(next, lane->next_deadline());
  return next;
}

void Progress::sleep(Instant until) {
  asleep_.store(true);
  bool ready = stop_.load();
  {
    const std::scoped_lock lock(mutex_);
    ready = ready || !commands_.is_empty() || (failure_.is_ok() && !requested_failure_.is_ok());
  }
  std::vector<int> descriptors{wake_fd_};
  ready = ready || (messages_ && !messages_->prepare_wait(descriptors, until));
  for (Lane* lane : lanes_) ready = ready || !lane->prepare_wait(descriptors, until);
  if (!ready && (!host_ || host_->prepare_sleep())) {
    if (options_.hub != nullptr && !hub_lost_) descriptors.push_back(options_.hub->event_fd());
    if (host_) descriptors.push_back(host_->doorbell_fd());
    if (servers_ && servers_->is_open()) {
      servers_->wait(until, descriptors);
    } else {
      poll_until(until, descriptors);
    }
    if (host_) host_->end_sleep();
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t drained = read(wake_fd_, &count, sizeof(count));
  }
  asleep_.store(false);
}

}  // namespace herring::runtime
