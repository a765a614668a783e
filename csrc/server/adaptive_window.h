#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "core/types.h"
#include "server/core_wait.h"

namespace herring::server {

/// How many chunks of one worker a lane lets be in flight, by how long they take from the grant to the last worker's
/// data. Too few, and the link is idle while grants travel. What to aim at depends on how operations come:
///
/// One by one. Too many chunks in flight only wait in the network's queues, where one lane's run ahead of another's:
/// then sums wait, and at the end of an operation everybody waits for the last lane. So chunks may take little longer
/// than the quickest of them, which found the queues empty. What is a small part of its operation may be in flight in
/// any case: it delays its end little, and there is room for several chunks in one message.
///
/// Several at once (a training step). The next operations fill the link while sums wait, and longer messages cost less
/// of the processor, which computes meanwhile. So chunks may take longer, and there are never fewer than at first. The
/// same where the lane's thread often waits for a core: chunks take long because of that, and the link would be idle.
class AdaptiveWindow final {
 public:
  /// `first` at first.
  AdaptiveWindow(std::uint32_t first, std::uint32_t most)
      : first_(first), most_(std::max(first, most)), one_by_one_(first), several_(first) {}

  /// For an operation of so many chunks.
  std::uint32_t size(std::uint32_t chunks) const {
    return std::max(is_queue_short() ? one_by_one_ : several_, std::min(chunks / kParts, most_));
  }

  /// An operation of several chunks may be granted. `others_are_under_way`: its data meets theirs in the network.
  void on_ready(bool others_are_under_way) { alone_ = others_are_under_way ? 0 : std::min(alone_ + 1, kAlone); }

  /// Chunks that were granted together are complete. Moves by one at most, once for each window's worth of chunks.
  void on_complete(Duration since_grant, std::uint32_t chunks) {
    see(since_grant);
    total_ += since_grant * chunks;
    chunks_ += chunks;
    if (chunks_ < (is_queue_short() ? one_by_one_ : several_)) return;
    const Duration mean = total_ / chunks_;
    total_ = {};
    chunks_ = 0;
    if (!is_queue_short()) {
      adapt_to_several(mean, several_);
    } else if (waits_for_cores(core_wait_)) {
      adapt_to_several(mean, one_by_one_);
    } else {
      adapt_to_short_queue(mean);
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
  // So many operations in a row, each alone: the first one of a training step is alone too, until the next one comes.
  static constexpr std::uint32_t kAlone = 2;

  bool is_queue_short() const { return alone_ == kAlone; }

  void adapt_to_several(Duration mean, std::uint32_t& size) const {
    if (mean < kShortIfBusy) {
      size = std::min(size + 1, most_);
    } else if (mean > kLongIfBusy && size > first_) {
      --size;
    }
  }

  /// Where a queue is, one chunk less in flight takes that part less of the time, and must still fill the link.
  void adapt_to_short_queue(Duration mean) {
    const Duration enough = std::min(quickest_, quickest_before_) + kShortQueue;
    if (mean < enough) {
      one_by_one_ = std::min(one_by_one_ + 1, most_);
    } else if (mean / one_by_one_ * (one_by_one_ - 1) > enough) {
      --one_by_one_;
    }
  }

  void see(Duration since_grant) {
    if (++seen_ > kMemory) {
      seen_ = 1;
      quickest_before_ = std::exchange(quickest_, Duration::max());
    }
    quickest_ = std::min(quickest_, since_grant);
  }

  const std::uint32_t first_;
  const std::uint32_t most_;
  std::uint32_t one_by_one_;
  std::uint32_t several_;
  std::uint32_t alone_ = 0;
  std::uint32_t chunks_ = 0;
  Duration total_{};
  std::uint32_t seen_ = 0;
  Duration quickest_ = Duration::max();         // Of the last up to kMemory completions,
  Duration quickest_before_ = Duration::max();  // and of those before.
  double core_wait_ = 0;
};

}  // namespace herring::server
