#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <unordered_map>
#include <vector>

#include "control/frame.h"
#include "core/types.h"

namespace herring::control {

/// Connections that have not authenticated yet: few, and not for long. Who has to make room is chosen by chance: a
/// flood then cannot know whom it pushes out, and who tries again comes through it.
class Lobby final {
 public:
  Lobby(std::size_t capacity, Duration patience, std::uint64_t seed)
      : capacity_(capacity), patience_(patience), random_(seed) {}
  /// Nobody leaves because of it: make_room() does that.
  void set_capacity(std::size_t capacity) { capacity_ = capacity; }
  void enter(ConnectionId connection, Instant now);
  /// Before enter(): somebody leaves and is returned where it is full.
  std::optional<ConnectionId> make_room() { return size() >= capacity_ ? evict() : std::nullopt; }
  /// Somebody leaves and is returned; nothing where nobody is inside.
  std::optional<ConnectionId> evict();
  void leave(ConnectionId connection);
  bool contains(ConnectionId connection) const { return ticket_of_.contains(connection); }
  /// Removes and returns those whose time is up.
  std::vector<ConnectionId> overdue(Instant now);
  /// Instant::max() where it is empty.
  Instant next_wakeup() const;
  std::size_t size() const { return ticket_of_.size(); }

 private:
  struct Guest {
    ConnectionId connection = 0;
    Instant since{};
  };
  std::size_t capacity_;
  Duration patience_;
  std::mt19937_64 random_;
  std::uint64_t next_ticket_ = 0;
  std::map<std::uint64_t, Guest> guests_;  // By ticket: the oldest first.
  std::unordered_map<ConnectionId, std::uint64_t> ticket_of_;
};

}  // namespace herring::control
