#include "fusion_buffer/shard_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "core/status.h"

namespace herring {
namespace {

constexpr std::uint64_t kHuge = std::uint64_t{1} << 40;

std::vector<ByteRange> plan(std::uint64_t total, const std::vector<double>& weights, std::uint64_t alignment = 64,
                            std::uint64_t min_shard = 0, std::uint32_t rotation = 0) {
  return make_shard_plan({.total_bytes = total,
                          .weights = weights,
                          .alignment_bytes = alignment,
                          .min_shard_bytes = min_shard,
                          .rotation = rotation});
}

/// A byte that two lanes own is summed twice; one that none owns is lost.
void expect_every_byte_once(const std::vector<ByteRange>& shards, std::uint64_t total, std::uint64_t alignment) {
  std::uint64_t end = 0;
  for (const ByteRange& shard : shards) {
    ASSERT_EQ(shard.offset, end);
    end += shard.bytes;
    ASSERT_TRUE(end == total || end % alignment == 0) << "boundary " << end << " of " << total;
  }
  ASSERT_EQ(end, total);
}

void expect_near_ideal(const std::vector<ByteRange>& shards, const std::vector<double>& weights, std::uint64_t total,
                       std::uint64_t alignment) {
  const long double sum = std::accumulate(weights.begin(), weights.end(), 0.0L);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const long double ideal = static_cast<long double>(total) * weights[i] / sum;
    const long double error = static_cast<long double>(shards[i].bytes) - ideal;
    // Beyond the unit, only what quantising the weights to 50 bits or so moves.
    EXPECT_LE(std::abs(error),
              static_cast<long double>(alignment) * 1.000001L + static_cast<long double>(total) * 1e-13L)
        << "lane " << i << " of " << weights.size() << ": " << shards[i].bytes << " for " << static_cast<double>(ideal);
    if (weights[i] == 0) {
      EXPECT_EQ(shards[i].bytes, 0u);
    }
  }
}

TEST(ShardPlan, EveryByteOnceAndWithinOneUnitOfTheIdealForRandomInputs) {
  const std::uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const std::vector<std::uint64_t> alignments{1, 2, 4, 8, 24, 64, 4096};
  for (int round = 0; round < 20000; ++round) {
    const std::size_t lanes = 1 + random() % 40;
    std::vector<double> weights(lanes);
    for (double& weight : weights) weight = random() % 4 == 0 ? 0 : std::uniform_real_distribution(1e-3, 1e3)(random);
    weights[random() % lanes] = 1 + random() % 7;
    const std::uint64_t alignment = alignments[random() % alignments.size()];
    const std::uint64_t total = std::uint64_t{random()} << random() % 12 >> random() % 32;
    const auto shards = plan(total, weights, alignment, 0, static_cast<std::uint32_t>(random()));
    ASSERT_EQ(shards.size(), lanes);
    expect_every_byte_once(shards, total, alignment);
    expect_near_ideal(shards, weights, total, alignment);
    if (HasFailure()) FAIL() << "round " << round << ", total " << total << ", alignment " << alignment;
  }
}

TEST(ShardPlan, SharesDoNotFallBelowTheMinimumForRandomInputs) {
  const std::uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 20000; ++round) {
    const std::size_t lanes = 1 + random() % 20;
    std::vector<double> weights(lanes);
    for (double& weight : weights) weight = random() % 5 == 0 ? 0 : 1 + random() % 3;
    weights[random() % lanes] = 1;
    const std::uint64_t alignment = std::uint64_t{1} << random() % 8;
    const std::uint64_t min_shard = 1 + random() % 3000;
    const std::uint64_t total = random() % 30000;
    const auto shards = plan(total, weights, alignment, min_shard, static_cast<std::uint32_t>(random()));
    expect_every_byte_once(shards, total, alignment);
    const auto used = std::ranges::count_if(shards, [](const ByteRange& shard) { return shard.bytes > 0; });
    for (const ByteRange& shard : shards) {
      ASSERT_TRUE(shard.bytes == 0 || shard.bytes >= min_shard || used == 1)
          << shard.bytes << " below " << min_shard << ", round " << round << ", total " << total;
    }
  }
}

TEST(ShardPlan, MinimumUsesAsManyLanesAsFitStartingAtTheRotation) {
  const std::vector<double> four{1, 1, 1, 1};
  // 3 KiB in shards of 1 KiB: three lanes, lanes 2, 3, 0 for rotation 2.
  EXPECT_EQ(plan(3072, four, 64, 1024, 2), (std::vector<ByteRange>{{0, 1024}, {1024, 0}, {1024, 1024}, {2048, 1024}}));
  EXPECT_EQ(plan(4096, four, 64, 1024, 3),
            (std::vector<ByteRange>{{0, 1024}, {1024, 1024}, {2048, 1024}, {3072, 1024}}));
  // Too small for one minimum: one lane, the next that has a weight.
  const auto small = plan(100, {1, 0, 1}, 64, 1024, 1);
  EXPECT_EQ(small[2], (ByteRange{0, 100}));
  EXPECT_EQ(small[0].bytes + small[1].bytes, 0u);
}

TEST(ShardPlan, RotationSpreadsSmallPartsAndOddUnitsOverAllLanes) {
  const std::vector<double> weights(7, 1.0);
  std::vector<int> times_small(7), times_odd(7), times_min(7);
  for (std::uint32_t rotation = 0; rotation < 70; ++rotation) {
    const auto small = plan(64, weights, 64, 0, rotation);
    const auto odd = plan(64 * 7 * 10 + 64, weights, 64, 0, rotation);
    const auto minimum = plan(64, weights, 64, 4096, rotation);
    for (std::size_t lane = 0; lane < 7; ++lane) {
      times_small[lane] += small[lane].bytes > 0;
      times_odd[lane] += odd[lane].bytes > 640;
      times_min[lane] += minimum[lane].bytes > 0;
    }
  }
  EXPECT_EQ(times_small, std::vector<int>(7, 10));
  EXPECT_EQ(times_odd, std::vector<int>(7, 10));
  EXPECT_EQ(times_min, std::vector<int>(7, 10));
}

TEST(ShardPlan, EqualWeightsGiveEqualShares) {
  for (const std::uint64_t lanes : {1u, 2u, 3u, 8u, 13u, 1000u}) {
    for (const double weight : {1.0, 0.1, 1e-300, 1e300}) {
      const auto shards = plan(lanes * 128 * 1024, std::vector<double>(lanes, weight));
      for (const ByteRange& shard : shards) ASSERT_EQ(shard.bytes, 128u * 1024);
    }
  }
}

TEST(ShardPlan, ScaleOfTheWeightsDoesNotMatter) {
  const std::vector<double> weights{0.3, 1.7, 0, 2.25, 0.01};
  for (const double scale : {0.25, 4.0, 1024.0}) {
    std::vector<double> scaled = weights;
    for (double& weight : scaled) weight *= scale;
    EXPECT_EQ(plan(123456789, scaled, 64, 0, 3), plan(123456789, weights, 64, 0, 3));
  }
}

TEST(ShardPlan, EdgeSizes) {
  const std::vector<double> weights{1, 0, 2, 1};
  for (const std::uint64_t total : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{63}, std::uint64_t{65}, kHuge,
                                    kHuge + 1, std::numeric_limits<std::uint64_t>::max()}) {
    for (const std::uint64_t alignment : {std::uint64_t{1}, std::uint64_t{64}, std::uint64_t{1} << 21}) {
      for (const std::uint64_t min_shard : {std::uint64_t{0}, std::uint64_t{4096}, kHuge * 2}) {
        for (std::uint32_t rotation = 0; rotation < 5; ++rotation) {
          const auto shards = plan(total, weights, alignment, min_shard, rotation);
          expect_every_byte_once(shards, total, alignment);
          EXPECT_EQ(shards[1].bytes, 0u);
          if (min_shard == 0 && total <= kHuge + 1) expect_near_ideal(shards, weights, total, alignment);
        }
      }
    }
  }
}

TEST(ShardPlan, GoldenPlansAreTheSameOnEveryMachine) {
  EXPECT_EQ(plan(1000, {1, 1, 1}), (std::vector<ByteRange>{{0, 320}, {320, 320}, {640, 360}}));
  EXPECT_EQ(plan(1000, {0.1, 0.2, 0.7}, 4, 0, 1), (std::vector<ByteRange>{{0, 100}, {100, 200}, {300, 700}}));
  EXPECT_EQ(plan(kHuge + 7, {0.5, 0.25, 1}, 64, 0, 2),
            (std::vector<ByteRange>{{0, 314146179392}, {314146179392, 157073089664}, {471219269056, 628292358727}}));
}

TEST(ShardPlan, RefusesWhatMakesNoPlan) {
  EXPECT_THROW(plan(10, {}), Error);
  EXPECT_THROW(plan(10, {0, 0}), Error);
  EXPECT_THROW(plan(10, {1, -1}), Error);
  EXPECT_THROW(plan(10, {1, std::numeric_limits<double>::quiet_NaN()}), Error);
  EXPECT_THROW(plan(10, {1, std::numeric_limits<double>::infinity()}), Error);
  EXPECT_THROW(plan(10, {1}, 0), Error);
  try {
    plan(10, {1, -2.5});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("lane 1 is -2.5"), std::string::npos) << error.what();
  }
}

/// t* = 2n(n-1)S / ((n^2+kn-2k)B): no placement of servers finishes an all-reduce earlier. For k > n as for k = n.
double least_seconds(double n, double k, double bytes, double link_bytes_per_second) {
  k = std::min(k, n);
  return n == 1 ? 0 : 2 * n * (n - 1) * bytes / ((n * n + k * n - 2 * k) * link_bytes_per_second);
}

/// With these weights every link carries the same, and that is the lower bound.
TEST(Placement, EveryLinkFinishesAtTheLowerBound) {
  for (std::uint32_t n = 1; n <= 16; ++n) {
    for (std::uint32_t k = 0; k <= n; ++k) {
      SCOPED_TRACE("n " + std::to_string(n) + ", k " + std::to_string(k));
      const PlacementWeights weights = placement_weights(n, k);
      EXPECT_NEAR(k * weights.dedicated + n * weights.own_host, 1.0, 1e-12);
      if (n == 1) continue;
      const double bound = least_seconds(n, k, 25e6, 1e9);
      // A dedicated server receives its share from n hosts. A worker host sends all but its own share, and sends
      // its own server's results to n-1 others.
      const double worker = (1 - weights.own_host) + (n - 1) * weights.own_host;
      EXPECT_NEAR(worker * 25e6 / 1e9, bound, 1e-12);
      if (k > 0) {
        EXPECT_NEAR(n * weights.dedicated * 25e6 / 1e9, bound, 1e-12);
      }
      if (k == n) {
        EXPECT_EQ(weights.own_host, 0);
      }
    }
  }
  EXPECT_DOUBLE_EQ(least_seconds(8, 0, 1, 1), 2.0 * 7 / 8);  // The ring.
  EXPECT_DOUBLE_EQ(least_seconds(8, 8, 1, 1), 1);
  EXPECT_DOUBLE_EQ(least_seconds(8, 12, 1, 1), 1);
  EXPECT_EQ(least_seconds(1, 0, 1, 1), 0);
  EXPECT_DOUBLE_EQ(placement_weights(4, 8).dedicated, 0.125);
  EXPECT_EQ(placement_weights(4, 8).own_host, 0);
}

TEST(Placement, EveryMixMakesOnePlan) {
  for (std::uint32_t n = 1; n <= 16; ++n) {
    for (std::uint32_t k = 0; k <= n; ++k) {
      const PlacementWeights each = placement_weights(n, k);
      std::vector<double> weights(n, each.own_host);
      weights.insert(weights.end(), k, each.dedicated);
      for (const std::uint64_t total : {std::uint64_t{25} << 20, std::uint64_t{1000003}, kHuge}) {
        const auto shards = plan(total, weights, 64, 0, n + k);
        expect_every_byte_once(shards, total, 64);
        expect_near_ideal(shards, weights, total, 64);
      }
    }
  }
}

TEST(Placement, RefusesWhatMakesNoSense) { EXPECT_THROW(placement_weights(0, 1), Error); }

TEST(Chunks, CoverTheShardOnce) {
  for (const std::uint64_t bytes : {0u, 1u, 99u, 100u, 101u, 1000u, 1001u}) {
    const ByteRange shard{12345, bytes};
    std::uint64_t end = shard.offset;
    const std::uint32_t count = chunk_count(bytes, 100);
    EXPECT_EQ(count, (bytes + 99) / 100);
    for (std::uint32_t chunk = 0; chunk < count; ++chunk) {
      const ByteRange range = chunk_range(shard, 100, chunk);
      EXPECT_EQ(range.offset, shard.offset + chunk * 100);
      EXPECT_EQ(range.offset, end);
      EXPECT_TRUE(range.bytes > 0 && range.bytes <= 100);
      end += range.bytes;
    }
    EXPECT_EQ(end, shard.offset + bytes);
    EXPECT_THROW(chunk_range(shard, 100, count), Error);
  }
  EXPECT_EQ(chunk_range({0, kHuge}, 128 << 10, (1u << 23) - 1), (ByteRange{kHuge - (128 << 10), 128 << 10}));
  EXPECT_THROW(chunk_count(1, 0), Error);
  EXPECT_THROW(chunk_count(kHuge, 1), Error);
}

TEST(SplitEvenly, CoversOnceAndSizesDifferByAtMostOne) {
  for (std::uint32_t count = 0; count < 40; ++count) {
    for (std::uint32_t ways = 1; ways < 12; ++ways) {
      std::uint32_t end = 0;
      for (std::uint32_t owner = 0; owner < ways; ++owner) {
        const IndexRange range = split_evenly(count, ways, owner);
        EXPECT_EQ(range.first, end);
        EXPECT_TRUE(range.count == count / ways || range.count == count / ways + 1);
        end += range.count;
      }
      EXPECT_EQ(end, count);
    }
  }
  EXPECT_THROW(split_evenly(1, 0, 0), Error);
  EXPECT_THROW(split_evenly(1, 2, 2), Error);
}

}  // namespace
}  // namespace herring
