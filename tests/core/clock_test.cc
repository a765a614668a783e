#include "core/clock.h"

#include <gtest/gtest.h>

#include <limits>

namespace herring {
namespace {

constexpr Instant kNow = Instant(std::chrono::hours(1000));

TEST(Clock, AddsSeconds) {
  EXPECT_EQ(deadline_after(kNow, 1.5), kNow + std::chrono::milliseconds(1500));
  EXPECT_EQ(deadline_after(kNow, 1e-9), kNow + std::chrono::nanoseconds(1));
  const Instant before = std::chrono::steady_clock::now();
  EXPECT_GE(deadline_after(60), before + std::chrono::seconds(60));
}

TEST(Clock, SaturatesInsteadOfWrappingIntoThePast) {
  for (const double seconds : {1e10, 9.3e9, 1e300, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(deadline_after(kNow, seconds), Instant::max()) << seconds;
    EXPECT_EQ(deadline_after(Instant::max(), seconds), Instant::max()) << seconds;
  }
  EXPECT_EQ(deadline_after(Instant::max() - std::chrono::seconds(1), 2), Instant::max());
  for (double seconds = 1; seconds < 1e12; seconds *= 1.01) ASSERT_GT(deadline_after(kNow, seconds), kNow) << seconds;
}

TEST(Clock, NoTimeIsNow) {
  for (const double seconds :
       {0.0, -1.0, -1e300, -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(deadline_after(kNow, seconds), kNow) << seconds;
  }
}

}  // namespace
}  // namespace herring
