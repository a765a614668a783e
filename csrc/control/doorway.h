#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "control/lobby.h"
#include "control/socket.h"
#include "core/descriptors.h"
#include "core/types.h"

/// The door of a hub and of a rendezvous: who may come in before it has authenticated.
namespace herring::control {

/// Accepts connections and keeps a Lobby of those that have not authenticated. Where that is full, or the process is
/// out of descriptors, one of them makes room, by chance; where none is left to do so, it looks away for a while
/// instead of spinning. Used by one thread.
class Doorway final {
 public:
  static constexpr std::size_t kMaxStrangers = 512;
  static constexpr Duration kHandshakePatience = std::chrono::seconds(6);

  explicit Doorway(UniqueFd listener);

  /// To be watched for reading; -1 while it looks away, and once closed.
  int fd() const { return pause_until_ ? -1 : listener_.get(); }
  /// fd() is readable. Hands each new connection to `take`, which names it; calls `evict` for one that makes room,
  /// before the one that needs it is accepted.
  void accept_some(Instant now, const std::function<ConnectionId(UniqueFd)>& take,
                   const std::function<void(ConnectionId)>& evict);
  /// So many members are still to come: that many more may be in the lobby, so that members who come all at once do not
  /// push each other out. No more descriptors are needed than the whole job needs.
  void expect(std::size_t members) { lobby_.set_capacity(kMaxStrangers + members); }
  /// It has authenticated, or is gone.
  void leave(ConnectionId connection) { lobby_.leave(connection); }
  /// Removes and returns those whose time is up; looks at the door again where that is due.
  std::vector<ConnectionId> overdue(Instant now);
  Instant next_wakeup() const;
  /// The port is free; who is in the lobby stays.
  void close();

 private:
  UniqueFd listener_;
  Lobby lobby_;
  std::optional<Instant> pause_until_;
};

/// Of `who`, which so many members connect to: their connections, and a full lobby. Throws Error(kUnavailable).
DescriptorClaim door_descriptors(const std::string& who, std::uint64_t members);
/// How many that is at most.
constexpr std::uint64_t door_descriptors(std::uint64_t members) { return members + Doorway::kMaxStrangers + 16; }

}  // namespace herring::control
