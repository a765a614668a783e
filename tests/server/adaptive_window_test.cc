#include "server/adaptive_window.h"

#include <gtest/gtest.h>

namespace herring::server {
namespace {

using std::chrono::milliseconds;

void complete(AdaptiveWindow& window, int chunks, Duration each) {
  for (int i = 0; i < chunks; ++i) window.on_complete(each, 1);
}

TEST(AdaptiveWindow, GrowsWhileChunksAreQuickAndStopsAtItsLimit) {
  AdaptiveWindow window(4, 12);
  EXPECT_EQ(window.size(), 4u);
  complete(window, 3, milliseconds(1));
  EXPECT_EQ(window.size(), 4u) << "a window's worth of chunks is not complete";
  complete(window, 1, milliseconds(1));
  EXPECT_EQ(window.size(), 5u);
  complete(window, 1000, milliseconds(1));
  EXPECT_EQ(window.size(), 12u);
}

TEST(AdaptiveWindow, ShrinksWhereChunksOnlyWaitButNotBelowItsShare) {
  AdaptiveWindow window(4, 12);
  complete(window, 1000, milliseconds(1));
  complete(window, 12, milliseconds(100));
  EXPECT_EQ(window.size(), 11u);
  complete(window, 1000, milliseconds(100));
  EXPECT_EQ(window.size(), 4u);
}

TEST(AdaptiveWindow, RestsInBetweenAndGoesByTheMean) {
  AdaptiveWindow window(4, 12);
  complete(window, 1000, milliseconds(25));
  EXPECT_EQ(window.size(), 4u);
  complete(window, 1, milliseconds(94));  // One late chunk of four: 25 ms on average.
  complete(window, 3, milliseconds(2));
  EXPECT_EQ(window.size(), 4u);
}

TEST(AdaptiveWindow, WithoutRoomItStaysAsItIs) {
  AdaptiveWindow window(3, 0);
  complete(window, 100, milliseconds(1));
  EXPECT_EQ(window.size(), 3u);
}

}  // namespace
}  // namespace herring::server
