#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "core/types.h"
#include "server/core_wait.h"

namespace herring::server {

/// How many chunks of one worker a lane lets be in flight, by how long they take from the grant to the last worker's
/// data. Too few, and the link is idle while grants travel. Too many, and they only wait in the network's queues, where
/// one lane's run ahead of another's: then sums wait, and at the end of an operation everybody waits for the last lane.
/// So chunks may take little longer than the quickest of them, which found the queues empty. Where the lane's thread
/// often waits for a core, they take long because of that, and the link would be idle: then it aims at a longer time.
/// What is a small part of its operation may be in flight in any case: it delays its end little, and there is room for
/// several chunks in one message.
class AdaptiveWindow final {
 public:
  /// `first` at first. `is_queue_short`: else as if cores were always waited for; then it is not below `first`.
  AdaptiveWindow(bool is_queue_short, std::uint32_t first, std::uint32_t most)
      : is_queue_short_(is_queue_short), first_(first), most_(std::max(first, most)), size_(first) {}

  /// For an operation of so many chunks.
  std::uint32_t size(std::uint32_t chunks) const { return std::max(size_, std::min(chunks / kParts, most_)); }

  /// Chunks that were granted together are complete. Moves by one at most, once for each window's worth of chunks.
  void on_complete(Duration since_grant, std::uint32_t chunks) {
    see(since_grant);
    total_ += since_grant * chunks;
    chunks_ += chunks;
    if (chunks_ < size_) return;
    const Duration mean = total_ / chunks_;
    total_ = {};
    chunks_ = 0;
    if (!is_queue_short_ || waits_for_cores(core_wait_)) {
      if (mean < kShortIfBusy) {
        size_ = std::min(size_ + 1, most_);
      } else if (mean > kLongIfBusy && size_ > first_) {
        --size_;
      }
      return;
    }
    // Where a queue is, one chunk less in flight takes that part less of the time, and must still fill the link.
    const Duration enough = std::min(quickest_, quickest_before_) + kShortQueue;
    if (mean < enough) {
      size_ = std::min(size_ + 1, most_);
    } else if (mean / size_ * (size_ - 1) > enough) {
      --size_;
    }
  }

  /// Engine, same name.
  void on_core_wait(double share) { core_wait_ = share; }

 private:
  // Long beside what it takes to wake a thread up, short beside a small operation on a link that needs this.
  static constexpr Duration kShortQueue = std::chrono::microseconds(500);
  // Long beside what a busy machine takes to schedule everybody once.
  static constexpr Duration kShortIfBusy = std::chrono::milliseconds(20);
  static constexpr Duration kLongIfBusy = std::chrono::milliseconds(30);
  static constexpr std::uint32_t kParts = 32;     // Of an operation; one of them may be in flight.
  static constexpr std::uint32_t kMemory = 2048;  // Completions; the way through the network may have changed before.

  void see(Duration since_grant) {
    if (++seen_ > kMemory) {
      seen_ = 1;
      quickest_before_ = std::exchange(quickest_, Duration::max());
    }
    quickest_ = std::min(quickest_, since_grant);
  }

  const bool is_queue_short_;
  const std::uint32_t first_;
  const std::uint32_t most_;
  std::uint32_t size_;
  std::uint32_t chunks_ = 0;
  Duration total_{};
  std::uint32_t seen_ = 0;
  Duration quickest_ = Duration::max();         // Of the last up to kMemory completions,
  Duration quickest_before_ = Duration::max();  // and of those before.
  double core_wait_ = 0;
};

}  // namespace herring::server
