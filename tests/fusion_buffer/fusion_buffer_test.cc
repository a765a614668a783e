#include "fusion_buffer/fusion_buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "core/status.h"

namespace herring {
namespace {

constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();

BucketLayout layout(const std::vector<std::uint64_t>& tensors, std::uint64_t cap, std::uint64_t first = 0,
                    std::uint64_t alignment = 64) {
  return plan_buckets(tensors, cap, first, alignment);
}

struct alignas(64) Memory {
  std::array<std::byte, 1024> bytes;
  Memory() { bytes.fill(std::byte{0xEE}); }
};

TEST(PlanBuckets, ConsecutiveTensorsShareABucketUpToTheCap) {
  const BucketLayout planned = layout({100, 28, 64, 200, 56, 1}, 256);
  EXPECT_EQ(planned.buckets, (std::vector<Bucket>{{0, 3, 256}, {3, 1, 200}, {4, 2, 65}}));
  EXPECT_EQ(planned.slices, (std::vector<TensorSlice>{{0, 100}, {128, 28}, {192, 64}, {0, 200}, {0, 56}, {64, 1}}));
  EXPECT_EQ(planned.slices_of(planned.buckets[1]).size(), 1u);
  EXPECT_EQ(planned.slices_of(planned.buckets[2])[1], (TensorSlice{64, 1}));
}

TEST(PlanBuckets, TensorsAboveTheCapAreAlone) {
  const BucketLayout planned = layout({10, 1000, 10, 10}, 256);
  EXPECT_EQ(planned.buckets, (std::vector<Bucket>{{0, 1, 10}, {1, 1, 1000}, {2, 2, 74}}));
  EXPECT_EQ(layout({kMost, kMost}, 256).buckets, (std::vector<Bucket>{{0, 1, kMost}, {1, 1, kMost}}));
  EXPECT_EQ(layout({kMost, 1}, kMost).buckets.size(), 2u);
}

TEST(PlanBuckets, TheFirstBucketMayBeSmallSoThatItLeavesEarly) {
  EXPECT_EQ(layout({64, 64, 64, 64}, 256, 64).buckets, (std::vector<Bucket>{{0, 1, 64}, {1, 3, 192}}));
}

TEST(PlanBuckets, EmptyTensorsHaveAPlaceAndNoTensorsNoBucket) {
  EXPECT_TRUE(layout({}, 256).buckets.empty());
  EXPECT_EQ(layout({0, 0}, 256).buckets, (std::vector<Bucket>{{0, 2, 0}}));
  EXPECT_EQ(layout({256, 0, 1}, 256).slices[1], (TensorSlice{256, 0}));
}

TEST(PlanBuckets, RandomLayoutsKeepOrderAlignmentAndCap) {
  const std::uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::uint64_t> tensors(random() % 50);
    for (auto& bytes : tensors) bytes = random() % 3 == 0 ? random() % 5000 : random() % 300;
    const std::uint64_t cap = 1 + random() % 2000;
    const std::uint64_t first = random() % 2 * (1 + random() % 500);
    const std::uint64_t alignment = 1 + random() % 65;
    const BucketLayout planned = layout(tensors, cap, first, alignment);
    std::size_t next = 0;
    for (std::size_t b = 0; b < planned.buckets.size(); ++b) {
      const Bucket& bucket = planned.buckets[b];
      ASSERT_EQ(bucket.first_tensor, next);
      ASSERT_GT(bucket.tensor_count, 0u);
      std::uint64_t end = 0;
      for (const TensorSlice& slice : planned.slices_of(bucket)) {
        ASSERT_EQ(slice.bytes, tensors[next++]);
        ASSERT_EQ(slice.offset % alignment, 0u);
        ASSERT_TRUE(slice.offset >= end && slice.offset - end < alignment);
        end = slice.offset + slice.bytes;
      }
      ASSERT_EQ(bucket.bytes, end);
      const std::uint64_t limit = b == 0 && first > 0 ? first : cap;
      ASSERT_TRUE(bucket.bytes <= limit || bucket.tensor_count == 1);
    }
    ASSERT_EQ(next, tensors.size());
  }
}

TEST(PlanBuckets, RefusesNoAlignmentAndNoCap) {
  EXPECT_THROW(layout({1}, 256, 0, 0), Error);
  EXPECT_THROW(layout({1}, 0), Error);
}

TEST(BalancedBucketBytes, GrowsWithTheLanesOnceShardsWouldBeSmall) {
  EXPECT_EQ(balanced_part_bytes(25 << 20, 1, 1 << 20), 25u << 20);
  EXPECT_EQ(balanced_part_bytes(25 << 20, 25, 1 << 20), 25u << 20);
  EXPECT_EQ(balanced_part_bytes(25 << 20, 64, 1 << 20), 64u << 20);
  EXPECT_EQ(balanced_part_bytes(25 << 20, 0, 1 << 20), 25u << 20);
  EXPECT_EQ(balanced_part_bytes(1, 2, kMost), kMost);
}

TEST(PackUnpack, RoundTripAndGapsAreZero) {
  const std::vector<std::uint64_t> sizes{3, 0, 64, 17};
  const BucketLayout planned = layout(sizes, 1 << 20, 0, 16);
  std::vector<std::vector<std::byte>> sources, targets;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    sources.emplace_back(sizes[i], static_cast<std::byte>(i + 1));
    targets.emplace_back(sizes[i], std::byte{0xFF});
  }
  const std::vector<std::span<const std::byte>> from(sources.begin(), sources.end());
  const std::vector<std::span<std::byte>> to(targets.begin(), targets.end());
  std::vector<std::byte> bucket(planned.buckets.at(0).bytes, std::byte{0xEE});
  pack(from, planned.slices, bucket);
  EXPECT_EQ(std::ranges::count(bucket, std::byte{0xEE}), 0);
  EXPECT_EQ(std::ranges::count(bucket, std::byte{0}), 16 - 3);
  unpack(bucket, planned.slices, to);
  EXPECT_EQ(sources, targets);
}

TEST(PackUnpack, RefusesWhatDoesNotFitByName) {
  std::vector<std::byte> data(8), bucket(16);
  const std::vector<std::span<const std::byte>> two{data, data};
  const auto attempt = [&](const std::vector<TensorSlice>& slices) { pack(two, slices, bucket); };
  EXPECT_THROW(attempt({{0, 8}}), Error);
  EXPECT_THROW(attempt({{0, 8}, {4, 8}}), Error);
  EXPECT_THROW(attempt({{0, 8}, {16, 8}}), Error);
  EXPECT_THROW(attempt({{0, 8}, {kMost - 3, 8}}), Error);
  try {
    attempt({{0, 8}, {8, 7}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("tensor 1 has 8 bytes, its slice 7"), std::string::npos) << error.what();
  }
}

TEST(FusionBuffer, CompleteWhenSealedAndEverySliceIsReady) {
  Memory memory;
  FusionBuffer buffer(memory.bytes);
  const auto first = buffer.reserve(100);
  const auto second = buffer.reserve(28);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(second->memory.data(), memory.bytes.data() + 128);
  EXPECT_EQ(buffer.contents().size(), 156u);
  EXPECT_TRUE(buffer.mark_ready(*second).is_ok());
  EXPECT_FALSE(buffer.all_ready());
  buffer.seal();
  EXPECT_FALSE(buffer.is_complete());
  EXPECT_FALSE(buffer.reserve(1).has_value());
  EXPECT_TRUE(buffer.mark_ready(*first).is_ok());
  EXPECT_TRUE(buffer.is_complete());
  // Stale bytes between slices would be reduced and sent.
  for (std::size_t i = 100; i < 128; ++i) EXPECT_EQ(memory.bytes[i], std::byte{0});
  EXPECT_EQ(memory.bytes[99], std::byte{0xEE});
}

TEST(FusionBuffer, FullIsAnAnswerAndSmallerOnesStillFit) {
  Memory memory;
  FusionBuffer buffer(memory.bytes);
  EXPECT_FALSE(buffer.reserve(1025).has_value());
  EXPECT_FALSE(buffer.reserve(std::numeric_limits<std::size_t>::max()).has_value());
  EXPECT_TRUE(buffer.reserve(1000).has_value());
  EXPECT_FALSE(buffer.reserve(1).has_value());
  EXPECT_EQ(buffer.slice_count(), 1u);
  buffer.reset();
  EXPECT_TRUE(buffer.reserve(1024).has_value());
  EXPECT_TRUE(buffer.reserve(0).has_value());
}

TEST(FusionBuffer, AGradientThatComesTwiceOrLateIsAnError) {
  Memory memory;
  FusionBuffer buffer(memory.bytes);
  const auto slice = buffer.reserve(8);
  ASSERT_TRUE(slice.has_value());
  EXPECT_TRUE(buffer.mark_ready(*slice).is_ok());
  EXPECT_EQ(buffer.mark_ready(*slice).code(), Code::kInvalidArgument);
  buffer.seal();
  buffer.reset();
  EXPECT_FALSE(buffer.is_sealed());
  EXPECT_TRUE(buffer.contents().empty());
  ASSERT_TRUE(buffer.reserve(8).has_value());
  EXPECT_EQ(buffer.mark_ready(*slice).code(), Code::kInvalidArgument);
  EXPECT_FALSE(buffer.all_ready());
}

TEST(FusionBuffer, RefusesMemoryThatIsNotAligned) {
  Memory memory;
  EXPECT_THROW(FusionBuffer(std::span(memory.bytes).subspan(1)), Error);
  EXPECT_THROW(FusionBuffer(memory.bytes, 3), Error);
  EXPECT_THROW(FusionBuffer(memory.bytes, 0), Error);
  EXPECT_NO_THROW(FusionBuffer(std::span(memory.bytes).subspan(1), 1));
}

}  // namespace
}  // namespace herring
