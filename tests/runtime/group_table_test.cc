#include "runtime/group_table.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/status.h"

namespace herring::runtime {
namespace {

constexpr GroupId kId{7};

GroupRoute route_of(std::vector<std::uint32_t> ranks) {
  GroupRoute route;
  route.ranks = std::move(ranks);
  return route;
}

HubEvent event_of(HubEvent::Kind kind, UsedGroup group, std::uint32_t rank, std::uint64_t calls = 0) {
  HubEvent event;
  event.kind = kind;
  event.member.role = Role::kWorker;
  event.member.rank = rank;
  event.group = group;
  event.calls = calls;
  event.reason = "enough";
  return event;
}

HubEvent left(UsedGroup group, std::uint32_t rank, std::uint64_t calls) {
  return event_of(HubEvent::Kind::kGroupLeft, group, rank, calls);
}

HubEvent aborted(UsedGroup group, std::uint32_t rank) { return event_of(HubEvent::Kind::kGroupAborted, group, rank); }

TEST(GroupTable, AnEventFindsTheGroupThatItIsAbout) {
  GroupTable table;
  ASSERT_TRUE(table.add(kId, route_of({0, 1})));
  EXPECT_FALSE(table.add(kId, route_of({0, 1})));
  EXPECT_EQ(table.find(left({kId, 0}, 1, 3)), table.find(kId));
  EXPECT_EQ(table.find(GroupId{8}), nullptr);
}

TEST(GroupTable, WhatCameEarlyIsKnownToTheGroup) {
  GroupTable table;
  EXPECT_EQ(table.find(left({kId, 0}, 1, 3)), nullptr);
  EXPECT_EQ(table.find(left({kId, 0}, 5, 4)), nullptr);  // Not in it: never counts.
  ASSERT_TRUE(table.add(kId, route_of({0, 1})));
  const auto group = table.find(kId);
  ASSERT_EQ(group->left.size(), 1u);
  EXPECT_EQ(group->left[0].calls, 3u);
  EXPECT_NE(group->left[0].text.find("1"), std::string::npos) << group->left[0].text;
  EXPECT_TRUE(group->closed.is_ok());
}

TEST(GroupTable, AnEarlyAbortClosesTheGroup) {
  GroupTable table;
  EXPECT_EQ(table.find(aborted({kId, 0}, 1)), nullptr);
  ASSERT_TRUE(table.add(kId, route_of({0, 1})));
  EXPECT_EQ(table.find(kId)->closed.code(), Code::kCancelled);
  EXPECT_NE(table.find(kId)->closed.message().find("enough"), std::string::npos);
}

TEST(GroupTable, EventsOfAnotherUseOfTheIdAreNotForThisOne) {
  GroupTable table;
  ASSERT_TRUE(table.add(kId, route_of({0, 1})));
  EXPECT_EQ(table.find(aborted({kId, 1}, 1)), nullptr);  // Rank 1 is one use ahead.
  EXPECT_TRUE(table.find(kId)->closed.is_ok());
  ASSERT_TRUE(table.remove(kId));
  EXPECT_FALSE(table.remove(kId));
  EXPECT_EQ(table.find(aborted({kId, 0}, 1)), nullptr);  // Too late: this use is over.
  ASSERT_TRUE(table.add(kId, route_of({0, 1})));
  EXPECT_EQ(table.find(kId)->use, 1u);
  EXPECT_FALSE(table.find(kId)->closed.is_ok());
  ASSERT_TRUE(table.remove(kId));
  ASSERT_TRUE(table.add(kId, route_of({0, 1})));
  EXPECT_TRUE(table.find(kId)->closed.is_ok());
}

TEST(GroupTable, WhatNobodyAsksForTakesLittle) {
  GroupTable table;
  for (std::uint32_t id = 1; id <= GroupTable::kMaxEarly + 1; ++id) table.find(aborted({GroupId{id}, 0}, 1));
  ASSERT_TRUE(table.add(GroupId{1}, route_of({0, 1})));
  EXPECT_TRUE(table.find(GroupId{1})->closed.is_ok());  // The oldest made room.
  ASSERT_TRUE(table.add(GroupId{2}, route_of({0, 1})));
  EXPECT_FALSE(table.find(GroupId{2})->closed.is_ok());
}

}  // namespace
}  // namespace herring::runtime
