#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <map>

#include "engines/random_job.h"

namespace herring::testing {
namespace {

/// A lane dies, or is only believed dead and goes on for a while; the workers hear of it one after the other.
struct Death {
  std::uint32_t lane = 0;
  bool is_real = true;
  Instant when;
  std::vector<Instant> told;  // By worker.
};

/// At most two, one lane being left; all workers hear of them in the same order.
std::vector<Death> random_deaths(Random& random, const Cluster& cluster) {
  const ClusterOptions& options = cluster.options();
  std::vector<std::uint32_t> lanes(options.lanes);
  for (std::uint32_t lane = 0; lane < options.lanes; ++lane) lanes[lane] = lane;
  std::shuffle(lanes.begin(), lanes.end(), random);
  lanes.resize(std::min<std::size_t>(pick(random, 0, 2), options.lanes - 1));
  const std::uint64_t slow = chance(random, 0.5) ? 300'000 : 20'000;
  Instant when = cluster.now();
  std::vector<Instant> heard(options.workers, when);
  std::vector<Death> deaths;
  for (const std::uint32_t lane : lanes) {
    Death death{lane, chance(random, 0.7), when + std::chrono::nanoseconds(pick(random, 0, slow)), {}};
    when = death.when;
    for (Instant& last : heard) {
      last = std::max(last, death.when + std::chrono::nanoseconds(pick(random, 0, slow)));
      death.told.push_back(last);
    }
    deaths.push_back(std::move(death));
  }
  return deaths;
}

/// Links that hold everything back for a while. From numbers of their own: the rest of a seed stays as it is.
struct Cut {
  std::uint32_t worker = 0;
  std::uint32_t lane = 0;
  Instant from;
  Instant until;
};

std::vector<Cut> random_cuts(Random& faults, const Cluster& cluster) {
  std::vector<Cut> cuts;
  if (!chance(faults, 0.3)) return cuts;
  const std::uint64_t longest = chance(faults, 0.3) ? 500'000'000 : 1'000'000;
  for (std::uint64_t i = pick(faults, 1, 3); i > 0; --i) {
    const auto worker = static_cast<std::uint32_t>(pick(faults, 0, cluster.options().workers - 1));
    const auto lane = static_cast<std::uint32_t>(pick(faults, 0, cluster.options().lanes - 1));
    const Instant from = cluster.now() + std::chrono::nanoseconds(pick(faults, 0, 300'000));
    cuts.push_back({worker, lane, from, from + std::chrono::nanoseconds(pick(faults, 1, longest))});
  }
  return cuts;
}

struct Event {
  Instant when;
  std::function<void()> run;
};

/// Everything that happens in one round, in the order of time.
std::vector<Event> plan_round(Random& random, Cluster& cluster, std::vector<TestOp>& ops,
                              const std::vector<Death>& deaths, const std::vector<Cut>& cuts) {
  std::vector<Event> events;
  for (const Cut& cut : cuts) {
    const std::uint32_t lane = cluster.options().workers + cut.lane;
    events.push_back({cut.from, [&cluster, lane, cut] { cluster.network().partition(cut.worker, lane); }});
    events.push_back({cut.until, [&cluster, lane, cut] { cluster.network().heal(cut.worker, lane); }});
  }
  for (const Submission& next : random_order(random, cluster, ops)) {
    TestOp& op = ops[next.op];
    events.push_back(
        {next.when, [&cluster, &op, index = next.index] { cluster.submit(op.ranks[index], op.operation(index)); }});
  }
  for (const Death& death : deaths) {
    Instant last = death.when;
    for (std::uint32_t rank = 0; rank < death.told.size(); ++rank) {
      events.push_back({death.told[rank], [&cluster, rank, lane = death.lane] {
                          cluster.tell_lost(rank, lane, "lane " + std::to_string(lane) + " is lost");
                        }});
      last = std::max(last, death.told[rank] + std::chrono::microseconds(50));
    }
    events.push_back({death.is_real ? death.when : last, [&cluster, lane = death.lane] { cluster.stop_lane(lane); }});
  }
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.when < b.when; });
  return events;
}

/// Each operation ends once, well, with the right bits in the very moment in which it ends: its memory is the user's
/// then, who writes over it at once.
class Outcomes {
 public:
  Outcomes(Cluster& cluster, std::vector<TestOp>& ops) : ops_(ops) {
    cluster.on_complete([this](std::uint32_t rank, const CompleteAction& action) { check(rank, action); });
  }

  void start_round(std::uint64_t expected) {
    for (const auto& [place, times] : done_) EXPECT_EQ(times, 1) << "rank " << place.first;
    EXPECT_EQ(done_.size(), expected_);
    done_.clear();
    expected_ = expected;
  }

 private:
  void check(std::uint32_t rank, const CompleteAction& action) {
    EXPECT_TRUE(action.status.is_ok()) << "rank " << rank << ": " << action.status.to_string();
    const auto op = std::find_if(ops_.begin(), ops_.end(), [&](const TestOp& one) { return one.key == action.key; });
    ASSERT_NE(op, ops_.end());
    const auto index =
        static_cast<std::size_t>(std::find(op->ranks.begin(), op->ranks.end(), rank) - op->ranks.begin());
    ASSERT_LT(index, op->ranks.size());
    EXPECT_EQ(op->result(index), op->expected[index])
        << "rank " << rank << " op " << op->key.op << ' ' << to_string(op->descriptor);
    for (auto* bytes : {&op->memory[index], &op->result(index)})
      std::fill(bytes->begin(), bytes->end(), std::byte{0xBD});
    ++done_[{rank, action.key}];
  }

  std::vector<TestOp>& ops_;
  std::map<std::pair<std::uint32_t, OpKey>, int> done_;
  std::uint64_t expected_ = 0;
};

void check_end(Cluster& cluster, bool is_disturbed) {
  const ClusterOptions& options = cluster.options();
  cluster.expect_receives_for_all();
  EXPECT_EQ(cluster.network().stats().truncated, 0u);
  for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
    if (cluster.is_dead(options.workers + lane)) continue;
    const server::EngineStats& stats = cluster.lane(lane).stats();
    EXPECT_TRUE(cluster.lane(lane).is_idle()) << "lane " << lane;
    EXPECT_EQ(stats.slots_in_use, 0u);
    EXPECT_EQ(stats.unsettled, 0u);
    EXPECT_LE(stats.slots_peak, cluster.slots());
    EXPECT_EQ(stats.messages_rejected, 0u) << "lane " << lane;
  }
  for (std::uint32_t rank = 0; rank < options.workers; ++rank) {
    EXPECT_TRUE(cluster.worker(rank).is_idle()) << "rank " << rank;
    EXPECT_EQ(cluster.worker(rank).stats().bytes_retained, 0u) << "rank " << rank;
    if (!is_disturbed) {
      EXPECT_EQ(cluster.worker(rank).stats().messages_rejected, 0u) << "rank " << rank;
    }
  }
}

/// What the schedules met on their way: a generator that no longer reaches these proves less than it says.
struct Coverage {
  std::uint64_t full_lanes = 0;      // Lanes that had every slot in use.
  std::uint64_t slotless_lanes = 0;  // Lanes that finished operations without a slot: eager data, barriers.
  std::uint64_t refused_posts = 0;
  std::uint64_t operations = 0;
  std::uint64_t messages = 0;
  std::uint64_t deaths = 0;
  std::uint64_t runs = 0;           // Chunks that travelled and were summed together.
  std::uint64_t one_hop = 0;        // Operations that the lane in each worker summed for it alone.
  std::uint64_t copied = 0;         // Chunks of these that went from a copy.
  std::uint64_t lent = 0;           // Summed where their worker has them.
  std::uint64_t items_moved = 0;    // Announced to an heir.
  std::uint64_t chunks_copied = 0;  // Results that an heir took from who had them.
  std::uint64_t cuts = 0;
  std::uint64_t on_device = 0;   // Operations of workers whose memory is a device's.
  std::uint64_t duplicated = 0;  // Messages that came again by themselves.
  std::uint64_t damaged = 0;     // Messages, on the way between processes that check.
  std::uint64_t resent = 0;
};

void count(const Cluster& cluster, const transport::SimStats& network, Coverage& coverage) {
  for (std::uint32_t lane = 0; lane < cluster.options().lanes; ++lane) {
    const server::EngineStats& stats = cluster.lane(lane).stats();
    coverage.full_lanes += stats.slots_peak == cluster.slots() ? 1 : 0;
    coverage.slotless_lanes += stats.ops_completed > 0 && stats.slots_peak == 0 ? 1 : 0;
    coverage.operations += stats.ops_completed;
    coverage.runs += stats.runs;
    coverage.lent += stats.lent;
    coverage.one_hop += stats.one_hop;
    coverage.chunks_copied += stats.chunks_copied;
  }
  for (std::uint32_t rank = 0; rank < cluster.options().workers; ++rank) {
    coverage.items_moved += cluster.worker(rank).stats().items_moved;
    coverage.copied += cluster.worker(rank).stats().copied;
  }
  for (std::uint32_t peer = 0; peer < cluster.options().workers + cluster.options().lanes; ++peer) {
    coverage.resent += cluster.checked_stats(peer).resent;
  }
  coverage.damaged += network.damaged;
  coverage.duplicated += network.duplicated;
  coverage.refused_posts += network.refused;
  coverage.messages += network.messages;
}

/// Who still waits, for who looks into a deadlock.
std::string describe(const Cluster& cluster, const std::vector<Death>& deaths) {
  const ClusterOptions& options = cluster.options();
  std::string text = std::to_string(options.workers) + " workers, " + std::to_string(options.lanes) + " lanes";
  if (options.failover) text += ", failover";
  for (const Death& death : deaths) {
    text += "; lane " + std::to_string(death.lane) + (death.is_real ? " dies" : " is given up");
  }
  for (std::uint32_t rank = 0; rank < options.workers; ++rank) {
    if (!cluster.worker(rank).is_idle()) text += "; worker " + std::to_string(rank) + " waits";
  }
  for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
    if (cluster.is_dead(options.workers + lane) || cluster.lane(lane).is_idle()) continue;
    text += "; lane " + std::to_string(lane) + " waits (" + std::to_string(cluster.lane(lane).stats().unsettled) +
            " unsettled)";
  }
  return text;
}

/// Half of the schedules run with failover, most of them with deaths.
ClusterOptions schedule_options(Random& random, std::uint64_t seed) {
  ClusterOptions options = random_options(random, seed);
  // A third of them with checksums, on networks that damage up to every tenth message.
  options.checksum = seed % 3 == 0;
  if (options.checksum) {
    options.max_damaged = 1000;
    options.sim.damage_head_bytes = 144;
    if (chance(random, 0.8)) options.sim.damage_chance = static_cast<double>(pick(random, 1, 10)) / 100;
  }
  if (seed % 2 != 0) return options;
  options.failover = true;
  if (options.lanes == 1 && !options.weights.empty()) options.weights.push_back(1);
  options.lanes = std::max(options.lanes, 2u);
  options.lane_slots = static_cast<std::uint32_t>(pick(random, 1, 2 * std::max(options.window, options.max_window)));
  options.retain_part_bytes = chance(random, 0.5) ? 0 : 16384;
  options.retain_bytes = pick(random, 0, 40'000);
  return options;
}

void run_schedule(std::uint64_t seed, Coverage& coverage) {
  Random random(seed);
  Random faults(~seed);
  ClusterOptions chosen = schedule_options(random, seed);
  // Where messages carry numbers; a network without them brings each once.
  chosen.strict = seed % 5 == 0;
  if (chosen.checksum && chance(faults, 0.5)) chosen.sim.duplicate_chance = 0.1;
  Cluster cluster(chosen);
  const bool failover = cluster.options().failover;
  for (std::uint32_t peer = 0; peer < cluster.options().workers + cluster.options().lanes; ++peer) {
    if (chance(random, 0.1)) cluster.network().set_slowness(peer, static_cast<double>(pick(random, 2, 20)));
  }
  std::vector<TestOp> ops = random_ops(random, cluster);
  Outcomes outcomes(cluster, ops);
  // A second round uses the same keys again, as operations named by the user do; with failover, other keys.
  const std::size_t rounds = chance(random, 0.2) ? 2 : 1;
  const std::size_t death_round = pick(random, 0, rounds - 1);
  bool is_disturbed = false;
  for (std::size_t round = 0; round < rounds; ++round) {
    std::uint64_t expected = 0;
    for (TestOp& op : ops) {
      if (round > 0 && failover) op.key.op += 1000;
      if (round > 0) fill(op, random, cluster.worker_config(0));
      expected += op.ranks.size();
    }
    for (TestOp& op : ops) {
      put_on_devices(op, chosen);
      coverage.on_device += static_cast<std::uint64_t>(std::ranges::count(op.on_device, true));
    }
    outcomes.start_round(expected);
    std::vector<Death> deaths;
    if (failover && round == death_round) deaths = random_deaths(random, cluster);
    is_disturbed |= !deaths.empty();
    coverage.deaths += deaths.size();
    const std::vector<Cut> cuts = random_cuts(faults, cluster);
    coverage.cuts += cuts.size();
    for (const Event& event : plan_round(random, cluster, ops, deaths, cuts)) {
      cluster.run_until(event.when);
      event.run();
    }
    ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(20))) << "deadlock: " << describe(cluster, deaths);
  }
  outcomes.start_round(0);
  check_end(cluster, is_disturbed);
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
            << coverage.messages << " messages, " << coverage.runs << " runs, " << coverage.lent << " pushes lent, "
            << coverage.one_hop << " operations in one hop, " << coverage.copied << " chunks of them copied, "
            << coverage.full_lanes << " lanes with every slot in use, " << coverage.slotless_lanes
            << " that needed none, " << coverage.refused_posts << " posts refused, " << coverage.deaths << " deaths, "
            << coverage.items_moved << " items moved, " << coverage.chunks_copied << " chunks copied, "
            << coverage.damaged << " messages damaged, " << coverage.resent << " sent again, " << coverage.duplicated
            << " doubled, " << coverage.cuts << " links cut, " << coverage.on_device << " in devices\n";
  if (range.count < 1000) return;
  EXPECT_GT(coverage.full_lanes, range.count / 4);
  EXPECT_GT(coverage.slotless_lanes, range.count / 10);
  EXPECT_GT(coverage.runs, range.count / 4);
  EXPECT_GT(coverage.lent, range.count / 10);
  EXPECT_GT(coverage.one_hop, range.count / 4);
  EXPECT_GT(coverage.copied, range.count / 10);
  EXPECT_GT(coverage.refused_posts, range.count);
  EXPECT_GT(coverage.items_moved, range.count / 2);
  EXPECT_GT(coverage.chunks_copied, range.count / 50);
  EXPECT_GT(coverage.damaged, range.count);
  EXPECT_GT(coverage.resent, range.count);
  EXPECT_GT(coverage.duplicated, range.count);
  EXPECT_GT(coverage.cuts, range.count / 4);
  EXPECT_GT(coverage.on_device, range.count / 2);
}

}  // namespace
}  // namespace herring::testing
