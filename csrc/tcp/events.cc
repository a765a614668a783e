#include "tcp/events.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <utility>

#include "core/status.h"

namespace herring::tcp {
namespace {

timespec as_timespec(Duration limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec time{};
  time.tv_sec = static_cast<std::time_t>(seconds.count());
  time.tv_nsec = static_cast<long>((limit - seconds).count());
  return time;
}

int wait_for_events(int epoll, std::span<epoll_event> events, Duration limit) {
  const int most = static_cast<int>(events.size());
  if (limit <= Duration::zero()) return epoll_wait(epoll, events.data(), most, 0);
#ifdef SYS_epoll_pwait2
  static std::atomic<bool> is_missing{false};  // A kernel before 5.11.
  if (!is_missing.load(std::memory_order_relaxed)) {
    const timespec time = as_timespec(limit);
    const auto count = syscall(SYS_epoll_pwait2, epoll, events.data(), most, &time, nullptr, std::size_t{0});
    if (count >= 0 || errno != ENOSYS) return static_cast<int>(count);
    is_missing.store(true, std::memory_order_relaxed);
  }
#endif
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
  return epoll_wait(epoll, events.data(), most, static_cast<int>(std::min<std::int64_t>(milliseconds, 3'600'000)));
}

}  // namespace

Events::Events(Stats& stats)
    : stats_(stats), epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  if (epoll_ >= 0 && wake_ >= 0 && epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) == 0) return;
  if (epoll_ >= 0) close(epoll_);
  if (wake_ >= 0) close(wake_);
  throw Error(Code::kTransport, "epoll_create1 or eventfd failed: too many open files? (see `ulimit -n`)");
}

Events::~Events() {
  close(epoll_);
  close(wake_);
}

bool Events::add(int socket, std::uint64_t name) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = name;
  return epoll_ctl(epoll_, EPOLL_CTL_ADD, socket, &event) == 0;
}

void Events::remove(int socket) { static_cast<void>(epoll_ctl(epoll_, EPOLL_CTL_DEL, socket, nullptr)); }

std::size_t Events::harvest(Duration limit) {
  ++stats_.event_calls;
  const int count = wait_for_events(epoll_, events_, limit);
  return count > 0 ? static_cast<std::size_t>(count) : 0;  // A signal ends it early.
}

std::span<const epoll_event> Events::look() {
  if (!std::exchange(is_looked_, false)) {
    found_ = harvest(Duration::zero());
    if (found_ == 0) ++stats_.empty_events;
  }
  const std::span<const epoll_event> events = std::span(events_).first(std::exchange(found_, 0));
  for (const epoll_event& event : events) {
    // Taken already, by one who was not asleep.
    if (event.data.u64 == kWake && !is_woken_.load(std::memory_order_acquire)) drain();
  }
  return events;
}

void Events::wait(Instant deadline, std::span<const int> also) {
  const Duration limit = std::max<Duration>(deadline - std::chrono::steady_clock::now(), Duration(0));
  if (also.empty()) {
    found_ = harvest(limit);
    is_looked_ = true;
    static_cast<void>(take_wake());
    return;
  }
  std::vector<pollfd> descriptors{{epoll_, POLLIN, 0}};
  for (const int descriptor : also) descriptors.push_back({descriptor, POLLIN, 0});
  const timespec time = as_timespec(limit);
  ++stats_.event_calls;
  const int ready = ppoll(descriptors.data(), descriptors.size(), &time, nullptr);
  is_looked_ = ready == 0 || (ready > 0 && descriptors.front().revents == 0);
  found_ = 0;
  static_cast<void>(take_wake());
}

void Events::wake() noexcept {
  if (is_woken_.exchange(true, std::memory_order_acq_rel)) return;
  const std::uint64_t one = 1;
  // Fails only where the counter is at its limit, and then the wait ends anyway.
  static_cast<void>(!write(wake_, &one, sizeof(one)));
}

bool Events::take_wake() noexcept {
  if (!is_woken_.load(std::memory_order_acquire)) return false;
  is_woken_.store(false, std::memory_order_release);
  drain();
  return true;
}

void Events::drain() noexcept {
  std::uint64_t count = 0;
  static_cast<void>(read(wake_, &count, sizeof(count)) == sizeof(count));
}

}  // namespace herring::tcp
