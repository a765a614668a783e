#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <iostream>

#include "engines/random_job.h"

/// What goes wrong in a job, in seeded schedules: everybody concerned gets exactly one error that says why, nobody else
/// is disturbed, nothing is left behind, and the next operation works.
namespace herring::testing {
namespace {

ClusterOptions failure_options(Random& random, std::uint64_t seed) {
  ClusterOptions options;
  options.seed = seed;
  options.workers = static_cast<std::uint32_t>(pick(random, 2, 6));
  options.lanes = static_cast<std::uint32_t>(pick(random, 1, 4));
  options.chunk_bytes = chance(random, 0.5) ? 64 : 256;
  options.window = static_cast<std::uint32_t>(pick(random, 1, 6));
  options.slots = options.workers * static_cast<std::uint32_t>(pick(random, 1, 3));
  options.max_eager_bytes = chance(random, 0.5) ? 0 : 200;
  const std::uint32_t credits[] = {0, 1, 2, 8};
  options.announce_credits = credits[pick(random, 0, 3)];
  options.min_shard_bytes = chance(random, 0.5) ? 0 : 256;
  options.sim.max_delay = std::chrono::microseconds(pick(random, 5, 200));
  if (chance(random, 0.3)) options.sim.straggler_chance = 0.05;
  if (chance(random, 0.2)) options.sim.again_chance = 0.05;
  options.sim.buffered_chance = static_cast<double>(pick(random, 0, 2)) / 2;
  // Errors are the same with failover and without.
  options.failover = seed % 2 == 0;
  options.retain_part_bytes = seed % 4 == 0 ? 0 : 4096;
  options.retain_bytes = 20'000;
  // Nor do they change where messages have to come twice.
  options.strict = seed % 5 == 0;
  options.checksum = seed % 3 == 0;
  if (options.checksum) {
    options.max_damaged = 1000;
    options.sim.damage_chance = 0.03;
  }
  if (options.seed / 2 % 2 == 1) options.sim.slow_cancel_chance = 0.5;
  // Nor where the lane in each worker sums for it alone.
  if (!options.failover && seed / 2 % 3 == 0) {
    options.near = true;
    options.lanes = options.workers;
    options.one_hop_bytes = seed / 6 % 2 == 0 ? options.chunk_bytes : 6 * options.chunk_bytes;
  }
  return options;
}

/// For what is about its absence, or uses a key twice.
ClusterOptions without_failover(ClusterOptions options) {
  options.failover = false;
  return options;
}

TestOp all_reduce(Random& random, const Cluster& cluster, std::vector<std::uint32_t> ranks, std::uint32_t group,
                  std::uint64_t number) {
  TestOp op;
  op.ranks = std::move(ranks);
  op.key = {GroupId{group}, number, 0};
  const ClusterOptions& options = cluster.options();
  if (op.ranks.size() == options.workers && !options.failover) op.one_hop_bytes = options.one_hop_bytes;
  set_size(op.descriptor, DataType::kFloat32, pick(random, 1, chance(random, 0.5) ? 40 : 1500));
  fill(op, random, cluster.worker_config(0));
  put_on_devices(op, options);
  return op;
}

std::vector<std::uint32_t> everybody(const Cluster& cluster) {
  std::vector<std::uint32_t> ranks(cluster.options().workers);
  for (std::uint32_t i = 0; i < ranks.size(); ++i) ranks[i] = i;
  return ranks;
}

std::vector<const Status*> outcomes(const Cluster& cluster, std::uint32_t rank, const OpKey& key) {
  std::vector<const Status*> found;
  for (const CompleteAction& action : cluster.completions(rank)) {
    if (action.key == key) found.push_back(&action.status);
  }
  return found;
}

void expect_good(const Cluster& cluster, TestOp& op) {
  for (std::size_t i = 0; i < op.ranks.size(); ++i) {
    const auto found = outcomes(cluster, op.ranks[i], op.key);
    ASSERT_EQ(found.size(), 1u) << "rank " << op.ranks[i];
    EXPECT_TRUE(found[0]->is_ok()) << "rank " << op.ranks[i] << ": " << found[0]->to_string();
    EXPECT_EQ(op.result(i), op.expected[i]) << "rank " << op.ranks[i];
  }
}

void expect_error(const Cluster& cluster, std::uint32_t rank, const OpKey& key, Code code,
                  const std::vector<std::string>& needles) {
  const auto found = outcomes(cluster, rank, key);
  ASSERT_EQ(found.size(), 1u) << "rank " << rank;
  EXPECT_EQ(found[0]->code(), code) << "rank " << rank << ": " << found[0]->to_string();
  for (const std::string& needle : needles) {
    EXPECT_NE(found[0]->message().find(needle), std::string::npos)
        << "rank " << rank << " lacks '" << needle << "': " << found[0]->to_string();
  }
}

/// Nothing is left anywhere, and everybody can still work together.
void expect_healthy(Random& random, Cluster& cluster, std::uint64_t number) {
  TestOp op = all_reduce(random, cluster, everybody(cluster), 0, number);
  for (std::size_t i = 0; i < op.ranks.size(); ++i) cluster.submit(op.ranks[i], op.operation(i));
  ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20))) << "stuck after the failure";
  expect_good(cluster, op);
  cluster.expect_receives_for_all();
  for (std::uint32_t lane = 0; lane < cluster.options().lanes; ++lane) {
    EXPECT_EQ(cluster.lane(lane).stats().slots_in_use, 0u);
  }
}

void submit_at(Cluster& cluster, Instant when, TestOp& op, std::size_t index) {
  cluster.run_until(when);
  cluster.submit(op.ranks[index], op.operation(index));
}

Instant soon(Random& random, const Cluster& cluster) {
  return cluster.now() + std::chrono::nanoseconds(pick(random, 0, 50'000));
}

void for_each_seed(std::uint64_t count, const std::function<void(Random&, std::uint64_t)>& run) {
  const SeedRange range = seeds(count);
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    Random random(seed);
    run(random, seed);
    if (::testing::Test::HasFailure()) {
      FAIL() << "seed " << seed << " fails; HERRING_TEST_SEED=" << seed << " replays it";
    }
  }
}

/// "rank 3", "ranks 0-2, 5": how a person reads a sorted list of ranks.
std::string rank_list(const std::vector<std::uint32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text.append(last == i + 1 ? ", " : "-").append(std::to_string(ranks[last]));
    i = last + 1;
  }
  return text;
}

/// Makes one rank say something else.
OpDescriptor dissent(Random& random, const OpDescriptor& descriptor) {
  OpDescriptor other = descriptor;
  switch (pick(random, 0, 5)) {
    case 0:
      other.dtype = DataType::kInt32;  // The same number of bytes.
      break;
    case 1:
      set_size(other, DataType::kFloat32, descriptor.shape[0] + pick(random, 1, 500));
      break;
    case 2:
      other.reduce = ReduceOp::kMax;
      break;
    case 3:
      other.dims = 2;
      other.shape[1] = 1;
      break;
    case 4:
      other.collective = Collective::kBroadcast;
      break;
    default:
      other = {};
      other.collective = Collective::kBarrier;
  }
  return other;
}

/// Where memory or a network card is broken for good, operations fail and say between whom; none ends with wrong data.
TEST(EngineFailures, DataThatIsDamagedAgainAndAgainFailsTheOperationEverywhere) {
  std::uint64_t corrupted = 0;
  for_each_seed(300, [&corrupted](Random& random, std::uint64_t seed) {
    ClusterOptions options = failure_options(random, seed);
    options.checksum = true;
    options.max_damaged = 2;
    options.sim.damage_chance = 0.15;
    options.sim.damage_head_bytes = 0;
    options.max_eager_bytes = 0;
    Cluster cluster(options);
    TestOp op = all_reduce(random, cluster, everybody(cluster), 0, 1);
    op.timeout = std::chrono::seconds(20);
    for (std::size_t i = 0; i < op.ranks.size(); ++i) submit_at(cluster, soon(random, cluster), op, i);
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(100))) << "stuck";
    bool all_good = true;
    for (std::size_t i = 0; i < op.ranks.size(); ++i) {
      const auto found = outcomes(cluster, op.ranks[i], op.key);
      ASSERT_EQ(found.size(), 1u) << "rank " << op.ranks[i];
      if (found[0]->is_ok()) {
        EXPECT_EQ(op.result(i), op.expected[i]) << "rank " << op.ranks[i];
        continue;
      }
      all_good = false;
      if (found[0]->code() != Code::kCorrupted) continue;
      ++corrupted;
      const bool names_it = found[0]->message().find("rank ") != std::string::npos ||
                            found[0]->message().find("server lane ") != std::string::npos;
      EXPECT_TRUE(names_it) << found[0]->to_string();
    }
    if (!all_good) return;
    cluster.expect_receives_for_all();
  });
  EXPECT_GT(corrupted, 50u);
}

TEST(EngineFailures, RanksThatDisagreeAllLearnWhoSaidWhatAndNothingElseSuffers) {
  for_each_seed(1000, [](Random& random, std::uint64_t seed) {
    Cluster cluster(failure_options(random, seed));
    TestOp good = all_reduce(random, cluster, everybody(cluster), 0, 1);
    TestOp bad = all_reduce(random, cluster, everybody(cluster), 0, 2);
    const std::size_t odd = pick(random, 0, bad.ranks.size() - 1);
    const OpDescriptor other = dissent(random, bad.descriptor);
    std::vector<std::byte> odd_memory(other.part_bytes);
    for (std::size_t i = 0; i < bad.ranks.size(); ++i) {
      const bool good_first = chance(random, 0.5);
      if (good_first) submit_at(cluster, soon(random, cluster), good, i);
      worker::Operation operation = bad.operation(i);
      if (i == odd) {
        operation.descriptor = other;
        operation.memory = odd_memory;
        operation.is_on_device = false;
        operation.results = {};
      }
      cluster.submit(bad.ranks[i], operation);
      if (!good_first) submit_at(cluster, soon(random, cluster), good, i);
    }
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    expect_good(cluster, good);
    std::vector<std::uint32_t> rest = bad.ranks;
    std::erase(rest, odd);
    const std::string odd_said = "rank " + std::to_string(odd) + " said " + to_string(other);
    const std::string rest_said = rank_list(rest) + " said " + to_string(bad.descriptor);
    for (const std::uint32_t rank : bad.ranks) {
      expect_error(cluster, rank, bad.key, Code::kMismatch, {odd_said, rest_said});
      EXPECT_LE(outcomes(cluster, rank, bad.key).at(0)->message().size(), 1024u);
    }
    expect_healthy(random, cluster, 3);
  });
}

TEST(EngineFailures, ARankThatNeverComesIsNamedAndHearsOfItWhenItDoes) {
  for_each_seed(500, [](Random& random, std::uint64_t seed) {
    ClusterOptions options = failure_options(random, seed);
    options.sim.damage_chance = 0;  // A damaged announce may take longer than the time-out.
    Cluster cluster(options);
    TestOp op = all_reduce(random, cluster, everybody(cluster), 0, 1);
    op.timeout = std::chrono::milliseconds(50);
    const std::size_t absent = pick(random, 0, op.ranks.size() - 1);
    for (std::size_t i = 0; i < op.ranks.size(); ++i) {
      if (i != absent) submit_at(cluster, soon(random, cluster), op, i);
    }
    const Instant start = cluster.now();
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    EXPECT_LT(cluster.now() - start, std::chrono::milliseconds(100)) << "the servers' verdict comes with the time-out";
    const std::string missing = "rank " + std::to_string(absent) + " had not called " + to_string(op.descriptor);
    for (const std::uint32_t rank : op.ranks) {
      if (rank != absent) expect_error(cluster, rank, op.key, Code::kTimeout, {missing});
    }
    cluster.submit(op.ranks[absent], op.operation(absent));
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    expect_error(cluster, static_cast<std::uint32_t>(absent), op.key, Code::kTimeout, {missing});
    expect_healthy(random, cluster, 2);
  });
}

TEST(EngineFailures, AMissingMemberOfAGroupIsNamedByRankOnceTheGroupHasWorked) {
  Random random(1);
  ClusterOptions options;
  options.workers = 6;
  options.lanes = 2;
  Cluster cluster(options);
  const std::vector<std::uint32_t> ranks = {1, 3, 5};
  const auto miss = [&](std::uint64_t number) {
    TestOp op = all_reduce(random, cluster, ranks, 7, number);
    op.timeout = std::chrono::milliseconds(50);
    cluster.submit(1, op.operation(0));
    cluster.submit(5, op.operation(2));
    EXPECT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    return outcomes(cluster, 1, op.key).at(0)->message();
  };
  EXPECT_NE(miss(1).find("member 1 of the 3 of group 7 had not called"), std::string::npos) << miss(2);
  TestOp good = all_reduce(random, cluster, ranks, 7, 10);
  for (std::size_t i = 0; i < 3; ++i) cluster.submit(ranks[i], good.operation(i));
  ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
  expect_good(cluster, good);
  EXPECT_NE(miss(11).find("rank 3 had not called"), std::string::npos) << miss(12);
}

TEST(EngineFailures, AnAbortEndsTheOperationForAllWithItsReason) {
  for_each_seed(1000, [](Random& random, std::uint64_t seed) {
    Cluster cluster(failure_options(random, seed));
    TestOp op = all_reduce(random, cluster, everybody(cluster), 0, 1);
    const std::size_t quitter = pick(random, 0, op.ranks.size() - 1);
    const bool submits = chance(random, 0.7);
    const Status why(Code::kCancelled, "rank " + std::to_string(quitter) + " was told to stop");
    const std::size_t abort_before = pick(random, 0, op.ranks.size());
    for (std::size_t i = 0; i <= op.ranks.size(); ++i) {
      if (i == abort_before && !submits) cluster.abort(op.ranks[quitter], op.operation(quitter), why);
      if (i == op.ranks.size()) break;
      if (i != quitter || submits) submit_at(cluster, soon(random, cluster), op, i);
    }
    if (submits) {
      cluster.run_until(soon(random, cluster) + std::chrono::nanoseconds(pick(random, 0, 400'000)));
      if (outcomes(cluster, op.ranks[quitter], op.key).empty()) {
        cluster.abort(op.ranks[quitter], op.operation(quitter), why);
      }
    }
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    for (std::size_t i = 0; i < op.ranks.size(); ++i) {
      const auto found = outcomes(cluster, op.ranks[i], op.key);
      if (i == quitter && !submits) {
        EXPECT_EQ(found.size(), 0u);
        continue;
      }
      ASSERT_EQ(found.size(), 1u) << "rank " << i;
      if (found[0]->is_ok()) {
        EXPECT_TRUE(submits) << "rank " << i << " cannot have had everybody's data";
        EXPECT_EQ(op.result(i), op.expected[i]);
      } else {
        EXPECT_EQ(found[0]->code(), Code::kCancelled) << found[0]->to_string();
        EXPECT_EQ(found[0]->message(), why.message());
      }
    }
    expect_healthy(random, cluster, 2);
  });
}

/// Two processes of each host share out the chunks, often by lane: no lane hears from all of them. Those of a host hear
/// from each other.
TEST(EngineFailures, AnAbortOfOneOwnerEndsTheOperationOnAllHosts) {
  for_each_seed(1000, [](Random& random, std::uint64_t seed) {
    ClusterOptions options = failure_options(random, seed);
    options.workers = chance(random, 0.5) ? 4 : 6;
    options.lanes = options.near ? options.workers : static_cast<std::uint32_t>(pick(random, 2, 6));
    options.slots = options.workers * 2;
    if (!options.failover && seed / 3 % 4 != 0) options.rails = 2;
    Cluster cluster(options);
    TestOp op = all_reduce(random, cluster, everybody(cluster), 0, 1);
    op.owners = 2;
    if (options.rails != op.owners) op.one_hop_bytes = 0;
    fill(op, random, cluster.worker_config(0));
    const std::size_t quitter = pick(random, 0, op.ranks.size() - 1);
    const bool submits = chance(random, 0.5);
    const Status why(Code::kCancelled, "rank " + std::to_string(quitter) + " was told to stop");
    const auto is_over = [&](std::size_t i) { return !outcomes(cluster, op.ranks[i], op.key).empty(); };
    const auto has_failed = [&](std::size_t i) {
      return is_over(i) && !outcomes(cluster, op.ranks[i], op.key).front()->is_ok();
    };
    bool has_quit = false;
    cluster.after_step([&] {
      bool any = false;
      for (std::size_t i = 0; has_quit && i < op.ranks.size(); ++i) {
        const std::size_t mate = i ^ 1;
        const bool tells = i == quitter || has_failed(i);
        if (!tells || is_over(mate) || (mate == quitter && !submits)) continue;
        cluster.abort(op.ranks[mate], op.shape(mate), why);
        any |= is_over(mate);
      }
      return any;
    });
    for (std::size_t i = 0; i < op.ranks.size(); ++i) {
      if (i != quitter || submits) submit_at(cluster, soon(random, cluster), op, i);
    }
    cluster.run_until(soon(random, cluster) + std::chrono::nanoseconds(pick(random, 0, 800'000)));
    const Instant start = cluster.now();
    has_quit = !is_over(quitter);
    if (has_quit) cluster.abort(op.ranks[quitter], op.operation(quitter), why);
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    EXPECT_LT(cluster.now() - start, std::chrono::seconds(10)) << "somebody had to wait for a time-out";
    for (std::size_t i = 0; i < op.ranks.size(); ++i) {
      const auto found = outcomes(cluster, op.ranks[i], op.key);
      ASSERT_EQ(found.size(), i == quitter && !submits ? 0u : 1u) << "rank " << i;
      if (found.empty()) continue;
      if (found[0]->is_ok()) {
        EXPECT_EQ(op.result(i), op.expected[i]);
      } else {
        EXPECT_EQ(found[0]->code(), Code::kCancelled) << found[0]->to_string();
      }
    }
    expect_healthy(random, cluster, 2);
  });
}

TEST(EngineFailures, TheFailedKeyWorksAgain) {
  for_each_seed(300, [](Random& random, std::uint64_t seed) {
    Cluster cluster(without_failover(failure_options(random, seed)));
    TestOp op = all_reduce(random, cluster, everybody(cluster), 0, 77);
    for (std::size_t i = 0; i < op.ranks.size(); ++i) cluster.submit(op.ranks[i], op.operation(i));
    cluster.run_until(soon(random, cluster));
    const Status why(Code::kCancelled, "stop");
    for (std::size_t i = 0; i < op.ranks.size(); ++i) {
      if (outcomes(cluster, op.ranks[i], op.key).empty()) cluster.abort(op.ranks[i], op.operation(i), why);
    }
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    fill(op, random, cluster.worker_config(0));
    for (std::size_t i = 0; i < op.ranks.size(); ++i) cluster.submit(op.ranks[i], op.operation(i));
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    for (std::size_t i = 0; i < op.ranks.size(); ++i) {
      const auto found = outcomes(cluster, op.ranks[i], op.key);
      ASSERT_EQ(found.size(), 2u);
      EXPECT_TRUE(found[1]->is_ok()) << found[1]->to_string();
      EXPECT_EQ(op.result(i), op.expected[i]);
    }
  });
}

TEST(EngineFailures, ALostWorkerFailsWhatNeedsItAndNothingElse) {
  for_each_seed(600, [](Random& random, std::uint64_t seed) {
    TestOp all, some, later, doomed;  // Before the cluster: the dead worker's operations never end.
    Cluster cluster(failure_options(random, seed));
    const auto dead = static_cast<std::uint32_t>(pick(random, 0, cluster.options().workers - 1));
    std::vector<std::uint32_t> others = everybody(cluster);
    std::erase(others, dead);
    all = all_reduce(random, cluster, everybody(cluster), 0, 1);
    some = all_reduce(random, cluster, others, 5, 1);
    const bool dead_submits = chance(random, 0.6);
    for (std::size_t i = 0; i < all.ranks.size(); ++i) {
      if (all.ranks[i] != dead || dead_submits) submit_at(cluster, soon(random, cluster), all, i);
    }
    for (std::size_t i = 0; i < some.ranks.size(); ++i) {
      if (chance(random, 0.5)) cluster.run_until(soon(random, cluster));
      cluster.submit(some.ranks[i], some.operation(i));
    }
    cluster.run_until(soon(random, cluster));
    const std::string why = "worker " + std::to_string(dead) + " (pid 4711) closed its connection";
    cluster.lose_worker(dead, why);
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    for (const std::uint32_t rank : others) {
      const auto found = outcomes(cluster, rank, all.key);
      ASSERT_EQ(found.size(), 1u);
      if (!found[0]->is_ok()) {
        EXPECT_EQ(found[0]->code(), Code::kPeerLost) << found[0]->to_string();
        EXPECT_EQ(found[0]->message(), why);
      }
    }
    expect_good(cluster, some);
    later = all_reduce(random, cluster, others, 5, 2);
    doomed = all_reduce(random, cluster, everybody(cluster), 0, 2);
    for (std::size_t i = 0; i < others.size(); ++i) {
      cluster.submit(others[i], later.operation(i));
      cluster.submit(others[i], doomed.operation(others[i]));
    }
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    expect_good(cluster, later);
    for (const std::uint32_t rank : others) expect_error(cluster, rank, doomed.key, Code::kPeerLost, {why});
  });
}

/// The news that a rank leaves goes another way than its data, and may be faster.
TEST(EngineFailures, WhoLeavesWhenNothingOfItIsNeededFailsNobody) {
  for_each_seed(600, [](Random& random, std::uint64_t seed) {
    Cluster cluster(failure_options(random, seed));
    std::vector<TestOp> ops;
    for (std::uint64_t number = 1; number <= 3; ++number) {
      ops.push_back(all_reduce(random, cluster, everybody(cluster), 0, number));
    }
    std::vector<bool> has_left(cluster.options().workers);
    cluster.after_step([&] {
      bool any = false;
      for (std::uint32_t rank = 0; rank < has_left.size(); ++rank) {
        if (has_left[rank] || cluster.completions(rank).size() < ops.size() || cluster.worker(rank).is_needed())
          continue;
        cluster.leave(rank, "rank " + std::to_string(rank) + " has left");
        has_left[rank] = any = true;
      }
      return any;
    });
    for (TestOp& op : ops) {
      for (std::size_t i = 0; i < op.ranks.size(); ++i) submit_at(cluster, soon(random, cluster), op, i);
    }
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    for (TestOp& op : ops) expect_good(cluster, op);
    EXPECT_TRUE(std::ranges::all_of(has_left, [](bool left) { return left; }));
  });
}

TEST(EngineFailures, ALostLaneFailsEveryOperationThatUsesIt) {
  for_each_seed(400, [](Random& random, std::uint64_t seed) {
    Cluster cluster(without_failover(failure_options(random, seed)));
    TestOp op = all_reduce(random, cluster, everybody(cluster), 0, 1);
    for (std::size_t i = 0; i < op.ranks.size(); ++i) submit_at(cluster, soon(random, cluster), op, i);
    const auto dead = static_cast<std::uint32_t>(pick(random, 0, cluster.options().lanes - 1));
    cluster.lose_lane(dead, "server 3 (pid 4712) was silent for 5 s");
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    for (const std::uint32_t rank : op.ranks) {
      const auto found = outcomes(cluster, rank, op.key);
      ASSERT_EQ(found.size(), 1u);
      if (found[0]->is_ok()) continue;  // Had its results before, or the operation never used that lane.
      EXPECT_EQ(found[0]->code(), Code::kPeerLost) << found[0]->to_string();
      EXPECT_EQ(found[0]->message(), "server 3 (pid 4712) was silent for 5 s");
    }
  });
}

TEST(EngineFailures, WithFailoverTheLastLanesDeathIsAnErrorOfEveryRank) {
  for_each_seed(300, [](Random& random, std::uint64_t seed) {
    ClusterOptions options = failure_options(random, seed);
    options.failover = true;
    Cluster cluster(options);
    TestOp op = all_reduce(random, cluster, everybody(cluster), 0, 1);
    for (std::size_t i = 0; i < op.ranks.size(); ++i) submit_at(cluster, soon(random, cluster), op, i);
    for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
      cluster.run_until(soon(random, cluster));
      cluster.lose_lane(lane, "server " + std::to_string(lane) + " is lost");
    }
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    const std::string why = "server " + std::to_string(options.lanes - 1) + " is lost";
    for (const std::uint32_t rank : op.ranks) {
      const auto found = outcomes(cluster, rank, op.key);
      ASSERT_EQ(found.size(), 1u);
      if (!found[0]->is_ok()) expect_error(cluster, rank, op.key, Code::kPeerLost, {why});
    }
    TestOp later = all_reduce(random, cluster, everybody(cluster), 0, 2);
    for (std::size_t i = 0; i < later.ranks.size(); ++i) cluster.submit(later.ranks[i], later.operation(i));
    for (const std::uint32_t rank : op.ranks) expect_error(cluster, rank, later.key, Code::kPeerLost, {why});
  });
}

/// Sends messages to everybody's control tag that no correct process sends.
class Vandal {
 public:
  Vandal(Cluster& cluster, std::uint32_t peer) : cluster_(cluster), endpoint_(cluster.endpoint(peer)), self_(peer) {}

  void strike(Random& random) {
    const std::uint32_t targets = cluster_.options().workers + cluster_.options().lanes;
    const PeerId to{static_cast<std::uint32_t>(pick(random, 0, targets - 1))};
    std::vector<std::byte>& bytes = sent_.emplace_back();
    if (chance(random, 0.2)) {
      bytes = random_elements(random, DataType::kUInt8, pick(random, 0, 300));
    } else {
      wire::Header header;
      header.type = static_cast<wire::MessageType>(pick(random, 1, 18));
      header.job_id = chance(random, 0.2) ? 1 : Cluster::kJob;
      header.epoch = chance(random, 0.1) ? 3 : 0;
      header.sender = chance(random, 0.5) ? self_ : static_cast<std::uint32_t>(pick(random, 0, targets + 2));
      header.op = pick(random, 0, 3);
      header.tag = random();
      // Far beyond what any worker has announced: not taken for one of its own.
      header.offset = (1ull << 50) + pick(random, 0, 1000);
      header.chunk = static_cast<std::uint32_t>(random());
      header.count = static_cast<std::uint32_t>(random()) | 0x8000'0000u;
      header.flags = static_cast<std::uint16_t>(pick(random, 0, 255));
      const std::vector<std::byte> body = random_elements(random, DataType::kUInt8, pick(random, 0, 300));
      header.payload_bytes = static_cast<std::uint32_t>(chance(random, 0.1) ? 5 : body.size());
      const auto head = wire::encode(header);
      bytes.assign(head.begin(), head.end());
      bytes.insert(bytes.end(), body.begin(), body.end());
      if (chance(random, 0.2)) bytes[pick(random, 0, bytes.size() - 1)] ^= std::byte{0x10};
    }
    // A refused post is simply not sent.
    static_cast<void>(endpoint_.post_send(to, kControlTag, bytes, {}, Token{sent_.size()}));
  }

 private:
  Cluster& cluster_;
  transport::Endpoint& endpoint_;
  std::uint32_t self_;
  std::deque<std::vector<std::byte>> sent_;
};

TEST(EngineFailures, HostileMessagesAreCountedAndChangeNothing) {
  std::uint64_t rejected = 0;
  for_each_seed(800, [&](Random& random, std::uint64_t seed) {
    ClusterOptions options = failure_options(random, seed);
    options.strangers = 1;
    Cluster cluster(options);
    Vandal vandal(cluster, options.workers + options.lanes);
    std::vector<TestOp> ops;
    for (std::uint64_t number = 1; number <= 3; ++number) {
      ops.push_back(all_reduce(random, cluster, everybody(cluster), 0, number));
    }
    for (TestOp& op : ops) {
      for (std::size_t i = 0; i < op.ranks.size(); ++i) {
        submit_at(cluster, soon(random, cluster), op, i);
        vandal.strike(random);
      }
    }
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20)));
    for (TestOp& op : ops) expect_good(cluster, op);
    cluster.expect_receives_for_all();
    for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
      rejected += cluster.lane(lane).stats().messages_rejected + cluster.lane_pump_stats(lane).malformed;
    }
  });
  EXPECT_GT(rejected, 0u);
}

}  // namespace
}  // namespace herring::testing
