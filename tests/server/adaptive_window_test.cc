#include "server/adaptive_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>

namespace herring::server {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr double kOften = 0.5;  // A thread waits for its core.

AdaptiveWindow after_two_alone(AdaptiveWindow window, std::uint32_t chunks) {
  for (int i = 0; i < 2; ++i) window.on_ready(chunks, false);
  return window;
}

/// Of a lane inside a worker, where operations of so many chunks come one by one.
AdaptiveWindow one_by_one(std::uint32_t chunks) { return after_two_alone(AdaptiveWindow(false, 4, 12), chunks); }

/// Of a lane apart from the workers, where small operations come one by one.
AdaptiveWindow apart(std::uint32_t first, std::uint32_t most) {
  return after_two_alone(AdaptiveWindow(true, first, most), 1);
}

void complete(AdaptiveWindow& window, int chunks, Duration each) {
  for (int i = 0; i < chunks; ++i) window.on_complete(each, 1);
}

/// Of a small operation.
std::uint32_t size(const AdaptiveWindow& window) { return window.size(1); }

/// It grows while chunks take less than 20 ms, rests, and shrinks from 30 ms on, down to what it was at first: of 4
/// to 12.
void expect_long_queue(AdaptiveWindow& window) {
  complete(window, 1, microseconds(100));
  complete(window, 1000, milliseconds(10));
  EXPECT_EQ(size(window), 12u);
  complete(window, 1000, milliseconds(25));
  EXPECT_EQ(size(window), 12u);
  complete(window, 1000, milliseconds(100));
  EXPECT_EQ(size(window), 4u);
}

TEST(AdaptiveWindow, GrowsWhileChunksAreQuickAndStopsAtItsLimit) {
  AdaptiveWindow window = apart(4, 12);
  EXPECT_EQ(size(window), 4u);
  complete(window, 3, microseconds(100));
  EXPECT_EQ(size(window), 4u) << "a window's worth of chunks is not complete";
  complete(window, 1, microseconds(100));
  EXPECT_EQ(size(window), 5u);
  complete(window, 1000, microseconds(100));
  EXPECT_EQ(size(window), 12u);
}

TEST(AdaptiveWindow, ShrinksToOneChunkWhereChunksOnlyWaitInQueues) {
  AdaptiveWindow window = apart(4, 12);
  complete(window, 1, microseconds(300));
  complete(window, 3, milliseconds(2));
  EXPECT_EQ(size(window), 3u);
  complete(window, 1000, milliseconds(2));
  EXPECT_EQ(size(window), 1u);
}

TEST(AdaptiveWindow, WhereSeveralOperationsAreUnderWayItAimsAtTheLongerTime) {
  for (const bool are_apart : {false, true}) {
    AdaptiveWindow window(are_apart, 4, 12);
    for (int i = 0; i < 5; ++i) window.on_ready(8, i % 2 == 1);
    expect_long_queue(window);
  }
}

/// The first bucket of a training step is alone until the next one comes.
TEST(AdaptiveWindow, OneOperationAloneAfterSeveralIsNotYetOneByOne) {
  AdaptiveWindow window(false, 4, 12);
  complete(window, 1, microseconds(300));
  complete(window, 1000, milliseconds(10));
  for (int step = 0; step < 3; ++step) {
    window.on_ready(8, false);
    EXPECT_EQ(size(window), 12u);
    window.on_ready(8, true);
    EXPECT_EQ(size(window), 12u);
  }
  window.on_ready(8, false);
  EXPECT_EQ(size(window), 12u);
  window.on_ready(8, false);
  EXPECT_EQ(size(window), 1u);
  window.on_ready(8, true);
  EXPECT_EQ(size(window), 12u);
}

TEST(AdaptiveWindow, OneByOneAnEighthOfAnOperationMayBeInFlightAndASixteenthOfALargeOne) {
  AdaptiveWindow window = one_by_one(160);
  complete(window, 1, microseconds(300));
  complete(window, 1000, milliseconds(10));
  EXPECT_EQ(window.size(15), 1u);
  EXPECT_EQ(window.size(32), 4u);
  EXPECT_EQ(window.size(64), 4u);
  EXPECT_EQ(window.size(80), 5u);
  EXPECT_EQ(window.size(160), 10u);
  EXPECT_EQ(window.size(256), 11u) << "it had to be more than 10 at no time";
  EXPECT_EQ(window.size(10'000), 12u) << "a 32nd in any case, up to the most";
}

TEST(AdaptiveWindow, OneByOneAnEighthThatTakesTooLongBecomesLess) {
  AdaptiveWindow window(false, 4, 40);
  complete(window, 1, microseconds(300));
  complete(window, 2000, milliseconds(10));
  ASSERT_EQ(size(window), 40u);
  for (int i = 0; i < 2; ++i) window.on_ready(160, false);
  EXPECT_EQ(window.size(160), 10u);
  complete(window, 80, milliseconds(40));
  EXPECT_LE(window.size(160), 9u) << "what was not used before is given up at once";
  complete(window, 1000, milliseconds(40));
  EXPECT_EQ(window.size(80), 4u) << "what it had at first";
  EXPECT_EQ(window.size(320), 10u) << "a 32nd in any case";
  window.on_ready(16, false);
  EXPECT_EQ(window.size(16), 2u);
}

TEST(AdaptiveWindow, OneByOneWhereCoresAreWaitedForTheQueueIsLong) {
  AdaptiveWindow window(false, 4, 12);
  complete(window, 1, microseconds(300));
  complete(window, 1000, milliseconds(10));
  for (int i = 0; i < 2; ++i) window.on_ready(8, false);
  EXPECT_EQ(window.size(8), 1u);
  window.on_core_wait(kOften);
  EXPECT_EQ(window.size(8), 12u);
  window.on_core_wait(0);
  EXPECT_EQ(window.size(8), 1u);
}

TEST(AdaptiveWindow, OneByOneOnAFastLinkItGrows) {
  AdaptiveWindow window = one_by_one(8);
  complete(window, 1000, microseconds(300));
  EXPECT_EQ(window.size(8), 12u);
}

TEST(AdaptiveWindow, LetsASmallPartOfALargeOperationBeInFlight) {
  AdaptiveWindow window = apart(4, 12);
  complete(window, 1, microseconds(300));
  complete(window, 1000, milliseconds(2));
  EXPECT_EQ(window.size(63), 1u);
  EXPECT_EQ(window.size(64), 2u);
  EXPECT_EQ(window.size(320), 10u);
  EXPECT_EQ(window.size(10'000), 12u);
}

TEST(AdaptiveWindow, OnALongWayThatManyAreInFlightAsFitOnIt) {
  AdaptiveWindow window = apart(4, 12);
  complete(window, 1000, milliseconds(40));
  EXPECT_EQ(size(window), 12u) << "none takes longer than the quickest: none waits";
}

TEST(AdaptiveWindow, RestsInBetweenAndGoesByTheMean) {
  AdaptiveWindow window = apart(4, 12);
  complete(window, 1, milliseconds(1));
  complete(window, 1, microseconds(3400));  // One late chunk of four: 1.75 ms on average.
  complete(window, 2, microseconds(1300));
  EXPECT_EQ(size(window), 4u);
}

TEST(AdaptiveWindow, ForgetsAQuickerWayThatTheNetworkHadLongAgo) {
  AdaptiveWindow window = apart(4, 12);
  complete(window, 4, microseconds(100));
  complete(window, 2000, milliseconds(5));
  EXPECT_EQ(size(window), 1u);
  complete(window, 5000, milliseconds(5));
  EXPECT_EQ(size(window), 12u);
}

TEST(AdaptiveWindow, WhereCoresAreWaitedForItAimsAtALongerTimeAndKeepsItsShare) {
  AdaptiveWindow window = apart(4, 12);
  window.on_core_wait(kOften);
  expect_long_queue(window);
}

TEST(AdaptiveWindow, WhereCoresAreWaitedForLaterItGrowsAgain) {
  AdaptiveWindow window = apart(4, 12);
  complete(window, 1, microseconds(100));
  complete(window, 1000, milliseconds(10));
  EXPECT_EQ(size(window), 1u);
  window.on_core_wait(kOften);
  complete(window, 100, milliseconds(100));
  EXPECT_EQ(size(window), 4u) << "too long already: not more than at first";
  complete(window, 1000, milliseconds(10));
  EXPECT_EQ(size(window), 12u);
}

/// Lanes do not go to and fro where they wait about as often as not.
TEST(AdaptiveWindow, TheMoreCoresAreWaitedForTheMoreOfTheLongQueueIsUsed) {
  for (const bool are_apart : {false, true}) {
    AdaptiveWindow window(are_apart, 4, 41);
    window.on_core_wait(kOften);
    complete(window, 1, microseconds(300));
    complete(window, 4000, milliseconds(10));
    for (int i = 0; i < 2; ++i) window.on_ready(8, false);
    EXPECT_EQ(window.size(8), 41u);
    window.on_core_wait(0);
    EXPECT_EQ(window.size(8), 1u);
    std::uint32_t before = 1;
    for (int percent = 1; percent <= 50; ++percent) {
      window.on_core_wait(percent / 100.0);
      const std::uint32_t now = window.size(8);
      EXPECT_GE(now, before) << percent;
      EXPECT_LE(now, before + 3) << percent << " %: of 40 chunks a hundredth of the time brings two";
      before = now;
    }
    EXPECT_EQ(before, 41u);
    window.on_core_wait(are_apart ? 0.35 : 0.25);
    EXPECT_EQ(window.size(8), 21u);
  }
}

/// From 100 Mbit/s to 100 Gbit/s, and ways of 20 us to 20 ms.
TEST(AdaptiveWindow, FillsEveryLinkAndLetsLittleWaitInQueues) {
  constexpr double kChunkBytes = 32 << 10;
  constexpr std::uint32_t kMost = 64;
  for (double bytes_per_second = 12.5e6; bytes_per_second < 13e9; bytes_per_second *= 2) {
    for (const double round_trip : {20e-6, 200e-6, 2e-3, 20e-3}) {
      AdaptiveWindow window = apart(4, kMost);
      const double alone = round_trip + kChunkBytes / bytes_per_second;
      double took = alone;
      for (int chunk = 0; chunk < 20'000; chunk += static_cast<int>(size(window))) {
        const double queued = size(window) * kChunkBytes / bytes_per_second;
        took = std::max(alone, queued);
        window.on_complete(std::chrono::nanoseconds(std::llround(alone * 1e9)), 1);  // The first finds no queue.
        const std::uint32_t others = size(window) - 1;
        if (others > 0) window.on_complete(std::chrono::nanoseconds(std::llround(took * 1e9)), others);
      }
      const std::string where = std::to_string(bytes_per_second) + " B/s, " + std::to_string(round_trip) + " s";
      const double most = std::min(bytes_per_second, kMost * kChunkBytes / alone);
      EXPECT_GE(size(window) * kChunkBytes / took, 0.95 * most) << where;
      EXPECT_LE(took, alone + 0.5e-3 + 2 * kChunkBytes / bytes_per_second) << where;
    }
  }
}

TEST(AdaptiveWindow, WithoutRoomItDoesNotGrow) {
  AdaptiveWindow window = apart(3, 0);
  complete(window, 100, microseconds(100));
  EXPECT_EQ(size(window), 3u);
}

}  // namespace
}  // namespace herring::server
