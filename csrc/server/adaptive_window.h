#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/types.h"

namespace herring::server {

/// How many chunks of one worker a lane lets be in flight, by how long they take from the grant to the last worker's
/// data. Too few, and the link is idle while grants travel. There are two aims:
///
/// A short queue. Too many chunks in flight only wait in the network's queues, where one lane's run ahead of another's:
/// then sums wait, and at the end of an operation everybody waits for the last lane. So chunks may take little longer
/// than the quickest of them, which found the queues empty.
///
/// A long queue, of some 20 ms, and never fewer chunks than at first. Where the lane's thread waits for a core, chunks
/// take long because of that, and with a short queue the link would be idle; the more it waits, the more of the long
/// queue is used. With several operations at once (a training step) it is used whole: the next ones fill the link while
/// sums wait, longer messages cost less of the processor, and a worker that computes meanwhile, whose threads wait for
/// cores, makes chunks take as long as a queue does.
///
/// A part of each operation may be in flight in any case: it delays the end by that part at most, there is room for
/// several chunks in one message, and all lanes have the same part. Lanes inside workers need a larger one where it
/// does not take long (adr/0034).
class AdaptiveWindow final {
 public:
  /// `first` at first. `are_apart`: no lane of the job is inside a worker.
  AdaptiveWindow(bool are_apart, std::uint32_t first, std::uint32_t most)
      : are_apart_(are_apart), first_(first), most_(std::max(first, most)), short_{first}, long_{first} {}

  /// For an operation of so many chunks.
  std::uint32_t size(std::uint32_t chunks) const {
    const std::uint32_t part = std::min(chunks / kParts, most_);
    if (!is_short()) return std::max(long_.size, part);
    const std::uint32_t larger = are_apart_ ? 0 : std::min(larger_part(chunks), long_.size);
    const std::uint32_t least = std::max({short_.size, part, larger});
    const std::uint32_t rest = long_.size > least ? long_.size - least : 0;
    return least + static_cast<std::uint32_t>(std::lround(rest * often(core_wait_)));
  }

  /// An operation of several chunks may be granted. `others_are_under_way`: its data meets theirs in the network.
  void on_ready(std::uint32_t chunks, bool others_are_under_way) {
    alone_ = others_are_under_way ? 0 : std::min(alone_ + 1, kAlone);
    last_ = chunks;
  }

  /// Chunks that were granted together are complete. A window moves by one at most, once for each window's worth of
  /// chunks.
  void on_complete(Duration since_grant, std::uint32_t chunks) {
    see(since_grant);
    if (const auto mean = short_.mean(since_grant, chunks)) adapt_short(*mean);
    if (const auto mean = long_.mean(since_grant, chunks)) {
      adapt_long(*mean, is_short() && !are_apart_ ? kLongOfOne : kLong, is_short() ? size(last_) : long_.size);
    }
  }

  /// Engine, same name.
  void on_core_wait(double share) { core_wait_ = share; }

 private:
  struct Window {
    std::uint32_t size;
    std::uint32_t chunks = 0;
    Duration total{};

    /// Of a window's worth of chunks, when they are complete.
    std::optional<Duration> mean(Duration since_grant, std::uint32_t count) {
      total += since_grant * count;
      chunks += count;
      if (chunks < size) return {};
      const Duration result = total / chunks;
      total = {};
      chunks = 0;
      return result;
    }
  };

  // Long beside what it takes to wake a thread up, short beside a small operation on a link that needs this.
  static constexpr Duration kShortQueue = std::chrono::microseconds(500);
  struct Aim {
    Duration least, most;  // What chunks may take: from less on the window grows, from more on it shrinks.
  };
  // Long beside what a busy machine takes to schedule everybody once.
  static constexpr Aim kLong{std::chrono::milliseconds(20), std::chrono::milliseconds(30)};
  // What the larger part may take.
  static constexpr Aim kLongOfOne{std::chrono::milliseconds(14), std::chrono::milliseconds(21)};
  // Of an operation; one of them may be in flight.
  static constexpr std::uint32_t kParts = 32;
  // Inside workers an eighth, but of a large operation no more than a 16th.
  static constexpr std::uint32_t kPartsInside = 8;
  static constexpr std::uint32_t kPartsOfLarge = 16;
  static constexpr std::uint32_t kFewChunks = 4;
  static constexpr std::uint32_t kMemory = 2048;  // Completions; the way through the network may have changed before.
  // So many operations in a row, each alone: the first one of a training step is alone too, until the next one comes.
  static constexpr std::uint32_t kAlone = 2;
  struct Ramp {
    double none, all;  // Of the time, waiting for a core: up to less none of the long queue, from more on all of it.
  };
  // Measured (adr/0034).
  static constexpr Ramp kInside{0.15, 0.35};
  static constexpr Ramp kApart{0.25, 0.45};

  static std::uint32_t larger_part(std::uint32_t chunks) {
    return std::max(chunks / kPartsOfLarge, std::min(chunks / kPartsInside, kFewChunks));
  }

  /// Else the queue is long.
  bool is_short() const { return alone_ == kAlone; }

  /// 0 to 1: how much of the long queue a lane uses whose thread waits for a core for so much of its time. A threshold
  /// instead lets a lane go to and fro, and the others wait for it.
  double often(double share) const {
    const Ramp& ramp = are_apart_ ? kApart : kInside;
    return std::clamp((share - ramp.none) / (ramp.all - ramp.none), 0.0, 1.0);
  }

  /// `used`: what was in flight where less than the window could be. Then it need not grow, and shrinks from there.
  void adapt_long(Duration mean, Aim aim, std::uint32_t used) {
    std::uint32_t& size = long_.size;
    if (mean < aim.least) {
      if (used >= size) size = std::min(size + 1, most_);
    } else if (mean > aim.most && size > first_) {
      size = std::max(std::min(size, used) - 1, first_);
    }
  }

  /// Where a queue is, one chunk less in flight takes that part less of the time, and must still fill the link.
  void adapt_short(Duration mean) {
    const Duration enough = std::min(quickest_, quickest_before_) + kShortQueue;
    if (mean < enough) {
      short_.size = std::min(short_.size + 1, most_);
    } else if (mean / short_.size * (short_.size - 1) > enough) {
      --short_.size;
    }
  }

  void see(Duration since_grant) {
    if (++seen_ > kMemory) {
      seen_ = 1;
      quickest_before_ = std::exchange(quickest_, Duration::max());
    }
    quickest_ = std::min(quickest_, since_grant);
  }

  const bool are_apart_;
  const std::uint32_t first_;
  const std::uint32_t most_;
  Window short_;
  Window long_;
  std::uint32_t alone_ = 0;
  std::uint32_t last_ = 0;  // Chunks of the last operation that may be granted.
  std::uint32_t seen_ = 0;
  Duration quickest_ = Duration::max();         // Of the last up to kMemory completions,
  Duration quickest_before_ = Duration::max();  // and of those before.
  double core_wait_ = 0;
};

}  // namespace herring::server
