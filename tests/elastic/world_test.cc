#include "elastic/world.h"

#include <gtest/gtest.h>

namespace herring::elastic::testing {
namespace {

struct Seen {
  std::uint64_t redone = 0;
  std::uint64_t delivered = 0;
  std::uint64_t failed = 0;
  std::uint64_t boundaries = 0;
};

Seen play_all(std::uint64_t first, std::uint64_t count, std::uint32_t deaths, std::uint32_t arrivals) {
  Seen seen;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    World world(2 + static_cast<std::uint32_t>(seed % 4), seed);
    const std::string problem = world.play(6, deaths, arrivals);
    EXPECT_EQ(problem, "") << "seed " << seed << ", deaths " << deaths << ", arrivals " << arrivals;
    if (!problem.empty()) break;
    seen.redone += world.redone;
    seen.delivered += world.delivered;
    seen.failed += world.failed;
    seen.boundaries += world.boundaries;
  }
  return seen;
}

// Each seed: no deadlock, one outcome of every operation on all, every survivor's contribution in it, all steps done.

TEST(ElasticWorld, WithoutDeathsNothingIsDoneTwice) {
  const Seen seen = play_all(1, 300, 0, 0);
  EXPECT_EQ(seen.redone + seen.delivered + seen.failed + seen.boundaries, 0U);
}

TEST(ElasticWorld, DeathsCostNoOperation) {
  const Seen seen = play_all(1000, 1500, 1, 0);
  EXPECT_GT(seen.redone, 0U);
  EXPECT_GT(seen.delivered, 0U);
}

TEST(ElasticWorld, DeathsDuringRecoveryAreTheSameAgain) {
  const Seen seen = play_all(5000, 1500, 4, 0);
  EXPECT_GT(seen.redone, 0U);
  EXPECT_GT(seen.delivered, 0U);
  EXPECT_GT(seen.failed, 0U);  // Broadcasts whose root died: on all alike.
}

TEST(ElasticWorld, NewWorkersComeInBetweenSteps) {
  const Seen seen = play_all(9000, 1000, 0, 2);
  EXPECT_GT(seen.boundaries, 0U);
}

TEST(ElasticWorld, NewWorkersAndDeathsTogether) {
  const Seen seen = play_all(20000, 2000, 4, 3);
  EXPECT_GT(seen.boundaries, 0U);
  EXPECT_GT(seen.delivered, 0U);
}

}  // namespace
}  // namespace herring::elastic::testing
