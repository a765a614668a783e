#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "core/status.h"
#include "core/types.h"

namespace herring {

/// A first-in first-out queue between threads that never holds more than `capacity` items. Any number of producers and
/// consumers. A full queue is told to the producer (kAgain), never hidden by blocking or by growing.
template <class T>
class BoundedQueue final {
 public:
  struct Stats {
    std::uint64_t pushed = 0;    ///< Items taken in.
    std::uint64_t rejected = 0;  ///< Pushes that found the queue full.
    std::size_t peak = 0;        ///< Most items held at once.
  };

  explicit BoundedQueue(std::size_t capacity) : capacity_(capacity) {
    if (capacity == 0) throw Error(Code::kInvalidArgument, "a queue needs a capacity of at least 1");
  }
  BoundedQueue(const BoundedQueue&) = delete;
  BoundedQueue& operator=(const BoundedQueue&) = delete;

  /// Ok; kAgain where the queue is full; kShutdown after close(). `item` is moved from only where Ok.
  Status push(T&& item) {
    {
      const std::scoped_lock lock(mutex_);
      if (closed_) return Status(Code::kShutdown, "the queue is closed");
      if (items_.size() >= capacity_) {
        ++stats_.rejected;
        return Status::again();
      }
      items_.push_back(std::move(item));
      ++stats_.pushed;
      stats_.peak = std::max(stats_.peak, items_.size());
    }
    not_empty_.notify_one();
    return Status::ok();
  }

  /// The oldest item; nothing where the deadline passed first, or where the queue is closed and empty. Instant::max()
  /// has no deadline.
  std::optional<T> pop(Instant deadline) {
    std::unique_lock lock(mutex_);
    const auto is_over = [this] { return !items_.empty() || closed_; };
    if (deadline == Instant::max()) {
      not_empty_.wait(lock, is_over);
    } else {
      not_empty_.wait_until(lock, deadline, is_over);
    }
    return take();
  }
  /// Without waiting.
  std::optional<T> try_pop() {
    const std::scoped_lock lock(mutex_);
    return take();
  }

  /// No more pushes; what is in the queue can still be popped, and nobody waits any more. Idempotent.
  void close() {
    {
      const std::scoped_lock lock(mutex_);
      closed_ = true;
    }
    not_empty_.notify_all();
  }

  bool is_closed() const {
    const std::scoped_lock lock(mutex_);
    return closed_;
  }
  std::size_t size() const {
    const std::scoped_lock lock(mutex_);
    return items_.size();
  }
  std::size_t capacity() const noexcept { return capacity_; }
  Stats stats() const {
    const std::scoped_lock lock(mutex_);
    return stats_;
  }

 private:
  std::optional<T> take() {  // mutex_ is held.
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    return item;
  }

  const std::size_t capacity_;
  mutable std::mutex mutex_;  // Guards all below.
  std::condition_variable not_empty_;
  std::deque<T> items_;
  bool closed_ = false;
  Stats stats_;
};

}  // namespace herring
