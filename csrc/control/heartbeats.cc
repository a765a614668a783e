#include "control/heartbeats.h"

#include <algorithm>

namespace herring::control {
namespace {

/// For each that is watched: pings and answers take a tenth of a core at most, where dead_after allows.
constexpr Duration kLeastIntervalOfOne = std::chrono::microseconds(200);

}  // namespace

Duration Heartbeats::interval() const {
  const Duration wanted = kLeastIntervalOfOne * static_cast<Duration::rep>(heard_.size());
  return std::max(heartbeat_, std::min(wanted, dead_after_ / 3));
}

void Heartbeats::watch(ConnectionId connection, Instant now) {
  if (heard_.empty()) {
    // The first one starts the clock: nobody was watched until now.
    last_tick_ = now;
    next_ping_ = now + interval();
    next_silence_ = Instant::max();
  }
  heard_[connection] = now;
  next_silence_ = std::min(next_silence_, now + dead_after_);
}

void Heartbeats::heard(ConnectionId connection, Instant now) {
  if (const auto found = heard_.find(connection); found != heard_.end()) found->second = now;
}

Instant Heartbeats::last_heard(ConnectionId connection) const {
  const auto found = heard_.find(connection);
  return found == heard_.end() ? Instant{} : found->second;
}

Heartbeats::Due Heartbeats::tick(Instant now) {
  Due due;
  if (heard_.empty()) return due;
  due.stalled = now - last_tick_ > heartbeat_ + dead_after_ / 2;
  if (due.stalled) {
    for (auto& [connection, heard] : heard_) heard = now;
    next_silence_ = now + dead_after_;
  }
  last_tick_ = now;
  if (now >= next_silence_) {
    next_silence_ = Instant::max();
    for (const auto& [connection, heard] : heard_) {
      const bool is_silent = now - heard >= dead_after_;
      if (is_silent) due.silent.push_back(connection);
      next_silence_ = std::min(next_silence_, is_silent ? now + heartbeat_ : heard + dead_after_);
    }
    std::sort(due.silent.begin(), due.silent.end());
  }
  due.ping = now >= next_ping_;
  if (due.ping) next_ping_ = now + interval();
  return due;
}

Instant Heartbeats::next_wakeup() const {
  return heard_.empty() ? Instant::max() : std::min(next_ping_, next_silence_);
}

}  // namespace herring::control
