#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "core/types.h"

/// Finds links that carry nothing though both ends are alive, as a pure function of what was heard when: no clock, no
/// message of its own. docs/wire.md, "Half-open links".
namespace herring::runtime {

/// Peers that were not heard for `silent` and did not answer.
struct Unreachable {
  std::vector<PeerId> peers;
  std::uint32_t of = 0;         ///< So many were looked at,
  std::uint32_t answering = 0;  ///< and so many of them are heard.
  Duration silent{};
};

/// A peer that something is awaited from and that was not heard for half of the patience is asked; where it has not
/// been heard for the patience after that, it is unreachable. That others are late is no silence: a peer answers by
/// itself. Time in which nobody looked (a process that was stopped) does not count.
class LinkWatch final {
 public:
  struct Options {
    Duration patience{};       ///< Zero: nobody is ever asked.
    bool asks_others = false;  ///< Where one does not answer, all of `peers` are asked too, to tell whose fault it is.
  };
  /// When something last came from the peer.
  using Heard = std::function<Instant(PeerId)>;

  LinkWatch(const Options& options, std::vector<PeerId> peers);

  bool is_due(Instant now) const { return options_.patience > Duration::zero() && now >= next_look_; }
  Instant next_look() const { return next_look_; }
  /// Call it where is_due(), after what has arrived was delivered. Returns who is to be asked now: say asked() for each
  /// that really was. `awaited` may name peers twice, and others than `peers`, which are left alone.
  std::vector<PeerId> look(Instant now, std::span<const PeerId> awaited, const Heard& heard);
  void asked(Instant now, PeerId peer);
  /// What look() found, once: `peers` is empty where all is well. Each peer is reported again after the patience.
  Unreachable take_unreachable();
  /// It is known as gone.
  void forget(PeerId peer);

 private:
  struct Watched {
    Instant since;    // It is waited for, or was found well.
    Instant asked{};  // The first question without an answer; Instant{}: none.
    Instant asked_again{};
  };
  static bool is_open(const Watched& watched) { return watched.asked != Instant{}; }
  void catch_up(Instant now);
  void take_answers(const Heard& heard);
  void watch_awaited(Instant now, std::span<const PeerId> awaited, const Heard& heard);
  void find_unreachable(Instant now);

  Options options_;
  Duration period_;
  std::vector<PeerId> peers_;  // Sorted.
  std::map<PeerId, Watched> watched_;
  Unreachable unreachable_;
  Instant last_look_{};
  Instant next_look_{};
};

}  // namespace herring::runtime
