#include <gtest/gtest.h>

#include <iostream>
#include <set>

#include "engines/random_job.h"

/// A link that carries nothing in one direction, or in none, while both ends live: found in seconds, named rightly, and
/// with failover no operation and no bit is lost. Who is only late, or cut off for less than the patience, is no such
/// link.
namespace herring::testing {
namespace {

using namespace std::chrono_literals;
constexpr Duration kDeadAfter = 5s;

/// Everything ends, and what ends well is right.
struct Outcomes {
  Outcomes(Cluster& cluster, std::vector<TestOp>& ops) {
    for (TestOp& op : ops) {
      op.timeout = 600s;
      expected += op.ranks.size();
    }
    cluster.on_complete([this, &ops](std::uint32_t rank, const CompleteAction& action) {
      ++ended;
      if (!action.status.is_ok()) return failures.push_back(action.status);
      const auto op = std::find_if(ops.begin(), ops.end(), [&](const TestOp& one) { return one.key == action.key; });
      ASSERT_NE(op, ops.end());
      const auto index = std::find(op->ranks.begin(), op->ranks.end(), rank) - op->ranks.begin();
      EXPECT_EQ(op->memory[index], op->expected[index]) << "rank " << rank << ' ' << to_string(op->descriptor);
    });
  }
  std::size_t expected = 0;
  std::size_t ended = 0;
  std::vector<Status> failures;
};

/// What the hub does with a report: the lane goes, for everybody.
struct Judge {
  explicit Judge(Cluster& cluster) {
    cluster.on_unreachable([this](std::uint32_t rank, const runtime::Unreachable& found) {
      reporters.insert(rank);
      for (const PeerId peer : found.peers) unreachable.insert(peer.value);
      is_all |= found.answering == 0 && found.of > 1;
    });
    cluster.after_step([this, &cluster] {
      bool any = false;
      for (const std::uint32_t peer : unreachable) {
        if (cluster.is_dead(peer)) continue;
        cluster.lose_lane(peer - cluster.options().workers, "peer " + std::to_string(peer) + " is not reached");
        any = true;
      }
      return any;
    });
  }
  std::set<std::uint32_t> reporters;
  std::set<std::uint32_t> unreachable;
  bool is_all = false;
};

ClusterOptions half_open_options(Random& random, std::uint64_t seed) {
  ClusterOptions options = random_options(random, seed);
  options.workers = std::max(options.workers, 2u);
  options.slots = 0;
  options.failover = seed % 2 == 0;
  if (options.lanes == 1 && !options.weights.empty()) options.weights.push_back(1);
  options.lanes = std::max(options.lanes, 2u);
  options.lane_slots = static_cast<std::uint32_t>(pick(random, 1, 8));
  options.retain_part_bytes = chance(random, 0.5) ? 0 : 16384;
  options.retain_bytes = pick(random, 0, 40'000);
  options.dead_after = kDeadAfter;
  options.lane_grace = kDeadAfter;
  return options;
}

void submit_all(Random& random, Cluster& cluster, std::vector<TestOp>& ops) {
  for (const Submission& next : random_order(random, cluster, ops)) {
    cluster.run_until(next.when);
    TestOp& op = ops[next.op];
    cluster.submit(op.ranks[next.index], op.operation(next.index));
  }
}

/// Who still waits, for who looks into it.
std::string describe(const Cluster& cluster, const Judge& judge, std::uint32_t worker, std::uint32_t lane,
                     std::uint64_t directions) {
  const ClusterOptions& options = cluster.options();
  std::string text = std::to_string(options.workers) + " workers, " + std::to_string(options.lanes) + " lanes, peers " +
                     std::to_string(worker) + " and " + std::to_string(lane) + " (directions " +
                     std::to_string(directions) + "), " +
                     (judge.unreachable.empty() ? "nobody found it" : "it was found");
  for (std::uint32_t rank = 0; rank < options.workers; ++rank) {
    if (!cluster.worker(rank).is_idle()) text += "; worker " + std::to_string(rank) + " waits";
    if (cluster.worker(rank).has_operations()) text += " for operations";
  }
  for (std::uint32_t i = 0; i < options.lanes; ++i) {
    if (cluster.is_dead(options.workers + i) || cluster.lane(i).is_idle()) continue;
    text +=
        "; lane " + std::to_string(i) + " waits (" + std::to_string(cluster.lane(i).stats().unsettled) + " unsettled)";
  }
  return text;
}

struct Counts {
  std::uint64_t found = 0;
  std::uint64_t unharmed = 0;
};

void run_schedule(std::uint64_t seed, Counts& counts) {
  Random random(seed);
  Cluster cluster(half_open_options(random, seed));
  const ClusterOptions& options = cluster.options();
  std::vector<TestOp> ops = random_ops(random, cluster);
  Outcomes outcomes(cluster, ops);
  Judge judge(cluster);
  const auto worker = static_cast<std::uint32_t>(pick(random, 0, options.workers - 1));
  const auto lane = options.workers + static_cast<std::uint32_t>(pick(random, 0, options.lanes - 1));
  const std::uint64_t directions = pick(random, 1, 3);
  std::vector<Submission> order = random_order(random, cluster, ops);
  const Instant when = cluster.now() + std::chrono::nanoseconds(pick(random, 0, 400'000));
  bool is_blocked = false;
  const auto block = [&] {
    cluster.run_until(when);
    if ((directions & 1) != 0) cluster.network().block(worker, lane);
    if ((directions & 2) != 0) cluster.network().block(lane, worker);
    is_blocked = true;
  };
  for (const Submission& next : order) {
    if (!is_blocked && next.when > when) block();
    cluster.run_until(next.when);
    cluster.submit(ops[next.op].ranks[next.index], ops[next.op].operation(next.index));
  }
  if (!is_blocked) block();
  // A lane may keep what nobody waits for (credits) in a socket for ever.
  static_cast<void>(cluster.run_until_idle(20s));
  ASSERT_EQ(outcomes.ended, outcomes.expected) << describe(cluster, judge, worker, lane, directions);
  for (std::uint32_t rank = 0; rank < options.workers; ++rank) {
    ASSERT_FALSE(cluster.worker(rank).has_operations()) << describe(cluster, judge, worker, lane, directions);
  }
  EXPECT_FALSE(judge.is_all) << "only one of the lanes was cut off";
  // An endpoint that is full of sends that nobody takes cannot answer anybody: then all accuse it, and rightly so.
  const bool is_roomy = options.sim.max_sends > 8;
  for (const std::uint32_t rank : judge.reporters) EXPECT_TRUE(rank == worker || !is_roomy) << "rank " << rank;
  for (const std::uint32_t peer : judge.unreachable) EXPECT_EQ(peer, lane) << "the wrong end was named";
  for (const Status& failure : outcomes.failures) {
    EXPECT_FALSE(options.failover) << failure.to_string();
    EXPECT_EQ(failure.code(), Code::kPeerLost) << failure.to_string();
  }
  counts.found += judge.unreachable.empty() ? 0 : 1;
  counts.unharmed += outcomes.failures.empty() ? 1 : 0;
}

TEST(HalfOpen, EveryBrokenLinkIsFoundInSecondsAndCostsNoBitInSeededSchedules) {
  const SeedRange range = seeds(1'000);
  Counts counts;
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    run_schedule(seed, counts);
    if (HasFailure()) FAIL() << "seed " << seed << " fails; HERRING_TEST_SEED=" << seed << " replays it";
  }
  std::cout << range.count << " schedules, " << counts.found << " broken links found, in " << counts.unharmed
            << " no operation was lost\n";
  if (range.count < 1000) return;
  EXPECT_GT(counts.found, range.count / 3);
  EXPECT_GT(counts.unharmed, range.count / 2);
}

TEST(HalfOpen, AWorkerThatReachesNobodySaysSo) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    Random random(seed);
    ClusterOptions options = half_open_options(random, 2 * seed);
    options.sim.max_sends = 1024;
    Cluster cluster(options);
    TestOp op;
    op.ranks = {0, 1};
    op.key = {GroupId{1}, seed, 0};
    set_size(op.descriptor, DataType::kFloat32, pick(random, 1, 4000));
    fill(op, random, cluster.worker_config(0));
    op.timeout = 600s;
    std::vector<runtime::Unreachable> reports;
    cluster.on_unreachable([&](std::uint32_t rank, const runtime::Unreachable& found) {
      EXPECT_EQ(rank, 1u) << "seed " << seed;
      reports.push_back(found);
    });
    for (std::uint32_t lane = 0; lane < options.lanes; ++lane) cluster.network().block(options.workers + lane, 1);
    for (std::size_t i = 0; i < 2; ++i) cluster.submit(op.ranks[i], op.operation(i));
    cluster.run_until(cluster.now() + 10s);
    ASSERT_FALSE(reports.empty()) << "seed " << seed;
    EXPECT_EQ(reports.front().answering, 0u) << "seed " << seed;
    EXPECT_EQ(reports.front().of, options.lanes) << "seed " << seed;
  }
}

/// Else anybody who reaches a port could make a server send.
TEST(HalfOpen, WhoIsNotOfTheJobGetsNoAnswer) {
  ClusterOptions options;
  options.workers = 2;
  options.strangers = 1;
  Cluster cluster(options);
  wire::Header header;
  header.type = wire::MessageType::kPing;
  std::deque<wire::HeaderBytes> messages;
  const auto ask = [&](std::uint64_t job, std::uint32_t sender) {
    header.job_id = job;
    header.sender = sender;
    messages.push_back(wire::encode(header));
    const Token token{messages.size()};
    ASSERT_TRUE(cluster.endpoint(3).post_send(PeerId{2}, kControlTag, messages.back(), {}, token).is_ok());
    cluster.run_until(cluster.now() + 1s);
  };
  ask(Cluster::kJob + 1, 0);
  ask(Cluster::kJob, 3);
  EXPECT_EQ(cluster.lane(0).stats().messages_rejected, 2u);
  EXPECT_EQ(cluster.network().stats().messages, 2u) << "somebody answered";
  ask(Cluster::kJob, 0);
  EXPECT_EQ(cluster.network().stats().messages, 4u) << "a worker of the job was not answered";
}

TEST(HalfOpen, ARankThatIsTenMinutesLateAlarmsNobody) {
  ClusterOptions options;
  options.workers = 4;
  options.lanes = 3;
  options.dead_after = kDeadAfter;
  options.failover = true;
  Cluster cluster(options);
  Random random(5);
  std::vector<TestOp> ops(1);
  TestOp& op = ops.front();
  op.ranks = {0, 1, 2, 3};
  op.key = {GroupId{0}, 1, 0};
  set_size(op.descriptor, DataType::kFloat32, 4000);
  fill(op, random, cluster.worker_config(0));
  Outcomes outcomes(cluster, ops);
  op.timeout = 3600s;
  cluster.on_unreachable([](std::uint32_t rank, const runtime::Unreachable&) { ADD_FAILURE() << "rank " << rank; });
  for (std::size_t i = 0; i < 3; ++i) cluster.submit(op.ranks[i], op.operation(i));
  cluster.run_until(cluster.now() + 600s);
  // A question each half of the patience, and its answer.
  EXPECT_LT(cluster.network().stats().messages, 3u * 3u * 2u * 250u);
  cluster.submit(3, op.operation(3));
  ASSERT_TRUE(cluster.run_until_idle(1s));
  EXPECT_EQ(outcomes.ended, 4u);
  EXPECT_TRUE(outcomes.failures.empty());
}

TEST(HalfOpen, ALinkThatIsCutForLessThanThePatienceAlarmsNobody) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Random random(seed);
    Cluster cluster(half_open_options(random, 2 * seed));
    const ClusterOptions& options = cluster.options();
    std::vector<TestOp> ops = random_ops(random, cluster);
    Outcomes outcomes(cluster, ops);
    cluster.on_unreachable([](std::uint32_t rank, const runtime::Unreachable&) { ADD_FAILURE() << "rank " << rank; });
    const auto worker = static_cast<std::uint32_t>(pick(random, 0, options.workers - 1));
    const auto lane = options.workers + static_cast<std::uint32_t>(pick(random, 0, options.lanes - 1));
    cluster.network().partition(worker, lane);
    submit_all(random, cluster, ops);
    cluster.run_until(cluster.now() + std::chrono::milliseconds(pick(random, 1, 4999)));
    cluster.network().heal(worker, lane);
    ASSERT_TRUE(cluster.run_until_idle(1s)) << "seed " << seed;
    EXPECT_EQ(outcomes.ended, outcomes.expected) << "seed " << seed;
    EXPECT_TRUE(outcomes.failures.empty()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace herring::testing
