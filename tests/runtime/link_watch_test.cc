#include "runtime/link_watch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <vector>

namespace herring::runtime {
namespace {

using namespace std::chrono_literals;

/// A watch under virtual time, whose peers answer at once or not at all.
class Bench {
 public:
  explicit Bench(std::vector<PeerId> all, bool asks_others = true) : watch(LinkWatch::Options{8s, asks_others}, all) {}

  /// Looks whenever it is due until then.
  void pass(Duration time, const std::vector<PeerId>& awaited) {
    const Instant until = now + time;
    while (std::max(now, watch.next_look()) <= until) {
      now = std::max(now, watch.next_look());
      look(awaited);
    }
    now = until;
  }
  void look(const std::vector<PeerId>& awaited) {
    for (const PeerId peer : watch.look(now, awaited, [this](PeerId other) { return heard[other]; })) {
      ++questions[peer];
      if (is_stuck) continue;
      watch.asked(now, peer);
      if (std::find(mute.begin(), mute.end(), peer) == mute.end()) heard[peer] = now + 1ms;
    }
    Unreachable found = watch.take_unreachable();
    if (!found.peers.empty()) reports.push_back(std::move(found));
  }

  LinkWatch watch;
  Instant now = Instant{} + 100s;
  std::map<PeerId, Instant> heard;
  std::map<PeerId, int> questions;
  std::vector<PeerId> mute;
  bool is_stuck = false;  // Questions do not leave.
  std::vector<Unreachable> reports;
};

const PeerId kA{1}, kB{2}, kC{3};

TEST(LinkWatch, WhoAnswersIsNeverReportedHoweverLongItIsAwaited) {
  Bench bench({kA, kB});
  bench.pass(3600s, {kA, kB, kA});
  EXPECT_TRUE(bench.reports.empty());
  EXPECT_NEAR(bench.questions[kA], 3600 / 4, 200) << "once each half of the patience";
}

TEST(LinkWatch, WhoIsHeardOrNotAwaitedIsNotAsked) {
  Bench bench({kA, kB});
  for (int i = 0; i < 100; ++i) {
    bench.heard[kA] = bench.now;
    bench.pass(1s, {kA});
  }
  EXPECT_TRUE(bench.questions.empty());
}

TEST(LinkWatch, AMutePeerIsReportedWithinTwicePatienceAndAgain) {
  Bench bench({kA, kB, kC});
  bench.mute = {kB};
  bench.pass(11s, {kA, kB});
  EXPECT_TRUE(bench.reports.empty()) << "half of the patience before the question, all of it after";
  bench.pass(4s, {kA, kB});
  ASSERT_EQ(bench.reports.size(), 1u);
  EXPECT_EQ(bench.reports[0].peers, std::vector{kB});
  EXPECT_EQ(bench.reports[0].of, 3u) << "the one that nothing is awaited from was asked as well";
  EXPECT_EQ(bench.reports[0].answering, 2u);
  EXPECT_GE(bench.reports[0].silent, 12s);
  bench.pass(9s, {kA, kB});
  EXPECT_EQ(bench.reports.size(), 2u);
}

TEST(LinkWatch, WhoReachesNobodyReportsThemAllTogether) {
  Bench bench({kA, kB, kC});
  bench.mute = {kA, kB, kC};
  bench.pass(15s, {kB});
  ASSERT_EQ(bench.reports.size(), 1u);
  EXPECT_EQ(bench.reports[0].peers, std::vector{kB}) << "the others have not had all of the time";
  EXPECT_EQ(bench.reports[0].of, 3u);
  EXPECT_EQ(bench.reports[0].answering, 0u);
}

TEST(LinkWatch, OthersAreLeftAloneWhereNotToBeAsked) {
  Bench bench({kA, kB}, false);
  bench.mute = {kA};
  bench.pass(15s, {kA});
  ASSERT_EQ(bench.reports.size(), 1u);
  EXPECT_EQ(bench.reports[0].of, 1u);
  EXPECT_EQ(bench.questions.count(kB), 0u);
}

TEST(LinkWatch, TimeInWhichThisProcessWasStoppedIsNoSilence) {
  Bench bench({kA, kB});
  bench.mute = {kB};
  bench.pass(5s, {kB});
  ASSERT_EQ(bench.questions[kB], 1);
  bench.now += 600s;  // Stopped. What was sent meanwhile is delivered only now.
  bench.look({kB});
  EXPECT_TRUE(bench.reports.empty());
  bench.heard[kB] = bench.now;
  bench.mute.clear();
  bench.pass(100s, {kB});
  EXPECT_TRUE(bench.reports.empty());
}

TEST(LinkWatch, AQuestionThatCouldNotLeaveAccusesNobody) {
  Bench bench({kA});
  bench.is_stuck = true;
  bench.pass(100s, {kA});
  EXPECT_TRUE(bench.reports.empty());
}

TEST(LinkWatch, ALinkThatComesBackInTimeIsForgiven) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    Bench bench({kA, kB});
    bench.pass(Duration(random() % 10'000'000'000), {kA, kB});
    bench.mute = {kA};
    bench.pass(Duration(random() % 7'999'999'999ll), {kA, kB});
    bench.mute.clear();
    bench.heard[kA] = bench.now;  // What was on its way arrives.
    bench.pass(60s, {kA, kB});
    EXPECT_TRUE(bench.reports.empty()) << "round " << round;
  }
}

TEST(LinkWatch, WhoIsKnownAsGoneIsNotAskedAnyMore) {
  Bench bench({kA, kB});
  bench.mute = {kA};
  bench.pass(6s, {kA, kB});
  bench.watch.forget(kA);
  bench.pass(60s, {kA, kB});
  EXPECT_TRUE(bench.reports.empty());
}

}  // namespace
}  // namespace herring::runtime
