#pragma once

#include <unordered_map>
#include <vector>

#include "control/frame.h"
#include "core/types.h"

namespace herring::control {

/// When is somebody pinged, and when is a silence a loss? The one place for these rules, for hub and rendezvous alike.
/// Pure: it is told the time. docs/wire-control.md, "Heartbeats".
///
/// Who was not heard for dead_after is silent. A sign of life is any byte that came, and any byte that a full
/// connection took: who is being sent much answers a ping only after it. Where many are watched, pings come at longer
/// intervals, up to a third of dead_after: a ping and its answer cost about 20 us of a core. Where tick() itself came
/// late, this process did not run: nobody's silence can be told from its own, and everybody has a fresh dead_after.
class Heartbeats final {
 public:
  Heartbeats(Duration heartbeat, Duration dead_after) : heartbeat_(heartbeat), dead_after_(dead_after) {}

  void watch(ConnectionId connection, Instant now);
  void forget(ConnectionId connection) { heard_.erase(connection); }
  /// Takes constant time. Nothing for who is not watched.
  void heard(ConnectionId connection, Instant now);
  /// Instant{} for who is not watched.
  Instant last_heard(ConnectionId connection) const;

  struct Due {
    bool stalled = false;              ///< This process did not run.
    bool ping = false;                 ///< Everybody who is not silent.
    std::vector<ConnectionId> silent;  ///< In order. They stay watched until they are forgotten.
  };
  /// Call it when next_wakeup() has come, after what was received has been told; earlier does no harm.
  Due tick(Instant now);
  /// Instant::max() where nobody is watched.
  Instant next_wakeup() const;

 private:
  /// Between two pings of everybody.
  Duration interval() const;

  Duration heartbeat_;
  Duration dead_after_;
  std::unordered_map<ConnectionId, Instant> heard_;
  Instant last_tick_{};
  Instant next_ping_{};
  Instant next_silence_ = Instant::max();  // Nobody can be overdue before.
};

}  // namespace herring::control
