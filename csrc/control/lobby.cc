#include "control/lobby.h"

#include <iterator>

namespace herring::control {

void Lobby::enter(ConnectionId connection, Instant now) {
  ticket_of_[connection] = next_ticket_;
  guests_[next_ticket_++] = Guest{connection, now};
}

std::optional<ConnectionId> Lobby::evict() {
  if (guests_.empty()) return std::nullopt;
  const auto chosen = std::next(guests_.begin(), static_cast<std::ptrdiff_t>(random_() % guests_.size()));
  const ConnectionId connection = chosen->second.connection;
  leave(connection);
  return connection;
}

void Lobby::leave(ConnectionId connection) {
  const auto found = ticket_of_.find(connection);
  if (found == ticket_of_.end()) return;
  guests_.erase(found->second);
  ticket_of_.erase(found);
}

std::vector<ConnectionId> Lobby::overdue(Instant now) {
  std::vector<ConnectionId> result;
  while (!guests_.empty() && now - guests_.begin()->second.since >= patience_) {
    result.push_back(guests_.begin()->second.connection);
    leave(result.back());
  }
  return result;
}

Instant Lobby::next_wakeup() const {
  return guests_.empty() ? Instant::max() : guests_.begin()->second.since + patience_;
}

}  // namespace herring::control
