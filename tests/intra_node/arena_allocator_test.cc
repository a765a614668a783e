#include "intra_node/arena_allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <thread>
#include <vector>

namespace herring::intra_node {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

struct Discarded {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  ArenaAllocator::Discard function() {
    return [this](std::uint64_t offset, std::uint64_t bytes) { ranges.emplace_back(offset, bytes); };
  }
};

TEST(ArenaAllocator, HandsTheLastFreedRangeOutFirst) {
  Discarded discarded;
  ArenaAllocator allocator(64 * kMiB, 64 * kMiB, discarded.function());
  const auto a = allocator.allocate(kMiB);
  const auto b = allocator.allocate(kMiB);
  ASSERT_TRUE(a && b);
  EXPECT_TRUE(allocator.deallocate(*a));
  EXPECT_TRUE(allocator.deallocate(*b));
  EXPECT_EQ(allocator.allocate(kMiB), b);
  EXPECT_EQ(allocator.allocate(kMiB), a);
  EXPECT_TRUE(discarded.ranges.empty());
}

TEST(ArenaAllocator, GivesPagesBackBeyondTheLimitOldestFirst) {
  Discarded discarded;
  ArenaAllocator allocator(64 * kMiB, 8 * kMiB, discarded.function());
  const auto a = allocator.allocate(4 * kMiB);
  const auto b = allocator.allocate(5 * kMiB);
  ASSERT_TRUE(a && b);
  EXPECT_TRUE(allocator.deallocate(*a));
  EXPECT_TRUE(allocator.deallocate(*b));
  ASSERT_EQ(discarded.ranges.size(), 1u);
  EXPECT_EQ(discarded.ranges[0], std::make_pair(*a, 4 * kMiB));
  EXPECT_EQ(allocator.warm_bytes(), 5 * kMiB);
}

TEST(ArenaAllocator, MergesWarmRangesWhenALargeOneIsNeeded) {
  Discarded discarded;
  ArenaAllocator allocator(16 * kMiB, 16 * kMiB, discarded.function());
  std::vector<std::uint64_t> offsets;
  while (const auto offset = allocator.allocate(kMiB)) offsets.push_back(*offset);
  EXPECT_EQ(offsets.size(), 16u);
  for (const std::uint64_t offset : offsets) EXPECT_TRUE(allocator.deallocate(offset));
  EXPECT_TRUE(allocator.allocate(16 * kMiB).has_value());
}

TEST(ArenaAllocator, RefusesWhatDoesNotFitAndWhatItDoesNotKnow) {
  Discarded discarded;
  ArenaAllocator allocator(kMiB, kMiB, discarded.function());
  EXPECT_FALSE(allocator.allocate(kMiB + 1).has_value());
  EXPECT_FALSE(allocator.allocate(UINT64_MAX).has_value());
  const auto a = allocator.allocate(0);
  ASSERT_TRUE(a.has_value());
  EXPECT_FALSE(allocator.deallocate(*a + 4096));
  EXPECT_TRUE(allocator.deallocate(*a));
  EXPECT_FALSE(allocator.deallocate(*a)) << "freed twice";
}

TEST(ArenaAllocator, LeavesAsMuchAsItIsTold) {
  Discarded discarded;
  ArenaAllocator allocator(8 * kMiB, 8 * kMiB, discarded.function());
  std::vector<std::uint64_t> kept;
  while (const auto offset = allocator.allocate(kMiB, 3 * kMiB)) kept.push_back(*offset);
  EXPECT_EQ(kept.size(), 5u);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(allocator.allocate(kMiB).has_value());
  EXPECT_FALSE(allocator.allocate(kMiB).has_value());
  EXPECT_TRUE(allocator.deallocate(kept[0]));
  EXPECT_FALSE(allocator.allocate(kMiB, 1).has_value()) << "a warm range counts as one that is free";
  EXPECT_FALSE(allocator.allocate(UINT64_MAX, 1).has_value());
  EXPECT_FALSE(allocator.allocate(1, UINT64_MAX).has_value());
  EXPECT_TRUE(allocator.allocate(kMiB).has_value());
}

TEST(ArenaAllocator, AlignsLargeRangesToHugePages) {
  Discarded discarded;
  ArenaAllocator allocator(64 * kMiB, 64 * kMiB, discarded.function());
  ASSERT_TRUE(allocator.allocate(4096).has_value());
  for (const std::uint64_t bytes : {2 * kMiB, 3 * kMiB + 5, 25 * kMiB}) {
    const auto offset = allocator.allocate(bytes);
    ASSERT_TRUE(offset.has_value());
    EXPECT_EQ(*offset % ArenaAllocator::kHugePage, 0u);
  }
}

TEST(ArenaAllocator, NeverHandsAByteOutTwice) {
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    constexpr std::uint64_t kArena = 32 * kMiB;
    std::map<std::uint64_t, std::uint64_t> live;
    ArenaAllocator allocator(kArena, 6 * kMiB, [&](std::uint64_t offset, std::uint64_t bytes) {
      for (const auto& [at, size] : live) ASSERT_FALSE(offset < at + size && at < offset + bytes) << "pages in use";
    });
    for (int step = 0; step < 2000; ++step) {
      if (!live.empty() && random() % 2 == 0) {
        const auto it = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
        const std::uint64_t offset = it->first;
        live.erase(it);
        ASSERT_TRUE(allocator.deallocate(offset));
        continue;
      }
      const std::uint64_t bytes = random() % 8 == 0 ? random() % (5 * kMiB) + 1 : random() % (64 << 10) + 1;
      const auto offset = allocator.allocate(bytes);
      if (!offset) continue;
      ASSERT_EQ(*offset % ArenaAllocator::kAlignment, 0u);
      ASSERT_LE(*offset + bytes, kArena);
      const auto next = live.lower_bound(*offset);
      if (next != live.end()) {
        ASSERT_LE(*offset + bytes, next->first);
      }
      if (next != live.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second, *offset);
      }
      live.emplace(*offset, bytes);
    }
    for (const auto& [offset, bytes] : std::exchange(live, {})) ASSERT_TRUE(allocator.deallocate(offset));
    EXPECT_EQ(allocator.bytes_in_use(), 0u);
    EXPECT_TRUE(allocator.allocate(kArena).has_value()) << "all of it comes together again";
  }
}

TEST(ArenaAllocator, WorksFromManyThreads) {
  ArenaAllocator allocator(64 * kMiB, 4 * kMiB, [](std::uint64_t, std::uint64_t) {});
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&allocator, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 2000; ++i) {
        const auto offset = allocator.allocate(random() % kMiB + 1);
        if (!offset || !allocator.deallocate(*offset)) ADD_FAILURE() << i;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(allocator.bytes_in_use(), 0u);
}

}  // namespace
}  // namespace herring::intra_node
