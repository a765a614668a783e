#include "core/slot_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <utility>
#include <vector>

namespace herring {
namespace {

TEST(SlotPool, EverySlotIsInOneRun) {
  for (std::uint32_t slots = 1; slots < 40; ++slots) {
    SlotPool pool(slots);
    EXPECT_EQ(pool.free(0), slots);
    EXPECT_EQ(pool.most(0), slots);
    EXPECT_EQ(pool.most(1), slots / 2);
    EXPECT_EQ(pool.most(3), slots / 8);
    std::set<std::uint32_t> taken;
    for (std::uint32_t i = 0; i < slots; ++i) taken.insert(pool.take(0));
    EXPECT_EQ(taken.size(), slots);
    EXPECT_EQ(*taken.rbegin(), slots - 1);
    EXPECT_EQ(pool.free(0), 0u);
  }
}

TEST(SlotPool, TheLeastOrderWithRoom) {
  EXPECT_EQ(SlotPool::order_for(1), 0u);
  EXPECT_EQ(SlotPool::order_for(2), 1u);
  EXPECT_EQ(SlotPool::order_for(3), 2u);
  EXPECT_EQ(SlotPool::order_for(4), 2u);
  EXPECT_EQ(SlotPool::order_for(5), 3u);
  EXPECT_EQ(SlotPool::order_for(8), 3u);
}

TEST(SlotPool, WhatComesBackLastGoesFirst) {
  SlotPool pool(8);
  const std::uint32_t kept = pool.take(0);
  const std::uint32_t slot = pool.take(0);
  pool.give_back(slot, 0);
  EXPECT_EQ(pool.take(0), slot);
  EXPECT_NE(kept, slot);
}

TEST(SlotPool, RunsNeverOverlapAndAllComeTogetherAgain) {
  std::mt19937 random(1);
  SlotPool pool(77);
  std::vector<bool> in_use(77);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> runs;
  std::uint32_t used = 0;
  for (int step = 0; step < 20'000; ++step) {
    const std::uint32_t order = random() % (SlotPool::kMaxOrder + 1);
    if (pool.free(order) > 0 && random() % 2 == 0) {
      const std::uint32_t first = pool.take(order);
      for (std::uint32_t i = 0; i < 1u << order; ++i) {
        ASSERT_LT(first + i, 77u);
        ASSERT_FALSE(in_use[first + i]);
        in_use[first + i] = true;
      }
      runs.emplace_back(first, order);
      used += 1u << order;
    } else if (!runs.empty()) {
      std::swap(runs[random() % runs.size()], runs.back());
      const auto [first, given] = runs.back();
      runs.pop_back();
      for (std::uint32_t i = 0; i < 1u << given; ++i) in_use[first + i] = false;
      pool.give_back(first, given);
      used -= 1u << given;
    }
    ASSERT_EQ(pool.free(0), 77 - used);
  }
  for (const auto& [first, order] : runs) pool.give_back(first, order);
  for (std::uint32_t order = 0; order <= SlotPool::kMaxOrder; ++order) EXPECT_EQ(pool.free(order), pool.most(order));
}

}  // namespace
}  // namespace herring
