#include "elastic/cutoff.h"

#include <gtest/gtest.h>

#include <vector>

namespace herring::elastic {
namespace {

constexpr std::uint64_t kWeight = 7;  // Hashes of names.
constexpr std::uint64_t kBias = 8;

Summary of(std::vector<GroupRecord> groups) {
  Summary summary;
  summary.groups = std::move(groups);
  return summary;
}

Record numbered(std::uint32_t group, std::uint64_t key) {
  Record record;
  record.id = {group, key};
  return record;
}

Record named(std::uint32_t group, std::uint64_t name, std::uint64_t use) {
  Record record;
  record.id = {group, 0};
  record.name = name;
  record.use = use;
  return record;
}

/// One has called two without a name, another three uses of "weight".
Cutoff cutoff() {
  return Cutoff(std::vector<Summary>{of({{0, 2, {{kWeight, 1}}}, {5, 1, {}}}), of({{0, 1, {{kWeight, 3}}}})},
                [](std::uint32_t group) { return group == 0; });
}

TEST(ElasticCutoff, WithoutASwitchNothingGoesThroughTheGenerationBefore) {
  EXPECT_FALSE(Cutoff().covers(numbered(0, 0)));
  EXPECT_TRUE(Cutoff().is_passed({}));
}

TEST(ElasticCutoff, WhatAnyWorkerHadSubmittedGoesThroughItOnAll) {
  EXPECT_TRUE(cutoff().covers(numbered(0, 1)));
  EXPECT_FALSE(cutoff().covers(numbered(0, 2)));
  EXPECT_TRUE(cutoff().covers(named(0, kWeight, 2)));
  EXPECT_FALSE(cutoff().covers(named(0, kWeight, 3)));
  EXPECT_FALSE(cutoff().covers(named(0, kBias, 0)));
  EXPECT_FALSE(cutoff().covers(numbered(5, 0))) << "a group that this worker does not know";
}

TEST(ElasticCutoff, ItIsPassedWhenThisWorkerHasSubmittedAllOfIt) {
  EXPECT_FALSE(cutoff().is_passed({{0, {0, 2, {{kWeight, 2}}}}}));
  EXPECT_FALSE(cutoff().is_passed({{0, {0, 1, {{kWeight, 3}}}}}));
  EXPECT_FALSE(cutoff().is_passed({{0, {0, 2, {}}}}));
  EXPECT_TRUE(cutoff().is_passed({{0, {0, 2, {{kWeight, 3}}}}}));
  EXPECT_TRUE(cutoff().is_passed({{0, {0, 9, {{kWeight, 3}, {kBias, 1}}}}}));
  EXPECT_TRUE(cutoff().is_passed({})) << "the group was removed";
}

}  // namespace
}  // namespace herring::elastic
