#include "core/store_choice.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>

namespace herring {
namespace {

constexpr std::size_t kBytes = 128 << 10;
constexpr Duration kFast = std::chrono::microseconds(10);  // 13 bytes a nanosecond
constexpr Duration kSlow = std::chrono::microseconds(62);  // 2

/// Writes as the choice says, streamed ones taking `streamed_take`, ordinary ones `elapsed`; how many of `count` were
/// streamed.
std::uint32_t streamed_of(StoreChoice& choice, std::uint32_t count, Duration elapsed, Duration streamed_take = kFast) {
  std::uint32_t streamed = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (choice.streams()) ++streamed;
    choice.on_written(kBytes, choice.streams() ? streamed_take : elapsed);
  }
  return streamed;
}

TEST(StoreChoice, KeepsOrdinaryStoresWhereTheyAreFast) {
  StoreChoice choice;
  EXPECT_EQ(streamed_of(choice, 10000, kFast), 0u);
}

TEST(StoreChoice, StreamsNearlyAllWhereOrdinaryStoresAreSlow) {
  StoreChoice choice;
  EXPECT_FALSE(choice.streams());
  EXPECT_GT(streamed_of(choice, 10000, kSlow), 9900u);
}

TEST(StoreChoice, KeepsOrdinaryStoresWhereStreamedOnesAreAsSlow) {
  // An Intel Xeon whose memory is busy.
  StoreChoice choice;
  EXPECT_LT(streamed_of(choice, 10000, kSlow, kSlow), 100u);
  // But for so long only.
  EXPECT_GT(streamed_of(choice, 10000, kSlow), 8800u);
}

TEST(StoreChoice, GoesBackWhenThreadsHaveMovedTogether) {
  StoreChoice choice;
  EXPECT_GT(streamed_of(choice, 10000, kSlow), 9900u);
  EXPECT_LE(streamed_of(choice, 10000, kFast), 1024u);
  // And is as quick as at first when they move apart again.
  EXPECT_GT(streamed_of(choice, 100, kSlow), 50u);
}

TEST(StoreChoice, AWriteThatWasInterruptedMeansNothing) {
  StoreChoice choice;
  for (int i = 0; i < 1000; ++i) {
    ASSERT_FALSE(choice.streams());
    choice.on_written(kBytes, i % 4 >= 2 ? kFast : std::chrono::milliseconds(3));
  }
}

TEST(StoreChoice, OneFastWriteDoesNotSpeakForTheOthers) {
  // A part whose readers happened to be on this very core.
  StoreChoice choice;
  for (int i = 0; i < 4; ++i) choice.on_written(kBytes, i == 1 ? kFast : kSlow);
  EXPECT_TRUE(choice.streams());
}

TEST(StoreChoice, AClockThatStandsStillIsFast) {
  StoreChoice choice;
  EXPECT_EQ(streamed_of(choice, 100, Duration{}), 0u);
}

}  // namespace
}  // namespace herring
