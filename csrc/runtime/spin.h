#pragma once

#include <algorithm>

#include "core/types.h"

namespace herring::runtime {

/// How long a thread that waits for an operation polls before it sleeps: it would do nothing else, and it lets whoever
/// wants the core have it. Up to ten times the given time, which is longer than waking up costs: else those that wait
/// for each other by turns never stop waking each other up. Where polling finds nothing, as on slow links or with more
/// processes than cores, it only takes time from others: there it becomes shorter.
class AdaptiveSpin final {
 public:
  explicit AdaptiveSpin(Duration shortest) : shortest_(shortest), time_(longest()) {}

  Duration time() const { return time_; }
  Duration shortest() const { return shortest_; }
  Duration longest() const { return shortest_ * kMost; }

  /// Polling for `idle` has found something.
  Duration found(Duration idle) {
    if (idle > shortest_) time_ = std::min(time_ * 2, longest());
    return time_;
  }
  /// Polling for time() has found nothing.
  Duration in_vain() { return time_ = std::max(time_ / 2, shortest_); }

 private:
  static constexpr int kMost = 10;

  Duration shortest_;
  Duration time_;
};

}  // namespace herring::runtime
