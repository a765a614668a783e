#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/types.h"

namespace herring::runtime {

/// Whether other programs want the core of threads that poll. They yield between two looks, for whom they wait for may
/// be on the same core. But to Linux a thread that yields has had its turn: a program that computes on this core goes
/// on for a turn of its own (milliseconds), and for longer with each yield. A thread that sleeps instead gets the core
/// back as soon as it is woken up. For any thread of a process.
class CoreShare final {
 public:
  /// A thread has yielded from `before` to `after`.
  void on_yield(Instant before, Instant after) {
    if (after - before < kTaken) {
      if (kept_.fetch_add(1, std::memory_order_relaxed) == kEnough) rest_.store(kShortestRest);
      return;
    }
    kept_.store(0, std::memory_order_relaxed);
    const Duration rest = rest_.load();
    wanted_until_.store(after + rest);
    rest_.store(std::min(rest * 2, kLongestRest));
  }
  /// They should sleep, not yield.
  bool is_wanted(Instant now) const { return now < wanted_until_.load(std::memory_order_relaxed); }

 private:
  // Ranks that take turns on a core keep it for some microseconds while they poll, and for some hundreds to sum and
  // send; who computes keeps it for a turn, which is at least 1.4 ms on two cores, and longer on more.
  static constexpr Duration kTaken = std::chrono::milliseconds(1);
  static constexpr Duration kShortestRest = std::chrono::milliseconds(20);
  static constexpr Duration kLongestRest = std::chrono::seconds(1);
  static constexpr int kEnough = 1000;

  std::atomic<Instant> wanted_until_{Instant{}};
  std::atomic<Duration> rest_{kShortestRest};
  std::atomic<int> kept_{0};  // Yields in a row that took no time.
};

/// Lets others on this core run.
inline void yield(CoreShare& share) {
  const Instant before = std::chrono::steady_clock::now();
  sched_yield();
  share.on_yield(before, std::chrono::steady_clock::now());
}

}  // namespace herring::runtime
