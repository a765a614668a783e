#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace herring {

/// Equal pieces of memory, which are given out in runs: 2^order neighbours, order 0 to kMaxOrder. A run that comes back
/// is joined with its free neighbours (a buddy system), so when nothing is taken there are as many runs of each order
/// as there were in the beginning. What came back last goes first: it may still be in a cache.
class SlotPool final {
 public:
  static constexpr std::uint32_t kMaxOrder = 3;

  explicit SlotPool(std::uint32_t slots = 0) : size_(slots), order_at_(slots, kTaken), place_of_(slots) {
    const std::uint32_t most = 1u << kMaxOrder;
    std::uint32_t rest = slots / most * most;  // What makes no whole run: smaller ones, one for each bit of its size.
    for (std::uint32_t order = kMaxOrder; order-- > 0;) {
      if ((slots & 1u << order) == 0) continue;
      put(rest, order);
      rest += 1u << order;
    }
    for (std::uint32_t run = slots / most; run > 0; --run) put((run - 1) * most, kMaxOrder);
    for (std::uint32_t order = 0; order <= kMaxOrder; ++order) most_.push_back(free(order));
  }

  /// The order of the least runs with room for so many slots, at most kMaxOrder.
  static std::uint32_t order_for(std::uint32_t slots) {
    return std::min(static_cast<std::uint32_t>(std::bit_width(std::max(slots, 1u) - 1)), kMaxOrder);
  }

  std::uint32_t size() const { return size_; }
  /// So many runs of this order could be taken now ...
  std::uint32_t free(std::uint32_t order) const {
    std::size_t runs = 0;
    for (std::uint32_t larger = order; larger <= kMaxOrder; ++larger) runs += free_[larger].size() << (larger - order);
    return static_cast<std::uint32_t>(runs);
  }
  /// ... and so many where nothing is taken.
  std::uint32_t most(std::uint32_t order) const { return most_[order]; }

  /// The first slot of a run; free(order) must not be 0.
  std::uint32_t take(std::uint32_t order) {
    std::uint32_t from = order;
    while (free_[from].empty()) ++from;
    const std::uint32_t first = free_[from].back();
    remove(first);
    while (from > order) {
      --from;
      put(first + (1u << from), from);
    }
    return first;
  }

  void give_back(std::uint32_t first, std::uint32_t order) {
    for (; order < kMaxOrder; ++order) {
      const std::uint32_t neighbour = first ^ (1u << order);
      if (neighbour >= size_ || order_at_[neighbour] != order) break;
      remove(neighbour);
      first = std::min(first, neighbour);
    }
    put(first, order);
  }

 private:
  static constexpr std::uint8_t kTaken = 0xFF;

  void put(std::uint32_t first, std::uint32_t order) {
    order_at_[first] = static_cast<std::uint8_t>(order);
    place_of_[first] = static_cast<std::uint32_t>(free_[order].size());
    free_[order].push_back(first);
  }

  void remove(std::uint32_t first) {
    std::vector<std::uint32_t>& runs = free_[order_at_[first]];
    const std::uint32_t last = runs.back();
    runs[place_of_[first]] = last;
    place_of_[last] = place_of_[first];
    runs.pop_back();
    order_at_[first] = kTaken;
  }

  std::uint32_t size_;
  std::vector<std::uint32_t> free_[kMaxOrder + 1];  ///< First slots, by order.
  std::vector<std::uint8_t> order_at_;              ///< Of the free run that begins at this slot; kTaken: none does.
  std::vector<std::uint32_t> place_of_;             ///< Of that run in free_.
  std::vector<std::uint32_t> most_;
};

}  // namespace herring
