#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "core/types.h"

namespace herring::server {

/// How many chunks a lane has sent in one message, by how long a chunk takes. On a slow link a chunk takes long beside
/// what a message costs, and small pieces keep both directions busy; on a fast one the messages are what costs. So it
/// aims at a time for a message.
class AdaptiveRun final {
 public:
  /// `aim` Duration::max(): as many as may be, whatever they take.
  AdaptiveRun(std::uint32_t most, Duration aim)
      : most_(std::bit_floor(std::max(most, 1u))), aim_(aim), size_(aim == Duration::max() ? most_ : 1) {}

  /// A power of two; 1 until something was measured.
  std::uint32_t size() const { return size_; }

  /// `chunks` that were granted at `granted` are complete. Counts only where the lane had them to wait for all the time
  /// since the last ones were complete: else it was idle, for reasons that are not the link's.
  void on_complete(Instant now, Instant granted, std::uint32_t chunks) {
    const Instant last = std::exchange(last_, now);
    if (granted > last) return;
    chunks_ += chunks - chunks_ / kMemory;
    time_ += static_cast<double>((now - last).count()) - time_ / kMemory;
    if (++samples_ < kLeastSamples) return;
    const double fitting = static_cast<double>(aim_.count()) * chunks_ / std::max(time_, 1.0);
    size_ = fitting >= most_ ? most_ : std::bit_floor(std::max(static_cast<std::uint32_t>(fitting), 1u));
  }

 private:
  static constexpr double kMemory = 16;  // Completions that are looked at, about.
  static constexpr std::uint32_t kLeastSamples = 8;

  const std::uint32_t most_;
  const Duration aim_;
  std::uint32_t size_;
  std::uint32_t samples_ = 0;
  double chunks_ = 0;
  double time_ = 0;
  Instant last_{};
};

}  // namespace herring::server
