#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

namespace herring::tcp {

/// Items at addresses that never change, linked by Item::next while they are free. No allocation once it has grown to
/// the most that were ever taken.
template <class Item>
class BlockPool final {
 public:
  Item* take() {
    if (free_ == nullptr) grow();
    Item* const item = free_;
    free_ = item->next;
    *item = Item{};
    ++taken_;
    return item;
  }
  void give_back(Item* item) noexcept {
    item->next = free_;
    free_ = item;
    --taken_;
  }
  std::size_t taken() const { return taken_; }

 private:
  static constexpr std::size_t kBlock = 256;
  using Block = std::array<Item, kBlock>;

  void grow() {
    blocks_.push_back(std::make_unique<Block>());
    for (Item& item : *blocks_.back()) {
      item.next = free_;
      free_ = &item;
    }
  }

  std::vector<std::unique_ptr<Block>> blocks_;
  Item* free_ = nullptr;
  std::size_t taken_ = 0;
};

}  // namespace herring::tcp
