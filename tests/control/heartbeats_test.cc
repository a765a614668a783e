#include "control/heartbeats.h"

#include <gtest/gtest.h>

#include <chrono>

/// What a user would lose: jobs that end because a process was busy or a machine was suspended, and jobs that hang
/// because nobody noticed a loss.
namespace herring::control {
namespace {

using namespace std::chrono_literals;

class HeartbeatsTest : public testing::Test {
 protected:
  /// Ticks whenever it is due; the named answer each ping. Returns who was silent.
  std::vector<ConnectionId> pass(Duration time, const std::vector<ConnectionId>& answering) {
    std::vector<ConnectionId> silent;
    const Instant until = now_ + time;
    while (heartbeats_.next_wakeup() <= until) {
      EXPECT_GT(heartbeats_.next_wakeup(), now_) << "nothing is due in the past";
      now_ = heartbeats_.next_wakeup();
      const auto due = heartbeats_.tick(now_);
      pings_ += due.ping ? 1 : 0;
      for (const ConnectionId id : due.silent) {
        silent.push_back(id);
        heartbeats_.forget(id);
      }
      for (const ConnectionId id : answering) heartbeats_.heard(id, now_);
    }
    now_ = until;
    return silent;
  }

  Instant now_{1h};
  Heartbeats heartbeats_{1s, 5s};
  int pings_ = 0;
};

TEST_F(HeartbeatsTest, WithoutAnybodyNothingIsDue) {
  EXPECT_EQ(heartbeats_.next_wakeup(), Instant::max());
  heartbeats_.watch(7, now_);
  heartbeats_.forget(7);
  EXPECT_EQ(heartbeats_.next_wakeup(), Instant::max());
  EXPECT_FALSE(heartbeats_.tick(now_ + 1h).ping);
}

TEST_F(HeartbeatsTest, WhoIsSilentIsFoundAtOnceWhoAnswersIsNot) {
  heartbeats_.watch(1, now_);
  heartbeats_.watch(2, now_);
  EXPECT_TRUE(pass(4900ms, {2}).empty());
  EXPECT_EQ(pings_, 4);
  EXPECT_EQ(pass(100ms, {2}), (std::vector<ConnectionId>{1}));
  EXPECT_TRUE(pass(1min, {2}).empty());
}

TEST_F(HeartbeatsTest, ThoseWhoWereNotForgottenAreSilentAgain) {
  heartbeats_.watch(1, now_);
  const auto first = heartbeats_.tick(now_ + 1s);
  EXPECT_TRUE(first.silent.empty());
  for (int i = 2; i < 5; ++i) heartbeats_.tick(now_ + i * 1s);
  EXPECT_EQ(heartbeats_.tick(now_ + 5s).silent.size(), 1u);
  EXPECT_EQ(heartbeats_.next_wakeup(), now_ + 6s);
  EXPECT_EQ(heartbeats_.tick(now_ + 6s).silent.size(), 1u);
}

TEST_F(HeartbeatsTest, WhereItDidNotRunItselfEverybodyHasAFreshPatience) {
  heartbeats_.watch(1, now_);
  now_ += 20s;
  const auto due = heartbeats_.tick(now_);
  EXPECT_TRUE(due.stalled);
  EXPECT_TRUE(due.silent.empty());
  EXPECT_TRUE(pass(4900ms, {}).empty());
  EXPECT_EQ(pass(100ms, {}), (std::vector<ConnectionId>{1}));
}

TEST_F(HeartbeatsTest, AWaitForTheFirstOneIsNoStall) {
  heartbeats_.watch(1, now_);
  heartbeats_.forget(1);
  now_ += 1h;
  heartbeats_.watch(2, now_);
  EXPECT_FALSE(heartbeats_.tick(now_).stalled);
  EXPECT_EQ(heartbeats_.next_wakeup(), now_ + 1s);
}

TEST_F(HeartbeatsTest, ManyArePingedLessOftenAndLostAsFast) {
  std::vector<ConnectionId> everybody;
  for (ConnectionId id = 1; id <= 7500; ++id) {
    heartbeats_.watch(id, now_);
    everybody.push_back(id);
  }
  EXPECT_TRUE(pass(60s, everybody).empty());
  EXPECT_NEAR(pings_, 40, 1) << "one in 1.5 s";
  everybody.pop_back();
  EXPECT_TRUE(pass(4s, everybody).empty());
  EXPECT_EQ(pass(2500ms, everybody), (std::vector<ConnectionId>{7500}));
  for (ConnectionId id = 1; id <= 6000; ++id) heartbeats_.forget(id);
  pings_ = 0;
  pass(60s, everybody);
  EXPECT_NEAR(pings_, 60, 1) << "as the setting says";
}

TEST_F(HeartbeatsTest, HoweverManyTheyArePingedBeforeTheyAreLost) {
  for (ConnectionId id = 1; id <= 100'000; ++id) heartbeats_.watch(id, now_);
  EXPECT_TRUE(pass(4900ms, {}).empty());
  EXPECT_EQ(pings_, 3);
  Heartbeats slow{4s, 5s};
  for (ConnectionId id = 1; id <= 100'000; ++id) slow.watch(id, now_);
  EXPECT_EQ(slow.next_wakeup(), now_ + 4s) << "not faster than the setting";
}

TEST_F(HeartbeatsTest, SignsOfLifeOfStrangersAreNothing) {
  heartbeats_.heard(9, now_);
  EXPECT_EQ(heartbeats_.next_wakeup(), Instant::max());
  EXPECT_EQ(heartbeats_.last_heard(9), Instant{});
}

}  // namespace
}  // namespace herring::control
