#include "runtime/local_writes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace herring::runtime {
namespace {

constexpr std::size_t kElements = 20000;  // More than StoreChoice::kLeastBytes, and no multiple of a cache line.

std::vector<float> counting(float first) {
  std::vector<float> values(kElements);
  for (std::size_t i = 0; i < kElements; ++i) values[i] = first + static_cast<float>(i % 1000);
  return values;
}

StoreChoice streaming() {
  StoreChoice choice;
  while (!choice.streams()) choice.on_written(StoreChoice::kLeastBytes, std::chrono::seconds(1));
  return choice;
}

/// Both ways of writing must leave the same bytes.
class LocalWritesTest : public testing::TestWithParam<bool> {
 protected:
  LocalWrites writes_{server::best_isa(), GetParam() ? streaming() : StoreChoice{}};
};

INSTANTIATE_TEST_SUITE_P(Streams, LocalWritesTest, testing::Bool());

TEST_P(LocalWritesTest, CopiesForOthers) {
  const std::vector<float> from = counting(7);
  std::vector<float> to(kElements);
  writes_.copy({.from = std::as_bytes(std::span(from)).subspan(4),
                .to = std::as_writable_bytes(std::span(to)).subspan(4),
                .for_others = true});
  EXPECT_EQ(to.front(), 0);
  EXPECT_TRUE(std::equal(from.begin() + 1, from.end(), to.begin() + 1));
}

TEST_P(LocalWritesTest, SumsIntoOwnMemoryAndForOthers) {
  std::vector<float> own = counting(1);
  const std::vector<float> theirs = counting(1000);
  std::vector<float> neighbour(kElements);
  std::vector<float> staging(kElements);
  intra_node::ReduceLocal sum{{DataType::kFloat32, ReduceOp::kSum, 1}, {}, {}};
  sum.inputs = {std::as_bytes(std::span(own)), std::as_bytes(std::span(theirs))};
  sum.outputs = {std::as_writable_bytes(std::span(own)), std::as_writable_bytes(std::span(neighbour)),
                 std::as_writable_bytes(std::span(staging))};
  sum.last_for_others = true;
  writes_.reduce(sum);
  for (std::size_t i = 0; i < kElements; ++i) {
    ASSERT_EQ(own[i], 1001 + 2 * static_cast<float>(i % 1000)) << i;
  }
  EXPECT_EQ(neighbour, own);
  EXPECT_EQ(staging, own);
}

TEST_P(LocalWritesTest, WhatIsSmallIsNeverStreamed) {
  bool streamed = true;
  writes_.for_others(StoreChoice::kLeastBytes - 1, [&](bool streams) { streamed = streams; });
  EXPECT_FALSE(streamed);
  writes_.for_others(StoreChoice::kLeastBytes, [&](bool streams) { streamed = streams; });
  EXPECT_EQ(streamed, GetParam());
}

}  // namespace
}  // namespace herring::runtime
