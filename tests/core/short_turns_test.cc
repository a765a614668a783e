#include "core/short_turns.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <thread>

namespace herring {
namespace {

using namespace std::chrono_literals;

/// Nanoseconds, as Linux says it of the calling thread. 0: it says nothing.
std::uint64_t turn() {
  std::array<std::uint64_t, 7> attributes{};
  attributes[0] = sizeof(attributes);
  if (syscall(SYS_sched_getattr, 0, attributes.data(), sizeof(attributes), 0) != 0) return 0;
  return attributes[3];
}

int nice_of_thread() {
  std::array<std::uint64_t, 7> attributes{};
  attributes[0] = sizeof(attributes);
  syscall(SYS_sched_getattr, 0, attributes.data(), sizeof(attributes), 0);
  return static_cast<int>(attributes[2] & 0xFFFF'FFFF);
}

TEST(ShortTurns, LastAsLongAsTheObject) {
  const std::uint64_t usual = turn();
  if (usual == 0) GTEST_SKIP() << "this version of Linux has one length of turns for all";
  {
    const ShortTurns turns(100us);
    EXPECT_EQ(turn(), 100'000u);
    std::thread([usual] { EXPECT_LE(turn(), usual); }).join();
  }
  EXPECT_EQ(turn(), usual);
}

TEST(ShortTurns, NoneAreAskedForWhereTheyWouldNotBeShorter) {
  const std::uint64_t usual = turn();
  {
    const ShortTurns none(Duration::zero());
    EXPECT_EQ(turn(), usual);
  }
  const ShortTurns longer(50ms);
  EXPECT_EQ(turn(), usual);
}

/// Of what else there is to schedule by, nothing changes.
TEST(ShortTurns, ThePolicyAndTheNicenessStay) {
  std::thread([] {
    errno = 0;
    ASSERT_TRUE(nice(3) != -1 || errno == 0);
    const int before = nice_of_thread();
    const ShortTurns turns(100us);
    EXPECT_EQ(nice_of_thread(), before);
    EXPECT_EQ(sched_getscheduler(0), SCHED_OTHER);
  }).join();
  std::thread([] {
    sched_param none{};
    ASSERT_EQ(sched_setscheduler(0, SCHED_IDLE, &none), 0);
    const ShortTurns turns(100us);
    EXPECT_EQ(sched_getscheduler(0), SCHED_IDLE);
  }).join();
}

}  // namespace
}  // namespace herring
