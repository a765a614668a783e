#pragma once

#include <sys/types.h>

#include "core/types.h"

namespace herring::runtime {

/// How long the calling thread has waited for a core since it began: runnable, but not running. Zero where the system
/// does not say (Linux does, in /proc/thread-self/schedstat). One file is opened and closed.
Duration waited_for_core();

/// What part of the time in which a thread had work was spent waiting for a core, lately. Asks the system about a
/// hundred times a second.
class CoreWait final {
 public:
  /// The thread has work; to be called often while it has. True where share() is new. Threads may take turns.
  bool look(Instant now);
  /// 0 (never waited) to 1; 0 until something was measured.
  double share() const { return share_; }

  /// One measurement: of `time` with work, so much waiting.
  void measured(Duration time, Duration waited);

 private:
  static constexpr Duration kPeriod = std::chrono::milliseconds(10);
  static constexpr double kWeight = 0.25;  // Of the newest measurement.

  pid_t thread_ = 0;  // That the times below are of.
  Instant looked_{};
  Instant measured_{};
  Duration waited_{};
  double share_ = 0;
};

}  // namespace herring::runtime
