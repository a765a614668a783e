#include "runtime/spin.h"

#include <gtest/gtest.h>

#include <chrono>

namespace herring::runtime {
namespace {

using namespace std::chrono_literals;

// Many processes on few cores: whoever polls in vain takes time from those that it waits for.
TEST(AdaptiveSpin, BecomesShorterWherePollingFindsNothing) {
  AdaptiveSpin spin(20us);
  EXPECT_EQ(spin.time(), 200us);
  EXPECT_EQ(spin.in_vain(), 100us);
  EXPECT_EQ(spin.in_vain(), 50us);
  for (int i = 0; i < 10; ++i) spin.in_vain();
  EXPECT_EQ(spin.time(), spin.shortest());
}

TEST(AdaptiveSpin, GrowsWhereWaitingLongerHasFoundSomething) {
  AdaptiveSpin spin(20us);
  for (int i = 0; i < 10; ++i) spin.in_vain();
  EXPECT_EQ(spin.found(15us), 20us) << "it would have been found without more patience";
  EXPECT_EQ(spin.found(21us), 40us);
  for (int i = 0; i < 10; ++i) spin.found(21us);
  EXPECT_EQ(spin.time(), spin.longest());
}

TEST(AdaptiveSpin, WithoutPollingThereIsNone) {
  AdaptiveSpin spin(Duration::zero());
  EXPECT_EQ(spin.time(), Duration::zero());
  EXPECT_EQ(spin.found(1ms), Duration::zero());
  EXPECT_EQ(spin.in_vain(), Duration::zero());
}

}  // namespace
}  // namespace herring::runtime
