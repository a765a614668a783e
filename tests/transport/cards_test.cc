#include "transport/cards.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace herring::transport {
namespace {

using Hands = std::vector<std::vector<std::uint32_t>>;

Hands deal(const std::vector<int>& nodes, const std::vector<CardUser>& users, std::uint32_t first = 0) {
  return deal_cards(nodes, users, first);
}

TEST(Cards, AreTakenInTurnsWhereNothingIsKnown) {
  EXPECT_EQ(deal({-1}, {{}, {}}), (Hands{{0}, {0}}));
  EXPECT_EQ(deal({-1, -1, -1}, {{}, {}, {}, {}}), (Hands{{0}, {1}, {2}, {0}}));
  EXPECT_EQ(deal({0, 1}, {{}, {}, {}}), (Hands{{0}, {1}, {0}})) << "processes that may run anywhere";
  EXPECT_EQ(deal({-1, -1, -1}, {{}, {}}, 4), (Hands{{1}, {2}}));
}

TEST(Cards, OfTheirOwnNodeAreTakenFirst) {
  const CardUser on_0{0b01};
  const CardUser on_1{0b10};
  EXPECT_EQ(deal({0, 0, 1, 1}, {on_0, on_0, on_1, on_1}), (Hands{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(deal({0, 0, 1, 1}, {on_0, on_1, on_0, on_1}), (Hands{{0}, {2}, {1}, {3}})) << "ranks by turns";
  EXPECT_EQ(deal({0, 1}, {on_1, on_0}), (Hands{{1}, {0}}));
  EXPECT_EQ(deal({0, 1}, {{}, on_0}), (Hands{{1}, {0}})) << "who may run anywhere leaves it to the other";
}

TEST(Cards, AllAreUsedEvenWhereThatIsFar) {
  const CardUser on_0{0b01};
  EXPECT_EQ(deal({0, 1}, {on_0, on_0, on_0, on_0}), (Hands{{0}, {0}, {1}, {1}}));
  EXPECT_EQ(deal({1, 1}, {on_0, on_0}), (Hands{{0}, {1}}));
}

TEST(Cards, OneProcessesEndpointsTakeDifferentOnes) {
  EXPECT_EQ(deal({-1, -1, -1, -1}, {{0, 2}, {0, 2}}), (Hands{{0, 2}, {1, 3}}));
  EXPECT_EQ(deal({0, 1}, {{0b10, 2}}), (Hands{{1, 0}}));
  EXPECT_EQ(deal({-1, -1}, {{0, 3}}), (Hands{{0, 1, 0}}));
}

/// Whatever machine it is: no card has two users more than another, each endpoint has a card, and a user is far from
/// its card only where all cards near it have as many users as any.
TEST(Cards, AreSharedOutEvenlyInARandomMachine) {
  std::mt19937 random(1);
  const auto pick = [&random](std::uint32_t low, std::uint32_t high) {
    return std::uniform_int_distribution<std::uint32_t>(low, high)(random);
  };
  for (int machine = 0; machine < 2000; ++machine) {
    std::vector<int> nodes(pick(1, 8));
    for (int& node : nodes) node = static_cast<int>(pick(0, 4)) - 1;
    std::vector<CardUser> users(pick(1, 16));
    const std::uint32_t endpoints = pick(1, 3);
    for (CardUser& user : users) user = {pick(0, 15), endpoints};
    const Hands hands = deal(nodes, users, pick(0, 20));
    ASSERT_EQ(hands.size(), users.size());
    std::vector<std::uint32_t> load(nodes.size());
    for (const auto& hand : hands) {
      ASSERT_EQ(hand.size(), endpoints);
      for (const std::uint32_t card : hand) ++load.at(card);
    }
    const std::uint32_t most = std::ranges::max(load);
    const auto total = static_cast<std::uint32_t>(users.size()) * endpoints;
    EXPECT_EQ(most, (total + nodes.size() - 1) / nodes.size());
    for (std::size_t i = 0; i < users.size(); ++i) {
      const bool is_far =
          std::ranges::any_of(hands[i], [&](std::uint32_t card) { return !is_near(nodes[card], users[i].nodes); });
      for (std::size_t card = 0; is_far && card < nodes.size(); ++card) {
        EXPECT_TRUE(!is_near(nodes[card], users[i].nodes) || load[card] == most);
      }
    }
  }
}

}  // namespace
}  // namespace herring::transport
