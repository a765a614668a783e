#pragma once

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"
#include "tcp/tcp.h"

namespace herring::tcp {

/// What happened on an endpoint's sockets, and how its thread sleeps until something does. Thread-safe: wake() only.
class Events final {
 public:
  static constexpr std::uint64_t kWake = ~std::uint64_t{0};  // Not a name for a socket.

  explicit Events(Stats& stats);
  ~Events();
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  /// Told of once whenever it becomes readable or writable (edge-triggered). False where the system has no room.
  bool add(int socket, std::uint64_t name);
  void remove(int socket);

  /// What happened since the last call. Does not block.
  std::span<const epoll_event> look();
  /// Sleeps until something happens, wake(), or the deadline. With `also` empty it brings what look() will return.
  void wait(Instant deadline, std::span<const int> also);
  /// wait() has brought something that look() has not returned yet.
  bool has_events() const { return found_ > 0; }
  int descriptor() const { return epoll_; }
  void wake() noexcept;
  /// True where wake() was called since it was last asked.
  bool take_wake() noexcept;

 private:
  std::size_t harvest(Duration limit);
  void drain() noexcept;

  Stats& stats_;
  int epoll_ = -1;
  int wake_ = -1;
  std::atomic<bool> is_woken_{false};
  bool is_looked_ = false;  // wait() has asked already: found_ is what look() returns.
  std::size_t found_ = 0;
  std::array<epoll_event, 64> events_{};
};

}  // namespace herring::tcp
