#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/types.h"

namespace herring {

/// How to write memory that another core reads next, and has read before: with ordinary stores, or streaming past the
/// caches (copy_bytes()).
///
/// Where the two cores share a cache, ordinary stores are better: the reader finds the data there. Where they do not,
/// each line written must first be taken from the reader's cache: between core complexes of an AMD EPYC 2 bytes a
/// nanosecond, where streaming writes 27 and its reader waits no longer than for the other core's cache. On an Intel
/// Xeon both ways write about 10. Which cores a process and its readers are on is nothing to rely on (in a virtual
/// machine they move), so it goes by how long writing takes: where all of a few ordinary writes but one were slow, a
/// few streamed ones are tried, and where these are much faster, many follow; then it looks again. Pure.
class StoreChoice final {
 public:
  /// Less is written with ordinary stores, and says nothing.
  static constexpr std::size_t kLeastBytes = 32 << 10;

  /// Whether the next write goes past the caches.
  bool streams() const { return phase_ == Phase::kTry || phase_ == Phase::kStream; }
  /// A write of at least kLeastBytes, as streams() said, is done.
  void on_written(std::size_t bytes, Duration elapsed) {
    if (phase_ == Phase::kStream || phase_ == Phase::kRest) {
      if (--left_ == 0) phase_ = Phase::kLook;
      return;
    }
    const auto nanoseconds = std::chrono::duration<double, std::nano>(elapsed).count();
    const double speed = static_cast<double>(bytes) / std::max(nanoseconds, 1.0);
    second_ = std::max(second_, std::min(speed, fastest_));
    fastest_ = std::max(fastest_, speed);
    if (++looked_ < kLooks) return;
    judge(std::exchange(second_, 0));
    looked_ = 0;
    fastest_ = 0;
  }

 private:
  enum class Phase : std::uint8_t {
    kLook,    // Ordinary writes, looked at.
    kTry,     // They were slow: streamed writes, looked at.
    kStream,  // Those were much faster.
    kRest     // They were not: ordinary ones.
  };

  void judge(double speed) {
    if (phase_ == Phase::kLook) {
      ordinary_ = speed;
      if (speed < kSlowBytesPerNanosecond) {
        phase_ = Phase::kTry;
      } else {
        patience_ = kLeastPatience;
      }
      return;
    }
    const Phase next = speed >= kGain * ordinary_ ? Phase::kStream : Phase::kRest;
    patience_ = next == last_ ? std::min(patience_ * 2, kMostPatience) : kLeastPatience;
    left_ = patience_;
    phase_ = last_ = next;
  }

  static constexpr std::uint32_t kLooks = 4;  // Two may be interrupted, or be the first in fresh memory.
  static constexpr std::uint32_t kLeastPatience = 128;
  static constexpr std::uint32_t kMostPatience = 1024;
  static constexpr double kSlowBytesPerNanosecond = 7;
  static constexpr double kGain = 2.5;  // What is streamed is slower to read.

  Phase phase_ = Phase::kLook;
  Phase last_ = Phase::kRest;  // What the last try led to.
  std::uint32_t looked_ = 0;
  double fastest_ = 0;  // Of those looked at, in bytes a nanosecond,
  double second_ = 0;   // and the next.
  double ordinary_ = 0;
  std::uint32_t left_ = 0;  // Writes until the next look.
  std::uint32_t patience_ = kLeastPatience;
};

}  // namespace herring
