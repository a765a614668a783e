#include "elastic/world.h"

#include <gtest/gtest.h>

#include <iostream>
#include <random>

#include "seeds.h"

namespace herring::elastic::testing {
namespace {

struct Seen {
  std::uint64_t redone = 0;
  std::uint64_t delivered = 0;
  std::uint64_t failed = 0;
  std::uint64_t boundaries = 0;
  std::uint64_t switches = 0;
  std::uint64_t aborted = 0;
  std::uint64_t refused = 0;
  std::uint64_t anews = 0;
  void operator+=(const Seen& one) {
    redone += one.redone;
    delivered += one.delivered;
    failed += one.failed;
    boundaries += one.boundaries;
    switches += one.switches;
    aborted += one.aborted;
    refused += one.refused;
    anews += one.anews;
  }
};

/// What befalls the job.
struct Lot {
  std::uint32_t deaths = 0;
  std::uint32_t arrivals = 0;
  std::uint32_t restarts = 0;
  std::uint32_t servers = 0;
  bool is_elastic = true;
  std::uint32_t most_workers = 5;
  std::uint32_t aborts = 0;
  std::uint32_t quits = 0;
  std::uint32_t anews = 0;
  bool in_the_middle = false;
};

/// In jobs that are not elastic workers neither die nor come.
Seen play_one(std::uint64_t seed, const Lot& lot, std::uint64_t steps) {
  World world({2 + static_cast<std::uint32_t>(seed % (lot.most_workers - 1)), lot.servers, lot.is_elastic}, seed);
  World::Fate fate{lot.deaths, lot.arrivals,     lot.servers > 0 ? lot.restarts : 0, lot.aborts, lot.quits,
                   lot.anews,  lot.in_the_middle};
  if (!lot.is_elastic) fate = {.restarts = fate.restarts};
  const std::string problem = world.play(steps, fate);
  EXPECT_EQ(problem, "") << "seed " << seed << " fails";
  return {world.redone,   world.delivered, world.failed,  world.boundaries,
          world.switches, world.aborted,   world.refused, world.anews};
}

Seen play_all(std::uint64_t first, std::uint64_t count, const Lot& lot) {
  Seen seen;
  for (std::uint64_t seed = first; seed < first + count && !::testing::Test::HasFailure(); ++seed) {
    seen += play_one(seed, lot, 6);
  }
  return seen;
}

// Each seed: no deadlock, one outcome of every operation on all, every survivor's contribution in it, all steps done.

TEST(ElasticWorld, WithoutDeathsNothingIsDoneTwice) {
  const Seen seen = play_all(1, 300, {0, 0});
  EXPECT_EQ(seen.redone + seen.delivered + seen.failed + seen.boundaries, 0U);
}

TEST(ElasticWorld, DeathsCostNoOperation) {
  const Seen seen = play_all(1000, 1500, {1, 0});
  EXPECT_GT(seen.redone, 0U);
  EXPECT_GT(seen.delivered, 0U);
}

TEST(ElasticWorld, DeathsDuringRecoveryAreTheSameAgain) {
  const Seen seen = play_all(5000, 1500, {4, 0});
  EXPECT_GT(seen.redone, 0U);
  EXPECT_GT(seen.delivered, 0U);
  EXPECT_GT(seen.failed, 0U);  // Broadcasts whose root died: on all alike.
}

TEST(ElasticWorld, NewWorkersComeInBetweenSteps) {
  const Seen seen = play_all(9000, 1000, {0, 2});
  EXPECT_GT(seen.boundaries, 0U);
}

TEST(ElasticWorld, ServersComeBackWhileTrainingGoesOn) {
  EXPECT_GT(play_all(40000, 300, {.restarts = 3, .servers = 2, .is_elastic = false}).switches, 300U);
  const Seen seen = play_all(50000, 500, {.deaths = 2, .arrivals = 1, .restarts = 3, .servers = 2});
  EXPECT_GT(seen.switches, 100U);
  EXPECT_GT(seen.redone, 0U);
}

TEST(ElasticWorld, NewWorkersAndDeathsTogether) {
  const Seen seen = play_all(20000, 2000, {4, 3});
  EXPECT_GT(seen.boundaries, 0U);
  EXPECT_GT(seen.delivered, 0U);
}

TEST(ElasticWorld, AllStartAgainFromAnEarlierState) {
  const Seen calm = play_all(70000, 500, {.arrivals = 2, .anews = 3});
  EXPECT_GT(calm.anews, 0U);
  const Seen seen = play_all(80000, 1500, {.deaths = 3, .arrivals = 2, .restarts = 3, .servers = 2, .anews = 3});
  EXPECT_GT(seen.anews, 0U);
  EXPECT_GT(seen.switches, 0U);
}

TEST(ElasticWorld, AllStartAgainThoughSomeHaveWhatOthersGiveUp) {
  const Seen seen =
      play_all(75000, 1500, {.arrivals = 2, .restarts = 3, .servers = 2, .anews = 3, .in_the_middle = true});
  EXPECT_GT(seen.anews, 0U);
}

TEST(ElasticWorld, WorkersStopInTheMiddleOfWhateverTheyDo) {
  const Seen seen =
      play_all(60000, 1500,
               {.deaths = 1, .arrivals = 2, .restarts = 4, .servers = 2, .most_workers = 7, .aborts = 2, .quits = 2});
  EXPECT_GT(seen.aborted, 0U);
  EXPECT_GT(seen.refused, 0U);
  EXPECT_GT(seen.delivered, 0U);
}

/// All of it, at sizes up to 16 workers: what benchmarks/sim.py plays.
TEST(ElasticWorld, WhateverBefallsIt) {
  const herring::testing::SeedRange range = herring::testing::seeds(300);
  Seen seen;
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    std::mt19937_64 random(~seed);
    const auto pick = [&random](std::uint64_t below) { return static_cast<std::uint32_t>(random() % below); };
    const bool is_large = pick(4) == 0;
    Lot lot{pick(5), pick(4), pick(5), pick(5), pick(4) != 0, is_large ? 17U : 5U};
    const std::uint32_t steps = 2 + pick(7);
    lot.aborts = pick(3);
    lot.quits = pick(3);
    lot.anews = pick(4) == 0 ? 2 : 0;
    seen += play_one(seed, lot, steps);
    if (::testing::Test::HasFailure()) {
      FAIL() << "seed " << seed << " fails; HERRING_TEST_SEED=" << seed << " replays it";
    }
  }
  std::cout << range.count << " schedules: " << seen.redone << " operations done again, " << seen.delivered
            << " delivered, " << seen.failed << " failed on all alike, " << seen.boundaries << " boundaries, "
            << seen.switches << " planned switches, " << seen.aborted << " aborts outside of kRunning, " << seen.refused
            << " switches refused\n";
}

}  // namespace
}  // namespace herring::elastic::testing
