// What ranks tell each other of tensors with different numbers of rows, and what they conclude: the same on all of
// them.
#include "collectives/rows.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace herring::collectives {
namespace {

using Numbers = std::vector<std::int64_t>;

std::string refusal(const Numbers& splits, std::int64_t rows, std::uint32_t size) {
  try {
    static_cast<void>(checked_splits(splits, rows, size));
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kInvalidArgument);
    return error.status().message();
  }
  return "";
}

TEST(Rows, SplitsAreTakenAsTheyAreWhereTheRowsSuffice) {
  EXPECT_EQ(checked_splits(Numbers{3, 0, 2}, 5, 3), (Numbers{3, 0, 2}));
  EXPECT_EQ(checked_splits(Numbers{1, 1}, 5, 2), (Numbers{1, 1})) << "the rest goes nowhere";
  EXPECT_EQ(checked_splits(Numbers{0, 0}, 0, 2), (Numbers{0, 0}));
}

TEST(Rows, WithoutSplitsEachRankGetsAsMany) {
  EXPECT_EQ(checked_splits(std::nullopt, 6, 3), (Numbers{2, 2, 2}));
  EXPECT_EQ(checked_splits(std::nullopt, 0, 3), (Numbers{0, 0, 0}));
  EXPECT_THROW(static_cast<void>(checked_splits(std::nullopt, 7, 3)), Error);
}

TEST(Rows, SplitsThatDoNotFitAreRefusedWithTheirValues) {
  const std::string told = refusal({1, 2, 3}, 5, 3);
  EXPECT_EQ(told, "alltoall: splits are [1, 2, 3]; there must be 3, none negative, with a sum of at most 5 rows");
  EXPECT_NE(refusal({1, 2}, 5, 3), "") << "too few";
  EXPECT_NE(refusal({1, 1, 1, 1}, 5, 3), "") << "too many";
  EXPECT_NE(refusal({-1, 2, 1}, 5, 3), "");
  EXPECT_NE(refusal({6, -1, 0}, 5, 3), "");
  constexpr std::int64_t kHalf = std::numeric_limits<std::int64_t>::max() / 2 + 1;
  EXPECT_NE(refusal({kHalf, kHalf, 1}, 5, 3), "") << "whose sum is no number";
}

TEST(Rows, SharedRowsAreAllGivenOnce) {
  for (const std::int64_t rows : {0, 1, 2, 5, 6, 7, 100}) {
    for (const std::uint32_t size : {1U, 2U, 3U, 7U}) {
      std::int64_t next = 0;
      for (std::uint32_t index = 0; index < size; ++index) {
        const auto [first, last] = rows_of(rows, size, index);
        EXPECT_EQ(first, next);
        EXPECT_GE(last - first, rows / size);
        EXPECT_LE(last - first, rows / size + 1);
        next = last;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

/// The tables of all members after they have told each other.
std::vector<RowTable> tables(const std::vector<std::vector<RowsSpec>>& tensors, const std::vector<Numbers>& splits) {
  std::vector<RowTable> made;
  const auto members = static_cast<std::uint32_t>(tensors.size());
  for (std::size_t member = 0; member < members; ++member) {
    made.emplace_back(tensors[member], splits.empty() ? Numbers() : splits[member], members);
  }
  for (RowTable& table : made) {
    auto to = table.all().begin();
    for (const RowTable& other : made) to = std::ranges::copy(other.mine(), to).out;
    EXPECT_EQ(to, table.all().end());
  }
  return made;
}

TEST(Rows, EachRankLearnsHowManyRowsTheOthersHave) {
  const auto all = tables(
      {{{DataType::kFloat32, {3, 2}}, {DataType::kInt8, {1}}}, {{DataType::kFloat32, {0, 2}}, {DataType::kInt8, {9}}}},
      {});
  for (const RowTable& table : all) {
    EXPECT_TRUE(table.check(std::vector<std::uint32_t>{0, 1}).is_ok());
    EXPECT_EQ(table.rows(0, 0), 3);
    EXPECT_EQ(table.rows(0, 1), 0);
    EXPECT_EQ(table.rows(1, 0), 1);
    EXPECT_EQ(table.rows(1, 1), 9);
  }
}

TEST(Rows, EachRankLearnsHowManyRowsComeToIt) {
  const auto all = tables({{{DataType::kFloat32, {5}}}, {{DataType::kFloat32, {7}}}}, {{2, 3}, {7, 0}});
  for (const RowTable& table : all) {
    EXPECT_EQ(table.rows_to(0, 0), 2);
    EXPECT_EQ(table.rows_to(0, 1), 3);
    EXPECT_EQ(table.rows_to(1, 0), 7);
    EXPECT_EQ(table.rows_to(1, 1), 0);
  }
}

TEST(Rows, AllRanksSayTheSameOfThoseThatDiffer) {
  const std::vector<std::uint32_t> ranks = {4, 6, 7};
  const RowsSpec usual{DataType::kFloat32, {3, 2}};
  const auto told = [&](const RowsSpec& odd) {
    std::string text;
    for (const RowTable& table : tables({{usual, usual}, {usual, odd}, {usual, usual}}, {})) {
      const Status status = table.check(ranks);
      EXPECT_EQ(status.is_ok() ? Code::kMismatch : status.code(), Code::kMismatch);
      EXPECT_TRUE(text.empty() || text == status.message());
      text = status.message();
    }
    return text;
  };
  EXPECT_EQ(told({DataType::kFloat32, {8, 2}}), "");
  EXPECT_EQ(told({DataType::kFloat32, {3, 5}}),
            "ranks disagree, and only the first dimension may differ: rank 4: float32[3, 2], rank 6: float32[3, 5]");
  EXPECT_NE(told({DataType::kFloat64, {3, 2}}), "");
  EXPECT_NE(told({DataType::kFloat32, {3}}), "");
  EXPECT_NE(told({DataType::kFloat32, {3, 2, 1}}), "");
}

TEST(Rows, AsManyDimensionsAsCanBeToldAreTold) {
  Numbers shape(RowTable::kMaxDims, 1);
  const auto table_of = [&] { return RowTable(std::vector<RowsSpec>{{DataType::kInt8, shape}}, {}, 1); };
  EXPECT_NO_THROW(table_of());
  shape.push_back(1);
  EXPECT_THROW(table_of(), Error);
  shape.clear();
  EXPECT_THROW(table_of(), Error);
}

}  // namespace
}  // namespace herring::collectives
