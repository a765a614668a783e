#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

namespace herring {

/// At most an eighth more than is asked for, in whole pages, so that sizes that differ a little share a block.
constexpr std::size_t pooled_bytes(std::size_t bytes, std::size_t page = 1) {
  const std::size_t step = std::max(std::bit_floor(bytes) / 8, page);
  return (bytes + step - 1) / step * step;
}

/// Memory that is dear to get, kept for later users: as much as was ever in use at once. Block::bytes() is its size.
/// Any thread; blocks go outside of the lock.
template <class Block>
class IdlePool final {
 public:
  /// The smallest that is large enough, not wasted on this, and `fits`; null: none.
  template <class Fits>
  std::unique_ptr<Block> find(std::size_t bytes, const Fits& fits) {
    const std::lock_guard lock(mutex_);
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      const std::size_t size = (*it)->bytes();
      const bool is_good = size >= bytes && size / 2 <= bytes && fits(**it);
      if (is_good && (best == idle_.end() || size <= (*best)->bytes())) best = it;
    }
    return best == idle_.end() ? nullptr : remove(best);
  }

  /// The one that was used least lately; null: none.
  std::unique_ptr<Block> oldest() {
    const std::lock_guard lock(mutex_);
    return idle_.empty() ? nullptr : remove(idle_.begin());
  }

  /// It is in use from now on, until give_back().
  void lend(const Block& block) {
    const std::lock_guard lock(mutex_);
    in_use_bytes_ += block.bytes();
    most_in_use_ = std::max(most_in_use_, in_use_bytes_);
  }

  void give_back(std::unique_ptr<Block> block) {
    std::unique_lock lock(mutex_);
    in_use_bytes_ -= block->bytes();
    idle_bytes_ += block->bytes();
    idle_.push_back(std::move(block));
    while (idle_bytes_ > most_in_use_) {
      std::unique_ptr<Block> last = remove(idle_.begin());
      lock.unlock();
      last.reset();
      lock.lock();
    }
  }

 private:
  using Idle = std::deque<std::unique_ptr<Block>>;

  std::unique_ptr<Block> remove(typename Idle::iterator place) {
    std::unique_ptr<Block> block = std::move(*place);
    idle_.erase(place);
    idle_bytes_ -= block->bytes();
    return block;
  }

  std::mutex mutex_;  // guards all below
  Idle idle_;         // The one that was used last is the last.
  std::size_t idle_bytes_ = 0;
  std::size_t in_use_bytes_ = 0;
  std::size_t most_in_use_ = 0;
};

}  // namespace herring
