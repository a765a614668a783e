#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "engines/plan.h"
#include "runtime/budget.h"

/// Large jobs with the sizes that the runtime computes for them, over endpoints that hold as many posts as real ones: a
/// pool of receives that takes them all leaves no room for a chunk, and the job hangs without a word.
namespace herring::testing {
namespace {

struct Scale {
  std::uint32_t workers = 0;
  std::uint32_t lanes = 0;
  bool failover = false;
  bool checksum = false;
  std::size_t operations = transport::kMaxOperations;
  // Of a job that is larger than what is played of it; 0: as above.
  std::uint32_t job_workers = 0;
  std::uint32_t job_lanes = 0;
};

runtime::Budget budget_of(const Scale& scale) {
  runtime::BudgetInput input;
  input.workers = std::max(scale.workers, scale.job_workers);
  input.lane_windows.assign(std::max(scale.lanes, scale.job_lanes), 6);
  input.chunk_bytes = 32 << 10;
  input.eager_bytes = 16 << 10;
  input.failover = scale.failover;
  input.checksum = scale.checksum;
  input.operations = scale.operations;
  return runtime::make_budget(input);
}

ClusterOptions options_of(const Scale& scale) {
  const runtime::Budget budget = budget_of(scale);
  ClusterOptions options;
  options.workers = scale.workers;
  options.lanes = scale.lanes;
  options.chunk_bytes = 64;
  options.window = options.max_window = budget.lane_windows.front();
  options.lane_slots = 2 * options.window;
  options.announce_credits = budget.announce_credits;
  options.eager_window = budget.eager_window;
  options.lane_receives = budget.control_messages();
  options.body_bytes = 300;  // An announce, a list of tags: there are millions of receives.
  options.worker_receives = static_cast<std::uint32_t>(budget.worker.control);
  options.failover = scale.failover;
  options.checksum = scale.checksum;
  options.sim.max_operations = scale.operations;
  return options;
}

TestOp sum_over_all(Random& random, const Cluster& cluster, std::uint64_t number) {
  TestOp op;
  op.ranks.resize(cluster.options().workers);
  std::iota(op.ranks.begin(), op.ranks.end(), 0u);
  op.key = {GroupId{0}, number, 0};
  // Three chunks for each lane.
  set_size(op.descriptor, DataType::kFloat32, std::uint64_t{cluster.options().lanes} * 16 * 3);
  fill(op, random, cluster.worker_config(0));
  return op;
}

/// `lost`: lanes that die at the same moment, once the first worker has a sum.
void expect_sums(const ClusterOptions& options, std::uint64_t operations, const std::vector<std::uint32_t>& lost = {}) {
  Cluster cluster(options);
  Random random(options.seed);
  std::deque<TestOp> ops;
  for (std::uint64_t i = 0; i < operations; ++i) ops.push_back(sum_over_all(random, cluster, i + 1));
  bool has_one = false;
  cluster.on_complete([&](std::uint32_t, const CompleteAction&) { has_one = true; });
  for (std::uint32_t rank = 0; rank < options.workers; ++rank) {
    for (TestOp& op : ops) cluster.submit(rank, op.operation(rank));
  }
  while (!lost.empty() && !has_one) cluster.run_until(cluster.now() + std::chrono::microseconds(20));
  for (const std::uint32_t lane : lost) cluster.stop_lane(lane);
  for (const std::uint32_t lane : lost) cluster.lose_lane(lane, "the test has ended it");
  ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
  for (std::uint32_t rank = 0; rank < options.workers; ++rank) {
    ASSERT_EQ(cluster.completions(rank).size(), operations);
    for (const CompleteAction& done : cluster.completions(rank)) ASSERT_TRUE(done.status.is_ok());
    for (const TestOp& op : ops) ASSERT_TRUE(op.memory[rank] == op.expected[rank]) << "rank " << rank;
  }
}

TEST(Scale, ThousandWorkersGetTheirSums) { expect_sums(options_of({1093, 1}), 2); }

TEST(Scale, ManyServersWithFailoverGetTheirSums) {
  // A Ready for each grant and a Moved for each lane: 24 x (32 + 24 + 6 + 40) receives, were there room.
  expect_sums(options_of({24, 40, true, false, 1000}), 2);
}

std::uint32_t number(const char* name, std::uint32_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10));
}

// A job of 2,048 workers and 256 servers, of which either a few lanes or a few workers are played: what a lane and what
// a worker has posted depends on the other number alone. HERRING_TEST_LANES=n plays more of the lanes in the first one
// (all 256: 14 minutes and 12 GB), HERRING_TEST_WORKERS=n fewer workers.
TEST(Scale, LanesOfTwoThousandWorkersAnd256ServersLoseOneOfThem) {
  const std::uint32_t workers = number("HERRING_TEST_WORKERS", 2048);
  const std::uint32_t lanes = number("HERRING_TEST_LANES", 2);
  expect_sums(options_of({workers, lanes, true, false, transport::kMaxOperations, 2048, 256}), 2, {0});
}

TEST(Scale, WorkersOfTwoThousandAnd256ServersLoseOneOfThem) {
  expect_sums(options_of({6, 256, true, false, transport::kMaxOperations, 2048, 256}), 2, {7});
}

// Each worker tells each lane that is left what it had announced to each of them: more than there are receives for.
TEST(Scale, ThirtyOfFortyServersDieAtOnce) {
  std::vector<std::uint32_t> lost(30);
  std::iota(lost.begin(), lost.end(), 3u);
  expect_sums(options_of({12, 40, true}), 3, lost);
}

TEST(Scale, TheSameWhereEndpointsHoldLittle) {
  for (const bool failover : {false, true}) {
    for (const bool checksum : {false, true}) {
      // Just what the smallest sizes take: 9 receives of a worker with failover, 6 messages of another worker without.
      for (const std::uint32_t workers : {4u, 12u, 24u}) {
        SCOPED_TRACE(std::to_string(workers) + " workers, failover " + std::to_string(failover) + ", checksum " +
                     std::to_string(checksum));
        expect_sums(options_of({workers, 3, failover, checksum, 400}), 6);
      }
    }
  }
}

/// What a user sees without the budget; also that the simulated network has the limit at all.
TEST(Scale, APoolThatTakesAllReceivesStopsTheJob) {
  ClusterOptions options = options_of({24, 1, false, false, 400});
  options.lane_receives = 32 + 24;
  Cluster cluster(options);
  Random random(1);
  TestOp op = sum_over_all(random, cluster, 1);
  op.timeout = std::chrono::seconds(3600);
  for (std::uint32_t rank = 0; rank < options.workers; ++rank) cluster.submit(rank, op.operation(rank));
  EXPECT_FALSE(cluster.run_until_idle(std::chrono::seconds(20)));
}

}  // namespace
}  // namespace herring::testing
