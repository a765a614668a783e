#include "runtime/core_wait.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace herring::runtime {
namespace {

using namespace std::chrono_literals;

TEST(CoreWait, IsTheShareOfLately) {
  CoreWait wait;
  EXPECT_EQ(wait.share(), 0.0);
  for (int i = 0; i < 50; ++i) wait.measured(10ms, 6ms);
  EXPECT_NEAR(wait.share(), 0.6, 0.01);
  wait.measured(10ms, 0ms);
  EXPECT_GT(wait.share(), 0.4) << "one measurement is not all";
  for (int i = 0; i < 50; ++i) wait.measured(10ms, 0ms);
  EXPECT_LT(wait.share(), 0.01);
  for (int i = 0; i < 50; ++i) wait.measured(10ms, 25ms);
  EXPECT_LE(wait.share(), 1.0) << "clocks that differ";
  for (int i = 0; i < 50; ++i) wait.measured(0ms, 0ms);
  EXPECT_GE(wait.share(), 0.0);
}

TEST(CoreWait, LooksWhileThereIsWorkAndNotTooOften) {
  CoreWait wait;
  Instant now{1h};
  EXPECT_FALSE(wait.look(now)) << "nothing to compare with";
  EXPECT_FALSE(wait.look(now += 5ms)) << "a moment ago";
  EXPECT_TRUE(wait.look(now += 6ms));
  EXPECT_FALSE(wait.look(now += 1ms));
  EXPECT_FALSE(wait.look(now += 1h)) << "there was no work meanwhile";
  EXPECT_FALSE(wait.look(now += 9ms));
  EXPECT_TRUE(wait.look(now += 2ms));
  for (int i = 0; i < 2; ++i) now += 6ms, wait.look(now);
  std::thread([&] { EXPECT_FALSE(wait.look(now += 6ms)) << "another thread's times say nothing of this one"; }).join();
}

TEST(CoreWait, AThreadThatSharesItsCoreWaitsForIt) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  std::atomic<int> have_waited{0};
  const auto compute_on_one_core = [&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core) {
      if (CPU_ISSET(core, &allowed)) CPU_SET(core, &one);
    }
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    const Duration before = waited_for_core();
    const Instant end = std::chrono::steady_clock::now() + 20s;
    bool has_waited = false;
    // Both compute until both have waited: alone on the core neither would.
    while (std::chrono::steady_clock::now() < end && have_waited.load() < 2) {
      if (has_waited || waited_for_core() - before < 20ms) continue;
      has_waited = true;
      ++have_waited;
    }
    EXPECT_TRUE(has_waited);
  };
  std::thread first(compute_on_one_core);
  compute_on_one_core();
  first.join();
}

}  // namespace
}  // namespace herring::runtime
