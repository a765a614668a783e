#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace herring {

/// How to write memory that another core reads next, and has read before: with ordinary stores, or streaming past the
/// caches (copy_bytes()).
///
/// Where the two cores share a cache, ordinary stores are better: the reader finds the data there. Where they do not,
/// each line written must first be taken from the reader's cache: between core complexes of an AMD EPYC 2 bytes a
/// nanosecond, where streaming writes 27 and its reader waits no longer than for the other core's cache. Which cores a
/// process and its readers are on is nothing to rely on (in a virtual machine they move), so it goes by how long
/// writing takes: where all of a few ordinary writes but one were slow, many streamed ones follow, and then it looks
/// again. Pure.
class StoreChoice final {
 public:
  /// Less is written with ordinary stores, and says nothing.
  static constexpr std::size_t kLeastBytes = 32 << 10;

  /// Whether the next write goes past the caches.
  bool streams() const { return streamed_left_ > 0; }
  /// It did.
  void on_streamed() { streamed_left_ -= std::min(streamed_left_, 1u); }
  /// An ordinary write of at least kLeastBytes is done.
  void on_written(std::size_t bytes, Duration elapsed) {
    const auto nanoseconds = std::chrono::duration<double, std::nano>(elapsed).count();
    const double speed = static_cast<double>(bytes) / std::max(nanoseconds, 1.0);
    second_ = std::max(second_, std::min(speed, fastest_));
    fastest_ = std::max(fastest_, speed);
    if (++looked_ < kLooks) return;
    const bool is_slow = second_ < kSlowBytesPerNanosecond;
    next_streamed_ = is_slow ? std::min(next_streamed_ * 2, kMostStreamed) : kFirstStreamed;
    streamed_left_ = is_slow ? next_streamed_ : 0;
    looked_ = 0;
    fastest_ = second_ = 0;
  }

 private:
  static constexpr std::uint32_t kLooks = 4;  // Two may be interrupted, or be the first in fresh memory.
  static constexpr std::uint32_t kFirstStreamed = 64;
  static constexpr std::uint32_t kMostStreamed = 1024;
  static constexpr double kSlowBytesPerNanosecond = 7;

  std::uint32_t looked_ = 0;
  double fastest_ = 0;  // Of those looked at, in bytes a nanosecond,
  double second_ = 0;   // and the next.
  std::uint32_t streamed_left_ = 0;
  std::uint32_t next_streamed_ = kFirstStreamed;
};

}  // namespace herring
