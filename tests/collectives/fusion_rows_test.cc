// What a user would lose: the copy that memory asked for by name saves, or the right sum where ranks have asked for
// different memory.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "collectives/fusion_group.h"

namespace herring::collectives {
namespace {

using namespace testing;

/// Tensors in a row of memory; every third one is large. Submitted from the last one on.
struct Row {
  static constexpr int kTensors = 12;
  TensorSpec specs[kTensors];
  std::uint64_t places[kTensors];
  static std::string name(int i) { return "row" + std::to_string(i); }

  Row() {
    std::uint64_t next = 64;
    for (int i = 0; i < kTensors; ++i) {
      specs[i] = spec(i % 3 == 0 ? 500'001 : 1001);
      places[i] = next;
      next = place_after(next, specs[i].descriptor.op_bytes);
    }
  }
  void submit(Group& group, std::size_t index, const std::set<int>& elsewhere = {}) const {
    for (int i = kTensors - 1; i >= 0; --i) {
      group.submit_placed(index, name(i), specs[i], places[i], !elsewhere.contains(i));
    }
  }
};

TEST(FusionEngine, WhatLiesInARowTravelsAsItLiesThereWhateverItsSize) {
  const Row row;
  Group group(3, 1);
  for (int step = 0; step < 4; ++step) {
    for (std::size_t index = 0; index < group.size(); ++index) {
      group.rank(index).batches.clear();
      group.rank(index).batches_ended = 0;
      row.submit(group, index);
    }
    group.flush();
    ASSERT_TRUE(group.run_until_idle());
  }
  const std::vector<std::vector<std::string>>& batches = group.rank(2).batches;
  ASSERT_EQ(batches.size(), 1u);
  ASSERT_EQ(batches[0].size(), static_cast<std::size_t>(Row::kTensors));
  for (int i = 0; i < Row::kTensors; ++i) {
    const std::string place = std::to_string(row.places[i] - row.places[0]);
    EXPECT_EQ(batches[0][static_cast<std::size_t>(i)], Row::name(i) + "#3@" + place);
  }
}

TEST(FusionEngine, ALargeTensorThatLiesElsewhereOnOneRankGoesAloneAtOnce) {
  const Row row;
  for (const std::size_t odd : {0u, 2u}) {
    Group group(3, 1);
    for (int step = 0; step < 4; ++step) {
      for (std::size_t index = 0; index < group.size(); ++index) {
        group.rank(index).batches.clear();
        group.rank(index).batches_ended = 0;
        row.submit(group, index, index == odd && step > 1 ? std::set<int>{6, 7} : std::set<int>{});
      }
      group.flush();
      const Instant begun = group.now();
      ASSERT_TRUE(group.run_until_idle());
      EXPECT_LT(group.now() - begun, 10ms) << "step " << step;
    }
    // The row is cut where it is not, and the small one by its side may still be copied.
    EXPECT_EQ(group.rank(1).batches.size(), 2u);
    EXPECT_EQ(group.rank(1).alone, 4u + 1 + 1) << "the large ones of the first step, and that one";
    EXPECT_EQ(group.rank(odd).fused, group.rank(1).fused);
  }
}

TEST(FusionEngine, OnlyRank0SaysWhatLiesInARow) {
  const Row row;
  Group group(2, 1);
  for (int step = 0; step < 3; ++step) {
    row.submit(group, 1);
    for (int i = 0; i < Row::kTensors; ++i) group.submit_placed(0, Row::name(i), row.specs[i], 0, false);
    group.flush();
    ASSERT_TRUE(group.run_until_idle());
  }
  EXPECT_EQ(group.rank(0).alone, 12u) << "every large one, in every step";
  EXPECT_EQ(group.rank(1).alone, 12u);
}

TEST(FusionEngine, NewMemoryForTheSameNamesIsLearned) {
  Row row;
  Group group(2, 1);
  for (int step = 0; step < 6; ++step) {
    for (std::size_t index = 0; index < group.size(); ++index) row.submit(group, index);
    group.flush();
    const Instant begun = group.now();
    ASSERT_TRUE(group.run_until_idle());
    EXPECT_LT(group.now() - begun, 10ms) << "step " << step;
    if (step == 2) {
      for (std::uint64_t& place : row.places) place += 1 << 30;
    }
  }
  EXPECT_EQ(group.rank(1).alone, 4u) << "the large ones of the first step";
  EXPECT_EQ(group.rank(1).batches.back().size(), static_cast<std::size_t>(Row::kTensors));
}

}  // namespace
}  // namespace herring::collectives
