// Workers that disagree about who has which chunks after a death would wait for each other for ever.
#include "worker/items.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "wire/header.h"

namespace herring::worker {
namespace {

std::map<std::uint32_t, Item> by_id(const std::vector<Item>& items) {
  std::map<std::uint32_t, Item> result;
  for (const Item& item : items) result.emplace(item.id, item);
  return result;
}

/// Every chunk is somewhere, once, on a lane that lives.
void expect_whole(const std::vector<Item>& items, std::uint32_t chunks, const std::set<std::uint32_t>& lost) {
  std::vector<int> seen(chunks, 0);
  ASSERT_FALSE(items.empty());
  for (const Item& item : items) {
    EXPECT_FALSE(lost.contains(item.lane));
    ASSERT_LE(item.first + item.chunks, chunks);
    for (std::uint32_t i = 0; i < item.chunks; ++i) ++seen[item.first + i];
    if (item.id != item.origin) {
      EXPECT_LE(item.chunks, wire::kMaxHeldChunks);
    }
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<std::ptrdiff_t>(chunks));
  EXPECT_EQ(by_id(items).size(), items.size()) << "an id twice";
  EXPECT_EQ(std::count_if(items.begin(), items.end(), [](const Item& item) { return item.first == 0; }), 1);
}

TEST(Items, EveryChunkHasOneLivingLaneAfterAnyDeathsAndWhatIsOnLivingLanesStays) {
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    std::mt19937_64 random(seed);
    const auto lanes = static_cast<std::uint32_t>(2 + random() % 8);
    const auto chunks = static_cast<std::uint32_t>(random() % (seed % 10 == 0 ? 60'000 : 40));
    std::vector<double> weights;
    for (std::uint32_t lane = 0; lane < lanes; ++lane) weights.push_back(static_cast<double>(random() % 4));
    std::vector<std::uint32_t> order(lanes);
    for (std::uint32_t lane = 0; lane < lanes; ++lane) order[lane] = lane;
    std::shuffle(order.begin(), order.end(), random);
    const auto origin = static_cast<std::uint32_t>(random() % lanes);
    const std::uint64_t pick = random();
    std::vector<Item> before = make_items(origin, chunks, {}, weights, pick);
    std::set<std::uint32_t> lost;
    for (std::uint32_t count = 1; count < lanes; ++count) {
      const std::vector<Item> items = make_items(origin, chunks, std::span(order).first(count), weights, pick);
      const std::uint32_t died = order[count - 1];
      lost.insert(died);
      expect_whole(items, chunks, lost);
      const std::map<std::uint32_t, Item> now = by_id(items);
      std::map<std::uint32_t, std::uint32_t> inherited;  // By parent.
      for (const Item& item : items) inherited[item.parent] += item.chunks;
      for (const Item& item : before) {
        if (item.lane == died) {
          EXPECT_FALSE(now.contains(item.id));
          EXPECT_EQ(inherited[item.id], item.chunks) << "what a lane had is what its heirs get";
        } else {
          ASSERT_TRUE(now.contains(item.id));
          EXPECT_EQ(now.at(item.id).lane, item.lane);
          EXPECT_EQ(now.at(item.id).first, item.first);
          EXPECT_EQ(now.at(item.id).chunks, item.chunks);
        }
      }
      before = items;
    }
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed;
  }
}

TEST(Items, ALongShardIsSharedByWeightAndShortOnesTakeTurns) {
  const std::vector<double> weights = {1, 1, 2, 1};
  const std::vector<std::uint32_t> losses = {0};
  std::map<std::uint32_t, std::uint32_t> chunks;
  for (const Item& item : make_items(0, 400, losses, weights, 7)) chunks[item.lane] += item.chunks;
  EXPECT_EQ(chunks, (std::map<std::uint32_t, std::uint32_t>{{1, 100}, {2, 200}, {3, 100}}));
  std::set<std::uint32_t> heirs;
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const std::vector<Item> items = make_items(0, 1, losses, weights, seed);
    ASSERT_EQ(items.size(), 1u);
    heirs.insert(items.front().lane);
  }
  EXPECT_EQ(heirs, (std::set<std::uint32_t>{1, 2, 3}));
}

/// Shares that end in the middle of a chunk: each process must round them alike, whatever its machine and compiler make
/// of floating point. So they are rounded as whole numbers are: the half goes up.
TEST(Items, SharesThatEndInTheMiddleOfAChunkAreRoundedExactly) {
  struct Case {
    std::vector<double> weights;  // The first lane dies.
    std::uint32_t chunks;
    std::vector<std::uint32_t> expected;
  };
  const std::vector<Case> cases = {
      {{1, 17, 10, 19}, 299, {111, 65, 123}},                                 // 110.5 and 175.5
      {{1, 5, 16, 14, 9, 11, 2, 2, 7}, 153, {12, 37, 32, 21, 26, 4, 5, 16}},  // 127.5 after five
      {{1, 19, 8, 18, 1, 17, 15}, 169, {41, 18, 39, 2, 37, 32}},              // 97.5 after three
      {{1, 1, 1}, 5, {3, 2}},
      {{0, 0, 0}, 5, {3, 2}},
      {{1, 0.25, 0.5, 0.25}, 10, {3, 5, 2}},
      {{1, 1e-300, 3e-300}, 16, {4, 12}},
      {{1, 2.0 / 3, 1.0 / 3}, 9, {6, 3}},
  };
  for (const Case& one : cases) {
    std::map<std::uint32_t, std::uint32_t> chunks;
    const std::vector<std::uint32_t> losses = {0};
    for (const Item& item : make_items(0, one.chunks, losses, one.weights, 0)) chunks[item.lane] += item.chunks;
    std::vector<std::uint32_t> shares;
    for (std::uint32_t lane = 1; lane < one.weights.size(); ++lane) shares.push_back(chunks[lane]);
    EXPECT_EQ(shares, one.expected) << one.chunks << " chunks";
  }
}

}  // namespace
}  // namespace herring::worker
