#include "efa/waiter.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>

#include "core/status.h"

namespace herring::efa {

Waiter::Waiter(int descriptor)
    : queue_descriptor_(descriptor), wake_descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (wake_descriptor_ < 0) throw Error(Code::kTransport, "eventfd failed: too many open files? (see `ulimit -n`)");
}

Waiter::~Waiter() { close(wake_descriptor_); }

void Waiter::wake() noexcept {
  const std::uint64_t one = 1;
  // Fails only where the counter is at its limit, and then the wait ends anyway.
  static_cast<void>(!write(wake_descriptor_, &one, sizeof(one)));
}

void Waiter::wait(Instant deadline, std::span<const int> also, bool ready) {
  const Duration left = std::max<Duration>(deadline - std::chrono::steady_clock::now(), Duration(0));
  if (watches_queue()) {
    ++fruitless_;
    block(ready ? Duration(0) : left, also, true);
    return;
  }
  block(std::min(left, nap_), also, false);
  nap_ = std::min(nap_ * 2, kLongestNap);
}

bool Waiter::prepare(std::vector<int>& descriptors, Instant& deadline) {
  if (drain_wake()) return false;
  descriptors.push_back(wake_descriptor_);
  if (watches_queue()) {
    // Armed, and readable all the same. (Why the caller's wait ends is not known here.)
    pollfd queue{queue_descriptor_, POLLIN, 0};
    if (poll(&queue, 1, 0) > 0) ++fruitless_;
    descriptors.push_back(queue_descriptor_);
    return true;
  }
  deadline = std::min(deadline, std::chrono::steady_clock::now() + nap_);
  nap_ = std::min(nap_ * 2, kLongestNap);
  return true;
}

bool Waiter::drain_wake() noexcept {
  std::uint64_t count = 0;
  return read(wake_descriptor_, &count, sizeof(count)) == sizeof(count);
}

void Waiter::block(Duration limit, std::span<const int> also, bool with_queue) {
  descriptors_.clear();
  descriptors_.push_back({wake_descriptor_, POLLIN, 0});
  if (with_queue) descriptors_.push_back({queue_descriptor_, POLLIN, 0});
  for (const int descriptor : also) descriptors_.push_back({descriptor, POLLIN, 0});
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec timeout{};
  timeout.tv_sec = static_cast<std::time_t>(seconds.count());
  timeout.tv_nsec = static_cast<long>((limit - seconds).count());
  // A signal ends the wait early, which the contract allows.
  const int ready = ppoll(descriptors_.data(), descriptors_.size(), &timeout, nullptr);
  if (ready > 0 && descriptors_.front().revents != 0) drain_wake();
}

}  // namespace herring::efa
