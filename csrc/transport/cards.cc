#include "transport/cards.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace herring::transport {
namespace {

class Dealer {
 public:
  Dealer(std::span<const int> node_of_card, std::span<const CardUser> users, std::uint32_t first)
      : node_of_card_(node_of_card), users_(users), load_(node_of_card.size()), first_(first), hands_(users.size()) {
    const auto count = static_cast<std::uint32_t>(node_of_card.size());
    std::uint32_t endpoints = 0;
    for (const CardUser& user : users) endpoints += user.endpoints;
    most_ = (endpoints + count - 1) / count;
  }

  /// One card for each, round by round; who has the smallest choice goes first.
  std::vector<std::vector<std::uint32_t>> deal() {
    std::vector<std::uint32_t> order(users_.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, {}, [this](std::uint32_t user) { return near_cards(users_[user]); });
    const auto rounds = std::ranges::max(users_, {}, &CardUser::endpoints).endpoints;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      std::vector<std::uint32_t> late;  // Their own nodes' cards have enough users.
      for (const std::uint32_t user : order) {
        if (users_[user].endpoints > round && !take(user, true)) late.push_back(user);
      }
      for (const std::uint32_t user : late) take(user, false);
    }
    return std::move(hands_);
  }

 private:
  std::size_t near_cards(const CardUser& user) const {
    return static_cast<std::size_t>(
        std::ranges::count_if(node_of_card_, [&](int node) { return is_near(node, user.nodes); }));
  }

  bool take(std::uint32_t user, bool only_near) {
    const auto count = static_cast<std::uint32_t>(node_of_card_.size());
    std::vector<std::uint32_t>& hand = hands_[user];
    const auto cost = [&](std::uint32_t card) {
      const bool has_it = std::ranges::find(hand, card) != hand.end();
      return std::tuple(load_[card], has_it, (card + count - first_ % count) % count);
    };
    std::uint32_t best = count;
    for (std::uint32_t card = 0; card < count; ++card) {
      if (only_near && (!is_near(node_of_card_[card], users_[user].nodes) || load_[card] >= most_)) continue;
      if (best == count || cost(card) < cost(best)) best = card;
    }
    if (best == count) return false;
    ++load_[best];
    hand.push_back(best);
    return true;
  }

  const std::span<const int> node_of_card_;
  const std::span<const CardUser> users_;
  std::uint32_t most_ = 1;  // Users of one card, as long as others have fewer.
  std::vector<std::uint32_t> load_;
  const std::uint32_t first_;
  std::vector<std::vector<std::uint32_t>> hands_;
};

}  // namespace

std::vector<std::vector<std::uint32_t>> deal_cards(std::span<const int> node_of_card, std::span<const CardUser> users,
                                                   std::uint32_t first) {
  return Dealer(node_of_card, users, first).deal();
}

}  // namespace herring::transport
