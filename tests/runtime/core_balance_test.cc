#include "runtime/core_balance.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "intra_node/processes.h"

namespace herring::runtime {
namespace {

using intra_node::kNoCore;
using intra_node::Neighborhood;

cpu_set_t set_of(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  return set;
}

std::vector<int> cores_in(const cpu_set_t& set) {
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

using Ranks = std::vector<std::uint32_t>;
using Cores = std::vector<int>;

TEST(RoomierCores, AreThoseWithTheFewestRanks) {
  EXPECT_EQ(cores_in(roomier_cores(Ranks{0, 0}, 0, set_of({0, 1}))), Cores{1});
  EXPECT_EQ(cores_in(roomier_cores(Ranks{1, 1, 0, 1}, 1, set_of({0, 1}))), Cores{0});
  EXPECT_EQ(cores_in(roomier_cores(Ranks{3, 3, 3, 1, 2}, 3, set_of({1, 2, 3, 7, 9}))), (Cores{7, 9}));
  EXPECT_EQ(cores_in(roomier_cores(Ranks{4, 4, kNoCore}, 4, set_of({4, 5}))), Cores{5});
}

TEST(RoomierCores, AreNoneWhereMovingWouldOnlyMoveTheCrowd) {
  EXPECT_EQ(cores_in(roomier_cores(Ranks{0, 1}, 0, set_of({0, 1}))), Cores{});
  EXPECT_EQ(cores_in(roomier_cores(Ranks{0, 0, 1}, 0, set_of({0, 1}))), Cores{});
  EXPECT_EQ(cores_in(roomier_cores(Ranks{0, 0, 1, 1}, 0, set_of({0, 1}))), Cores{});
  EXPECT_EQ(cores_in(roomier_cores(Ranks{0, 0}, 0, set_of({0}))), Cores{}) << "bound to this core";
  EXPECT_EQ(cores_in(roomier_cores(Ranks{0, kNoCore}, 0, set_of({0, 1}))), Cores{});
}

/// Two ranks of one host, in this process.
class CoreBalanceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(sched_getaffinity(0, sizeof(allowed_), &allowed_), 0);
    if (CPU_COUNT(&allowed_) < 2) GTEST_SKIP() << "one core";
    const std::uint64_t token = intra_node::testing::random_token();
    const auto join = [token](std::uint32_t rank) {
      return std::make_unique<Neighborhood>(intra_node::NeighborhoodOptions{rank, 2, token, 1 << 20, 1 << 12},
                                            std::chrono::steady_clock::now() + std::chrono::seconds(30));
    };
    std::thread other([&] { other_ = join(1); });
    own_ = join(0);
    other.join();
    first_ = cores_in(allowed_).front();
    // This thread is on the first core; the scheduler leaves it there while it has no reason.
    const cpu_set_t first = set_of({first_});
    ASSERT_EQ(sched_setaffinity(0, sizeof(first), &first), 0);
  }
  void TearDown() override { sched_setaffinity(0, sizeof(allowed_), &allowed_); }

  cpu_set_t allowed_;
  int first_ = 0;
  std::unique_ptr<Neighborhood> own_;
  std::unique_ptr<Neighborhood> other_;
};

TEST_F(CoreBalanceTest, LeavesACoreThatItSharesWithWhomItWaitsFor) {
  other_->set_core(static_cast<std::uint32_t>(first_));
  CoreBalance balance(*own_);
  for (int i = 0; i < 100; ++i) balance.on_wait();
  EXPECT_EQ(balance.moves(), 0u) << "bound to it";
  ASSERT_EQ(sched_setaffinity(0, sizeof(allowed_), &allowed_), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  // Where the scheduler has moved this thread, it says so, and the other one "follows".
  for (int i = 0; i < 1000 && balance.moves() == 0; ++i) {
    balance.on_wait();
    if (balance.moves() == 0) other_->set_core(own_->core_of(0));
  }
  EXPECT_EQ(balance.moves(), 1u);
  cpu_set_t now;
  ASSERT_EQ(sched_getaffinity(0, sizeof(now), &now), 0);
  EXPECT_TRUE(CPU_EQUAL(&now, &allowed_)) << "what it may run on is as before";
}

TEST_F(CoreBalanceTest, StaysOnACoreOfItsOwn) {
  ASSERT_EQ(sched_setaffinity(0, sizeof(allowed_), &allowed_), 0);
  CoreBalance balance(*own_);
  for (int i = 0; i < 1000; ++i) {
    balance.on_wait();
    const int elsewhere = own_->core_of(0) == static_cast<std::uint32_t>(first_) ? cores_in(allowed_).back() : first_;
    other_->set_core(static_cast<std::uint32_t>(elsewhere));
  }
  EXPECT_EQ(balance.moves(), 0u);
}

}  // namespace
}  // namespace herring::runtime
