#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "core/types.h"

namespace herring::server {

/// How many chunks a lane has sent in one message, by how long a chunk takes. On a slow link a chunk takes long beside
/// what a message costs, and small pieces keep both directions busy; on a fast one the messages are what costs. So a
/// message should take about `aim`; or longer, up to kLongest of that, where it is a small part of its operation. Where
/// the lane's thread often waits for a core, a chunk takes long because of that, not because of the link: then each
/// message is one more wait, on both sides, and there are few.
class AdaptiveRun final {
 public:
  /// `aim` Duration::max(): as many as may be, whatever they take.
  AdaptiveRun(std::uint32_t most, Duration aim) : most_(std::bit_floor(std::max(most, 1u))), aim_(aim) {}

  /// A power of two, at most half of the operation's chunks; 1 until something was measured.
  std::uint32_t size(std::uint32_t chunks) const {
    const double soon = fitting();
    const double late = std::min(soon * kLongest, static_cast<double>(chunks) / (soon < 1 ? kParts : kFewParts));
    const double most = std::min<double>(most_, chunks / 2);
    return std::bit_floor(static_cast<std::uint32_t>(std::clamp(std::max(soon, late), 1.0, std::max(most, 1.0))));
  }

  /// `chunks` that were granted at `granted` are complete. Counts only where the lane had them to wait for all the time
  /// since the last ones were complete: else it was idle, for reasons that are not the link's.
  void on_complete(Instant now, Instant granted, std::uint32_t chunks) {
    const Instant last = std::exchange(last_, now);
    if (granted > last) return;
    ++samples_;
    chunks_ += chunks - chunks_ / kMemory;
    time_ += static_cast<double>((now - last).count()) - time_ / kMemory;
  }

  /// Engine, same name.
  void on_core_wait(double share) { core_wait_ = share; }

 private:
  static constexpr double kMemory = 16;  // Completions that are looked at, about.
  static constexpr std::uint32_t kLeastSamples = 8;
  static constexpr double kLongest = 8;
  // Messages that an operation has at least where they are longer. Fewer where a chunk takes less than `aim`: then what
  // a message costs is more than what the last one's way through the lane takes.
  static constexpr double kParts = 32;
  static constexpr double kFewParts = 16;
  // Where only the link is slow, beside other programs too, a lane's thread waited for a core 0.3 of its time at most;
  // where the cores were, 0.34 and more.
  static constexpr double kOften = 0.3;

  double fitting() const {
    if (aim_ == Duration::max() || core_wait_ > kOften) return most_;
    if (samples_ < kLeastSamples) return 0;
    return static_cast<double>(aim_.count()) * chunks_ / std::max(time_, 1.0);
  }

  const std::uint32_t most_;
  const Duration aim_;
  std::uint64_t samples_ = 0;
  double chunks_ = 0;
  double time_ = 0;
  Instant last_{};
  double core_wait_ = 0;
};

}  // namespace herring::server
