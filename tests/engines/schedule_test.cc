#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "engines/plan.h"

namespace herring::testing {
namespace {

ClusterOptions random_options(Random& random, std::uint64_t seed) {
  ClusterOptions options;
  options.seed = seed;
  options.workers = static_cast<std::uint32_t>(pick(random, 1, 8));
  options.lanes = static_cast<std::uint32_t>(pick(random, 1, 8));
  const std::uint32_t chunks[] = {64, 128, 256, 1024, 4096, 65536};
  options.chunk_bytes = chunks[pick(random, 0, 5)];
  options.window = static_cast<std::uint32_t>(pick(random, 1, 8));
  if (chance(random, 0.5)) options.max_window = options.window * static_cast<std::uint32_t>(pick(random, 1, 3));
  // Often one slot for each worker, the least that is allowed.
  options.slots = options.workers * static_cast<std::uint32_t>(chance(random, 0.5) ? 1 : pick(random, 1, 4)) +
                  static_cast<std::uint32_t>(pick(random, 0, 2));
  const std::uint32_t eager[] = {0, 0, 64, 300, 2048};
  options.max_eager_bytes = eager[pick(random, 0, 4)];
  options.eager_window = static_cast<std::uint32_t>(pick(random, 0, 3));
  const std::uint32_t credits[] = {0, 1, 2, 3, 8};
  options.announce_credits = credits[pick(random, 0, 4)];
  options.min_shard_bytes = chance(random, 0.5) ? 0 : pick(random, 1, 4) * options.chunk_bytes / 2;
  if (chance(random, 0.4)) {
    for (std::uint32_t i = 0; i < options.lanes; ++i)
      options.weights.push_back(static_cast<double>(pick(random, 0, 3)));
    options.weights[pick(random, 0, options.lanes - 1)] = 1;  // Not all of them zero.
  }
  options.sim.max_delay = std::chrono::microseconds(pick(random, 5, 200));
  if (chance(random, 0.4)) options.sim.straggler_chance = 0.05;
  if (chance(random, 0.2)) options.sim.again_chance = 0.05;
  if (chance(random, 0.2)) options.sim.max_sends = pick(random, 1, 8);
  if (chance(random, 0.2)) options.sim.uplink_bytes_per_second = options.sim.downlink_bytes_per_second = 1e8;
  options.sim.buffered_chance = static_cast<double>(pick(random, 0, 4)) / 4;
  return options;
}

/// Some workers in some order; the whole job for group 0.
std::vector<std::uint32_t> random_group(Random& random, std::uint32_t workers, std::uint32_t id) {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < workers; ++rank) {
    if (id == 0 || chance(random, 0.6)) ranks.push_back(rank);
  }
  if (ranks.empty()) ranks.push_back(static_cast<std::uint32_t>(pick(random, 0, workers - 1)));
  return ranks;
}

std::uint64_t random_elements_count(Random& random, const ClusterOptions& options) {
  const std::uint64_t kind = pick(random, 0, 9);
  if (kind == 0) return 0;
  if (kind <= 3) return pick(random, 1, 40);
  const std::uint64_t chunks = kind <= 7 ? 6 : 30;
  return pick(random, 1, std::min<std::uint64_t>(options.chunk_bytes * chunks / 4, 50'000));
}

TestOp random_op(Random& random, const ClusterOptions& options, std::uint32_t group, std::vector<std::uint32_t> ranks,
                 std::uint64_t number) {
  TestOp op;
  op.ranks = std::move(ranks);
  // Two processes for each contributor, as two ranks of each host.
  if (op.ranks.size() % 2 == 0 && chance(random, 0.25)) op.owners = 2;
  op.key = {GroupId{group}, number, static_cast<std::uint32_t>(pick(random, 0, 2))};
  const std::uint64_t kind = pick(random, 0, 9);
  if (kind == 0) {
    op.descriptor.collective = Collective::kBarrier;
  } else {
    set_size(op.descriptor, chance(random, 0.8) ? DataType::kFloat32 : DataType::kUInt8,
             random_elements_count(random, options));
    op.descriptor.op_bytes += pick(random, 0, 3) * 1000;  // This part is one of several.
    if (kind <= 2) op.descriptor.collective = kind == 1 ? Collective::kBroadcast : Collective::kAllGather;
    if (kind <= 2) op.descriptor.root = static_cast<std::uint32_t>(pick(random, 0, op.contributors() - 1));
    if (kind == 3 && op.descriptor.dtype == DataType::kFloat32) {
      op.descriptor.reduce = ReduceOp::kAverage;
      op.average_over = static_cast<std::uint32_t>(op.ranks.size());
    }
  }
  return op;
}

struct Submission {
  Instant when;
  std::size_t op = 0;
  std::size_t index = 0;
};

std::vector<TestOp> random_ops(Random& random, const Cluster& cluster) {
  const ClusterOptions& options = cluster.options();
  std::vector<std::vector<std::uint32_t>> groups;
  for (std::uint32_t id = 0; id < 3; ++id) groups.push_back(random_group(random, options.workers, id));
  std::vector<TestOp> ops;
  const std::uint64_t count = pick(random, 1, 6);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto group = static_cast<std::uint32_t>(chance(random, 0.6) ? 0 : pick(random, 1, 2));
    ops.push_back(random_op(random, options, group, groups[group], i));
    fill(ops.back(), random, cluster.worker_config(0));
  }
  return ops;
}

/// Each worker submits its operations in an order and at times of its own.
std::vector<Submission> random_order(Random& random, const Cluster& cluster, const std::vector<TestOp>& ops) {
  std::vector<Submission> order;
  const bool together = chance(random, 0.3);
  for (std::size_t op = 0; op < ops.size(); ++op) {
    for (std::size_t index = 0; index < ops[op].ranks.size(); ++index) {
      const auto wait = std::chrono::nanoseconds(together ? pick(random, 0, 99) : pick(random, 0, 300'000));
      order.push_back({cluster.now() + wait, op, index});
    }
  }
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.when < b.when; });
  return order;
}

void check_results(const Cluster& cluster, const std::vector<TestOp>& ops, std::size_t rounds) {
  std::map<std::pair<std::uint32_t, OpKey>, int> done;
  for (std::uint32_t rank = 0; rank < cluster.options().workers; ++rank) {
    for (const CompleteAction& action : cluster.completions(rank)) {
      EXPECT_TRUE(action.status.is_ok()) << "rank " << rank << ": " << action.status.to_string();
      ++done[{rank, action.key}];
    }
  }
  for (const TestOp& op : ops) {
    for (std::size_t i = 0; i < op.ranks.size(); ++i) {
      const int times = done[{op.ranks[i], op.key}];
      EXPECT_EQ(times, static_cast<int>(rounds)) << "rank " << op.ranks[i] << " op " << op.key.op;
      EXPECT_EQ(op.memory[i], op.expected[i])
          << "rank " << op.ranks[i] << " op " << op.key.op << ' ' << to_string(op.descriptor);
    }
  }
}

void check_end(Cluster& cluster) {
  const ClusterOptions& options = cluster.options();
  EXPECT_EQ(cluster.network().stats().unexpected, 0u);
  EXPECT_EQ(cluster.network().stats().truncated, 0u);
  for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
    const server::EngineStats& stats = cluster.lane(lane).stats();
    EXPECT_TRUE(cluster.lane(lane).is_idle()) << "lane " << lane;
    EXPECT_EQ(stats.slots_in_use, 0u);
    EXPECT_LE(stats.slots_peak, cluster.slots());
    EXPECT_EQ(stats.messages_rejected, 0u) << "lane " << lane;
  }
  for (std::uint32_t rank = 0; rank < options.workers; ++rank) {
    EXPECT_TRUE(cluster.worker(rank).is_idle()) << "rank " << rank;
    EXPECT_EQ(cluster.worker(rank).stats().messages_rejected, 0u) << "rank " << rank;
  }
}

/// What the schedules met on their way: a generator that no longer reaches these proves less than it says.
struct Coverage {
  std::uint64_t full_lanes = 0;      // Lanes that had every slot in use.
  std::uint64_t slotless_lanes = 0;  // Lanes that finished operations without a slot: eager data, barriers.
  std::uint64_t refused_posts = 0;
  std::uint64_t operations = 0;
  std::uint64_t messages = 0;
};

void count(const Cluster& cluster, const transport::SimStats& network, Coverage& coverage) {
  for (std::uint32_t lane = 0; lane < cluster.options().lanes; ++lane) {
    const server::EngineStats& stats = cluster.lane(lane).stats();
    coverage.full_lanes += stats.slots_peak == cluster.slots() ? 1 : 0;
    coverage.slotless_lanes += stats.ops_completed > 0 && stats.slots_peak == 0 ? 1 : 0;
    coverage.operations += stats.ops_completed;
  }
  coverage.refused_posts += network.refused;
  coverage.messages += network.messages;
}

void run_schedule(std::uint64_t seed, Coverage& coverage) {
  Random random(seed);
  Cluster cluster(random_options(random, seed));
  for (std::uint32_t peer = 0; peer < cluster.options().workers + cluster.options().lanes; ++peer) {
    if (chance(random, 0.1)) cluster.network().set_slowness(peer, static_cast<double>(pick(random, 2, 20)));
  }
  std::vector<TestOp> ops = random_ops(random, cluster);
  // A second round uses the same keys again, as operations named by the user do.
  const std::size_t rounds = chance(random, 0.2) ? 2 : 1;
  for (std::size_t round = 0; round < rounds; ++round) {
    if (round > 0) {
      for (TestOp& op : ops) fill(op, random, cluster.worker_config(0));
    }
    for (const Submission& next : random_order(random, cluster, ops)) {
      cluster.run_until(next.when);
      cluster.submit(ops[next.op].ranks[next.index], ops[next.op].operation(next.index));
    }
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20))) << "deadlock";
  }
  check_results(cluster, ops, rounds);
  check_end(cluster);
  count(cluster, cluster.network().stats(), coverage);
}

TEST(EngineSchedules, EveryResultIsBitIdenticalInTenThousandSeededSchedules) {
  const SeedRange range = seeds(10'000);
  Coverage coverage;
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    run_schedule(seed, coverage);
    if (HasFailure()) {
      FAIL() << "seed " << seed << " fails; HERRING_TEST_SEED=" << seed << " replays it";
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  RecordProperty("schedules", std::to_string(range.count));
  std::cout << range.count << " schedules in " << seconds << " s: " << coverage.operations << " operations on lanes, "
            << coverage.messages << " messages, " << coverage.full_lanes << " lanes with every slot in use, "
            << coverage.slotless_lanes << " that needed none, " << coverage.refused_posts << " posts refused\n";
  if (range.count < 1000) return;
  EXPECT_GT(coverage.full_lanes, range.count / 4);
  EXPECT_GT(coverage.slotless_lanes, range.count / 10);
  EXPECT_GT(coverage.refused_posts, range.count);
}

}  // namespace
}  // namespace herring::testing
