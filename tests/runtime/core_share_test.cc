#include "runtime/core_share.h"

#include <gtest/gtest.h>

#include <chrono>

namespace herring::runtime {
namespace {

using namespace std::chrono_literals;

struct Clock {
  void yields(Duration takes) {
    share.on_yield(now, now + takes);
    now += takes;
  }
  /// For how long nobody yields any more.
  Duration rest() const {
    Duration rest{};
    while (share.is_wanted(now + rest)) rest += 1ms;
    return rest;
  }

  CoreShare share;
  Instant now{1h};
};

TEST(CoreShare, RanksThatTakeTurnsMayGoOn) {
  Clock clock;
  EXPECT_EQ(clock.rest(), 0ms);
  for (int i = 0; i < 100; ++i) clock.yields(500us);
  EXPECT_EQ(clock.rest(), 0ms);
}

TEST(CoreShare, WhereAYieldTakesLongThreadsSleepAndLongerEachTime) {
  Clock clock;
  clock.yields(4ms);
  EXPECT_EQ(clock.rest(), 20ms);
  clock.now += 20ms;
  clock.yields(1us);
  clock.yields(4ms);
  EXPECT_EQ(clock.rest(), 40ms);
  for (int i = 0; i < 20; ++i) {
    clock.now += clock.rest();
    clock.yields(4ms);
  }
  EXPECT_EQ(clock.rest(), 1s);
}

TEST(CoreShare, ManyYieldsThatTakeNoTimeEndThat) {
  Clock clock;
  for (int i = 0; i < 4; ++i) clock.yields(4ms);
  clock.now += clock.rest();
  for (int i = 0; i < 1001; ++i) clock.yields(1us);
  clock.yields(4ms);
  EXPECT_EQ(clock.rest(), 20ms);
}

}  // namespace
}  // namespace herring::runtime
