#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

#include "core/types.h"

namespace herring::efa {

/// Blocks one thread until a completion queue may have something, another thread calls wake(), or one of the caller's
/// descriptors is readable. Where the provider has no descriptor to wait on (EFA), it naps between polls instead:
/// 50 us, doubling to 1 ms while nothing happens. Thread-safe: wake() only.
class Waiter final {
 public:
  /// `descriptor` is the queue's, or -1 where it has none. Borrowed for the life of the waiter.
  explicit Waiter(int descriptor);
  ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  /// True where the next wait() watches the queue's descriptor, which must be armed just before it.
  bool watches_queue() const noexcept { return queue_descriptor_ >= 0 && fruitless_ < kMaxFruitless; }
  /// The queue has nothing more to tell: naps from here on.
  void forget_queue() noexcept { queue_descriptor_ = -1; }
  /// Does not block where `ready` says that there is something to poll already.
  void wait(Instant deadline, std::span<const int> also, bool ready);
  /// The same for a caller who blocks by itself, on `descriptors` until `deadline`. False where it must not block.
  bool prepare(std::vector<int>& descriptors, Instant& deadline);
  void wake() noexcept;
  /// poll() had something: naps start short again.
  void reset_naps() noexcept {
    nap_ = kShortestNap;
    fruitless_ = 0;
  }

 private:
  static constexpr Duration kShortestNap = std::chrono::microseconds(50);
  static constexpr Duration kLongestNap = std::chrono::milliseconds(1);
  // A large message wakes its receiver a few hundred times before it completes. More often without a completion is a
  // descriptor that stays readable for nothing; then naps keep the thread from spinning.
  static constexpr std::size_t kMaxFruitless = 2048;

  bool drain_wake() noexcept;
  void block(Duration limit, std::span<const int> also, bool with_queue);

  int queue_descriptor_;
  int wake_descriptor_;
  Duration nap_ = kShortestNap;
  std::size_t fruitless_ = 0;
  std::vector<pollfd> descriptors_;
};

}  // namespace herring::efa
