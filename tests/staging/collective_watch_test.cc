#include "staging/collective_watch.h"

#include <gtest/gtest.h>

namespace herring::staging {
namespace {

using namespace std::chrono_literals;

constexpr Instant at(Duration since) { return Instant{} + 1h + since; }
constexpr Instant kNever = Instant::max();

class CollectiveWatchTest : public ::testing::Test {
 protected:
  WatchActions advance(Duration since) {
    WatchActions actions;
    watch_.advance(at(since), actions);
    return actions;
  }
  void expect_asks(const WatchActions& actions) {
    ASSERT_EQ(actions.size(), 1u);
    EXPECT_TRUE(std::holds_alternative<AskOthers>(actions[0]));
  }
  void expect_gives_up(const WatchActions& actions, Code code) {
    ASSERT_EQ(actions.size(), 1u);
    ASSERT_TRUE(std::holds_alternative<GiveUp>(actions[0]));
    EXPECT_EQ(std::get<GiveUp>(actions[0]).why.code(), code);
  }

  CollectiveWatch watch_{{.patience = 1s, .grace = 2s}};
};

TEST_F(CollectiveWatchTest, WhatEndsSoonIsNotAskedAbout) {
  watch_.begin(7, at(0s), kNever);
  EXPECT_TRUE(advance(999ms).empty());
  watch_.end(7);
  EXPECT_TRUE(advance(1h).empty());
}

TEST_F(CollectiveWatchTest, AsksOnceAndAgainAfterAnAnswer) {
  watch_.begin(7, at(0s), kNever);
  watch_.begin(8, at(500ms), kNever);
  expect_asks(advance(1s));
  EXPECT_TRUE(advance(10s).empty()) << "one question at a time";
  watch_.on_answer(Status::ok(), at(10s));
  EXPECT_TRUE(advance(10900ms).empty());
  expect_asks(advance(11s));
}

TEST_F(CollectiveWatchTest, WhoIsGoneLeavesTheOthersALittleTime) {
  watch_.begin(7, at(0s), kNever);
  expect_asks(advance(1s));
  watch_.on_answer({Code::kPeerLost, "worker 1 has left"}, at(5s));
  EXPECT_TRUE(advance(6900ms).empty());
  expect_gives_up(advance(7s), Code::kPeerLost);
  EXPECT_TRUE(advance(8s).empty()) << "once";
}

TEST_F(CollectiveWatchTest, WhatTheLibrarySaysIsTheReasonWhereNobodyIsGone) {
  watch_.begin(7, at(0s), kNever);
  watch_.on_health({Code::kTransport, "a link is broken"}, at(10ms));
  expect_asks(advance(10ms));
  EXPECT_TRUE(advance(1s).empty()) << "one question at a time";
  watch_.on_answer(Status::ok(), at(1s));
  EXPECT_TRUE(advance(1500ms).empty()) << "asked already";
  expect_gives_up(advance(2010ms), Code::kTransport);
  EXPECT_TRUE(advance(3s).empty()) << "once";
}

TEST_F(CollectiveWatchTest, ARankThatHasDiedIsTheBetterReason) {
  watch_.begin(7, at(0s), kNever);
  watch_.on_health({Code::kTransport, "a link is broken"}, at(10ms));
  expect_asks(advance(10ms));
  watch_.on_answer({Code::kPeerLost, "worker 1 has died"}, at(20ms));
  expect_gives_up(advance(20ms), Code::kPeerLost);
}

TEST_F(CollectiveWatchTest, WhatBeginsAfterAnEndHasTheSameTime) {
  watch_.begin(7, at(0s), kNever);
  expect_asks(advance(1s));
  watch_.on_answer({Code::kPeerLost, "worker 1 has left"}, at(2s));
  watch_.end(7);
  EXPECT_TRUE(advance(10s).empty());
  watch_.begin(8, at(20s), kNever);
  EXPECT_TRUE(advance(21900ms).empty());
  expect_gives_up(advance(22s), Code::kPeerLost);
}

TEST_F(CollectiveWatchTest, ADeadlineEndsItWhateverTheOthersSay) {
  watch_.begin(7, at(0s), kNever);
  watch_.begin(8, at(0s), at(300ms));
  EXPECT_TRUE(advance(299ms).empty());
  expect_gives_up(advance(300ms), Code::kTimeout);
}

}  // namespace
}  // namespace herring::staging
