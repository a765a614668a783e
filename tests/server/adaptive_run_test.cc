#include "server/adaptive_run.h"

#include <gtest/gtest.h>

namespace herring::server {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::uint32_t kFew = 16;
constexpr std::uint32_t kMany = 1000;

/// A lane that always has more to wait for.
struct Busy {
  AdaptiveRun run{8, milliseconds(1)};
  Instant now{};
  void complete(int times, Duration each_chunk) {
    for (int i = 0; i < times; ++i) {
      const std::uint32_t chunks = run.size(kFew);
      now += each_chunk * chunks;
      run.on_complete(now, now - each_chunk * chunks - milliseconds(10), chunks);
    }
  }
};

TEST(AdaptiveRun, ChunksGoOneByOneUntilSomethingIsKnown) {
  Busy lane;
  EXPECT_EQ(lane.run.size(kMany), 1u);
  lane.complete(3, microseconds(1));
  EXPECT_EQ(lane.run.size(kMany), 1u);
}

TEST(AdaptiveRun, AMessageTakesAboutTheTimeThatIsAimedAt) {
  Busy lane;
  lane.complete(50, milliseconds(5));
  EXPECT_EQ(lane.run.size(kMany), 1u) << "200 Mbit/s";
  lane.complete(200, microseconds(400));
  EXPECT_EQ(lane.run.size(kFew), 2u);
  lane.complete(200, microseconds(200));
  EXPECT_EQ(lane.run.size(kFew), 4u);
  lane.complete(200, microseconds(10));
  EXPECT_EQ(lane.run.size(kFew), 8u) << "the most";
  lane.complete(200, milliseconds(5));
  EXPECT_EQ(lane.run.size(kFew), 1u) << "the link has become slow";
}

TEST(AdaptiveRun, IsASmallPartOfALargeOperationOrHalfOfASmallOne) {
  Busy lane;
  lane.complete(200, microseconds(400));
  EXPECT_EQ(lane.run.size(kMany), 8u) << "3.2 ms of 400 ms";
  EXPECT_EQ(lane.run.size(128), 8u);
  EXPECT_EQ(lane.run.size(64), 4u) << "a sixteenth: chunks are fast";
  EXPECT_EQ(lane.run.size(kFew), 2u);
  lane.complete(200, milliseconds(2));
  EXPECT_EQ(lane.run.size(64), 2u) << "a thirty-second: they are not";
  lane.complete(200, microseconds(10));
  EXPECT_EQ(lane.run.size(5), 2u);
  EXPECT_EQ(lane.run.size(1), 1u);
  EXPECT_EQ(lane.run.size(0), 1u);
}

TEST(AdaptiveRun, IdleTimeIsNotTheLinks) {
  Busy lane;
  lane.complete(100, microseconds(50));
  EXPECT_EQ(lane.run.size(kFew), 8u);
  for (int i = 0; i < 100; ++i) {
    lane.now += milliseconds(100);  // Nothing to do; then one, granted since.
    lane.run.on_complete(lane.now, lane.now - milliseconds(1), 1);
  }
  EXPECT_EQ(lane.run.size(kFew), 8u);
}

TEST(AdaptiveRun, WhereTheLaneWaitsForACoreChunksAreNotSlowBecauseOfTheLink) {
  Busy lane;
  lane.complete(50, milliseconds(5));
  lane.run.on_core_wait(0.25);
  EXPECT_EQ(lane.run.size(kFew), 1u) << "other programs have a core now and then";
  lane.run.on_core_wait(0.5);
  EXPECT_EQ(lane.run.size(kFew), 8u) << "few messages: half of the operation";
  EXPECT_EQ(lane.run.size(kMany), 8u) << "the most";
  EXPECT_EQ(lane.run.size(8), 4u);
  lane.run.on_core_wait(0.1);
  EXPECT_EQ(lane.run.size(kFew), 1u);
}

}  // namespace
}  // namespace herring::server
