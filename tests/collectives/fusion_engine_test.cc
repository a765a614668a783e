// What a user would lose: a step that hangs, or a tensor that gets another's sum, because ranks have their gradients in
// different orders, at different times, or not at all.
#include "collectives/fusion_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>

#include "collectives/fusion_group.h"
#include "seeds.h"

namespace herring::collectives {
namespace {

using namespace testing;
using namespace std::chrono_literals;

TEST(FusionEngine, ASecondStepTravelsInOneBatch) {
  Group group(3, 1);
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < 100; ++i) submit_everywhere(group, "t" + std::to_string(i), spec(1000));
    group.flush();
    ASSERT_TRUE(group.run_until_idle());
  }
  EXPECT_EQ(group.rank(0).batches.size(), 3u);
  EXPECT_EQ(group.rank(1).fused, 300u);
  EXPECT_EQ(group.rank(1).alone, 0u);
  EXPECT_LE(group.rounds(), 6u);
}

/// Who closes waits until it is idle, and a bucket is cut off where it is too early.
TEST(FusionEngine, ItIsIdleWhenItsBatchesHaveEnded) {
  FusionEngine engine({});
  Instant now{};
  EXPECT_TRUE(engine.is_idle());
  ASSERT_TRUE(engine.submit(1, "t", spec(10), now));
  while (true) {
    EXPECT_FALSE(engine.is_idle());
    Step step = engine.next(now += 1ms);
    if (auto* round = std::get_if<FusionStep::Round>(&step)) {
      ASSERT_TRUE(engine.round_ended(round->words, now));
    } else if (auto* plan = std::get_if<FusionStep::Plan>(&step)) {
      ASSERT_TRUE(engine.plan_came(plan->bytes, now));
    } else if (std::holds_alternative<FusionStep::Reduce>(step)) {
      break;
    }
  }
  EXPECT_FALSE(engine.is_idle());
  engine.batch_ended();
  EXPECT_TRUE(engine.is_idle());
}

/// A burst of calls is one round, also where it takes longer than a cycle; and no tensor waits for ever.
TEST(FusionEngine, ARoundBeginsWhenNoMoreTensorsCome) {
  FusionOptions options;
  options.cycle = 1ms;
  FusionEngine engine(options);
  const Instant begun{};
  ASSERT_TRUE(engine.submit(1, "t0", spec(10), begun));
  EXPECT_EQ(engine.next_look(begun), begun + 1ms);
  Ticket ticket = 2;
  Instant now = begun;
  for (; now < begun + 1500us; now += 100us, ++ticket) {
    ASSERT_TRUE(std::holds_alternative<FusionStep::Wait>(engine.next(now)));
    ASSERT_TRUE(engine.submit(ticket, "t" + std::to_string(ticket), spec(10), now));
  }
  EXPECT_EQ(engine.next_look(now), begun + 1400us + 250us);
  for (; now < begun + 4ms; now += 100us, ++ticket) {
    ASSERT_TRUE(engine.submit(ticket, "t" + std::to_string(ticket), spec(10), now));
  }
  EXPECT_TRUE(std::holds_alternative<FusionStep::Round>(engine.next(begun + 4ms)));
}

/// Who waits for a bucket that is under way does not hurry what comes later.
TEST(FusionEngine, WhoWaitsHurriesWhatIsThereAlone) {
  FusionEngine engine({});
  engine.flush();
  ASSERT_TRUE(engine.submit(1, "t", spec(10), Instant{}));
  EXPECT_TRUE(std::holds_alternative<FusionStep::Wait>(engine.next(Instant{})));
  engine.flush();
  EXPECT_TRUE(std::holds_alternative<FusionStep::Round>(engine.next(Instant{})));
}

/// Others may be told that this rank calls nothing by itself: only where that is so.
TEST(FusionEngine, ItIsQuietWhenNothingOfItNeedsARoundOrABucketAnyMore) {
  FusionEngine engine({});
  Instant now{};
  EXPECT_TRUE(engine.is_quiet() && !engine.wants_round() && !engine.is_moving());
  ASSERT_TRUE(engine.submit(1, "t", spec(10), now));
  std::size_t rounds = 0;
  while (true) {
    EXPECT_FALSE(engine.is_quiet());
    Step step = engine.next(now += 1ms);
    if (auto* round = std::get_if<FusionStep::Round>(&step)) {
      EXPECT_TRUE(engine.wants_round() && !engine.is_moving()) << "it waits for others";
      ASSERT_TRUE(engine.round_ended(round->words, now));
      EXPECT_TRUE(engine.is_moving()) << "a plan or a bucket comes";
      ++rounds;
    } else if (auto* plan = std::get_if<FusionStep::Plan>(&step)) {
      ASSERT_TRUE(engine.plan_came(plan->bytes, now));
    } else if (std::holds_alternative<FusionStep::Reduce>(step)) {
      break;
    }
  }
  EXPECT_EQ(rounds, 2u);
  EXPECT_TRUE(engine.is_moving() && !engine.wants_round());
  engine.batch_ended();
  EXPECT_TRUE(engine.is_quiet());
  engine.went_outside("large", now);
  EXPECT_FALSE(engine.is_quiet()) << "it will come to a round, so that others hear of it";
  EXPECT_FALSE(engine.is_moving() || engine.wants_round()) << "but that is nothing to wait for";
  engine.came_back("large");
  EXPECT_TRUE(engine.is_quiet());
}

TEST(FusionEngine, BucketsHaveOneTypeAndOneOperatorAndTheSizeOfRank0) {
  FusionOptions options;
  options.bucket_bytes = 10'000;
  Group group(2, 1, options);
  for (int i = 0; i < 10; ++i) {
    submit_everywhere(group, "f" + std::to_string(i), spec(1000));
    submit_everywhere(group, "d" + std::to_string(i), spec(500, DataType::kFloat64));
    submit_everywhere(group, "m" + std::to_string(i), spec(100, DataType::kFloat32, ReduceOp::kMax));
  }
  ASSERT_TRUE(group.run_until_idle());
  // 10 of 4,000 bytes, two a bucket; twice; and all of 400 bytes in one.
  EXPECT_EQ(group.rank(0).batches.size(), 5u + 5u + 1u);
}

TEST(FusionEngine, ATensorThatOneRankHasNotHoldsUpNothingElse) {
  Group group(2, 1);
  for (const char* name : {"a", "b", "c"}) submit_everywhere(group, name, spec(10));
  ASSERT_TRUE(group.run_until_idle());
  group.submit(0, "a", spec(10));
  group.submit(0, "b", spec(10));
  group.submit(1, "b", spec(10));
  group.run_until(group.now() + 50ms);
  EXPECT_TRUE(group.has(0, "a"));
  EXPECT_FALSE(group.has(0, "b"));
  const std::uint64_t before = group.rounds();
  group.run_until(group.now() + 1s);
  EXPECT_LE(group.rounds() - before, 2u) << "rank 1 has nothing to say";
  group.submit(1, "a", spec(10));
  ASSERT_TRUE(group.run_until_idle(100ms));
  EXPECT_EQ(group.rank(0).alone, 0u);
}

TEST(FusionEngine, RanksThatWaitForDifferentTensorsDoNotSpin) {
  Group group(2, 1);
  for (const char* name : {"a", "b"}) submit_everywhere(group, name, spec(10));
  ASSERT_TRUE(group.run_until_idle());
  group.submit(0, "a", spec(10));
  group.submit(1, "b", spec(10));
  const std::uint64_t before = group.rounds();
  group.run_until(group.now() + 1s);
  EXPECT_LE(group.rounds() - before, 80u);
  group.submit(0, "b", spec(10));
  group.submit(1, "a", spec(10));
  ASSERT_TRUE(group.run_until_idle(100ms));
  EXPECT_EQ(group.rank(0).alone, 0u);
}

TEST(FusionEngine, ShapesThatDifferGoAloneAndTheRestTogether) {
  Group group(3, 1);
  for (int step = 0; step < 2; ++step) {  // New to all, and known.
    group.submit(0, "odd", spec(10));
    group.submit(1, "odd", spec(11));
    group.submit(2, "odd", spec(10));
    submit_everywhere(group, "even", spec(10));
    ASSERT_TRUE(group.run_until_idle(1s));
    EXPECT_EQ(group.rank(0).alone_uses["odd"], step + 1);
    EXPECT_EQ(group.rank(2).alone_uses["even"], 0);
  }
}

TEST(FusionEngine, ANewShapeOnAllRanksIsLearned) {
  Group group(2, 1);
  for (std::uint64_t elements : {10, 20, 20}) {
    submit_everywhere(group, "t", spec(elements));
    ASSERT_TRUE(group.run_until_idle(1s));
  }
  EXPECT_GE(group.rank(0).fused, 2u);
  EXPECT_EQ(group.rank(0).fused, group.rank(1).fused);
}

TEST(FusionEngine, WhoCallsOutsideMeetsWhoCallsHere) {
  for (const std::size_t outside : {0u, 1u}) {
    Group group(2, 1);
    for (int step = 0; step < 2; ++step) {
      group.submit_outside(outside, "x");
      group.submit(1 - outside, "x", spec(10));
      ASSERT_TRUE(group.run_until_idle(3s)) << outside << step;
    }
    EXPECT_EQ(group.rank(0).alone_uses["x"], 2);
  }
}

/// Rank 0 sits in a round that nobody has to come to.
TEST(FusionEngine, WhatComesToARankThatOnlyListensGoesAloneInTheEnd) {
  Group group(2, 1);
  for (const char* name : {"a", "b"}) submit_everywhere(group, name, spec(10));
  ASSERT_TRUE(group.run_until_idle());
  group.submit_outside(0, "large");
  group.run_until(group.now() + 300ms);
  EXPECT_TRUE(group.rank(0).round);
  group.submit_outside(1, "large");
  ASSERT_TRUE(group.run_until_idle(10ms));
  group.submit(0, "a", spec(10));
  group.run_until(group.now() + 1s);
  group.submit(0, "b", spec(10));
  group.run_until(group.now() + 990ms);
  EXPECT_EQ(group.rank(0).alone, 1u) << "it may still travel with others";
  group.run_until(group.now() + 20ms);
  EXPECT_EQ(group.rank(0).alone, 2u);
  submit_everywhere(group, "c", spec(10));
  group.submit(1, "a", spec(10));
  group.submit(1, "b", spec(10));
  ASSERT_TRUE(group.run_until_idle(3s));
  EXPECT_EQ(group.rank(1).alone_uses["a"], 1);
  EXPECT_EQ(group.rank(1).alone_uses["b"], 0);
}

TEST(FusionEngine, AfterAPauseEverythingGoesAloneUntilAllGoOn) {
  Group group(3, 1);
  submit_everywhere(group, "t", spec(10));
  ASSERT_TRUE(group.run_until_idle());
  group.rank(1).engine->pause();
  group.submit(0, "t", spec(10));
  group.submit(2, "t", spec(10));
  group.submit_outside(1, "t");  // As who has joined takes part.
  ASSERT_TRUE(group.run_until_idle(1s));
  EXPECT_EQ(group.rank(0).alone_uses["t"], 1);
  for (std::size_t index = 0; index < 3; ++index) group.rank(index).engine->resume();
  submit_everywhere(group, "t", spec(10));
  ASSERT_TRUE(group.run_until_idle(100ms));
  EXPECT_EQ(group.rank(2).fused, 2u);
}

TEST(FusionEngine, NamesHaveALimitAndTheRestGoesAlone) {
  FusionOptions options;
  options.most_names = 10;
  Group group(2, 1, options);
  for (int i = 0; i < 30; ++i) submit_everywhere(group, "n" + std::to_string(i), spec(10));
  ASSERT_TRUE(group.run_until_idle());
  EXPECT_EQ(group.rank(0).fused, 10u);
  EXPECT_EQ(group.rank(1).alone, 20u);
}

TEST(FusionEngine, BytesThatAreNoPlanAndWordsThatAreNoRoundAreRefused) {
  FusionEngine engine({.index = 1});
  EXPECT_FALSE(engine.round_ended(std::vector<std::uint64_t>(2, 0), Instant{}));
  ASSERT_TRUE(engine.submit(1, "x", spec(10), Instant{}));
  engine.flush();
  Step step = engine.next(Instant{});
  ASSERT_TRUE(std::holds_alternative<FusionStep::Round>(step));
  std::vector<std::uint64_t> words = std::get<FusionStep::Round>(step).words;
  words[0] = 5;
  ASSERT_TRUE(engine.round_ended(words, Instant{}));
  EXPECT_EQ(engine.plan_bytes(), 5u);
  EXPECT_FALSE(engine.plan_came(std::vector<std::byte>(5, std::byte{7}), Instant{}));
  EXPECT_EQ(engine.give_up(), std::vector<Ticket>{1});
  EXPECT_FALSE(engine.submit(2, "x", spec(10), Instant{}));
}

/// Steps of a training that is as unruly as it may be: each rank has its own order and pace, some tensors come in some
/// steps only, some outside of the engine on some ranks, some with another shape on one of them; ranks wait for all of
/// a step, or go on.
void train(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  FusionOptions options;
  options.bucket_bytes = random() % 2 == 0 ? 1 << 20 : 3000;
  const std::uint32_t size = 2 + static_cast<std::uint32_t>(random() % 4);
  Group group(size, seed, options);
  const int tensors = 1 + static_cast<int>(random() % 60);
  const int steps = 2 + static_cast<int>(random() % 5);
  std::vector<std::vector<std::pair<std::string, TensorSpec>>> to_come(size);
  // Some lie in rows of memory, in another order on some ranks, or on some ranks only; a few of them are large.
  const bool has_rows = random() % 2 == 0;
  std::vector<std::map<std::string, std::uint64_t>> places(size);
  const auto elements = [&](int i) {
    return has_rows && i % 9 == 0 ? 300'000u : 1 + static_cast<std::uint64_t>(i) * 3;
  };
  for (auto& mine : places) {
    if (!has_rows || random() % 5 == 0) continue;
    std::uint64_t next = 64;
    for (int i = 0; i < tensors; ++i) {
      const int which = random() % 8 == 0 ? static_cast<int>(random() % static_cast<std::uint64_t>(tensors)) : i;
      mine["t" + std::to_string(which)] = next;
      next = place_after(next, elements(which) * 4);
    }
  }
  for (int step = 0; step < steps; ++step) {
    std::vector<std::pair<std::string, TensorSpec>> all;
    for (int i = 0; i < tensors; ++i) {
      if (random() % 5 == 0) continue;
      const DataType dtype = i % 7 == 0 ? DataType::kFloat64 : DataType::kFloat32;
      all.emplace_back("t" + std::to_string(i), spec(elements(i), dtype));
    }
    for (auto& mine : to_come) {
      std::ranges::shuffle(all, random);
      mine.insert(mine.end(), all.begin(), all.end());
      if (random() % 30 == 0 && !mine.empty()) mine.back().second = spec(1000);
    }
  }
  std::vector<std::size_t> done(size, 0);
  const Instant limit = group.now() + 600s;
  while (group.now() < limit && !::testing::Test::HasFailure()) {
    bool is_over = group.is_idle();
    for (std::size_t index = 0; index < size; ++index) {
      const auto& mine = to_come[index];
      for (auto burst = group.random()() % 8; burst > 0 && done[index] < mine.size(); --burst) {
        const auto& [name, tensor] = mine[done[index]];
        if (group.has(index, name)) {
          group.rank(index).engine->flush();  // It waits for this one.
          break;
        }
        if (group.random()() % 50 == 0) {
          group.submit_outside(index, name);
        } else {
          const auto place = places[index].find(name);
          const bool is_there = place != places[index].end() && group.random()() % 10 != 0;
          group.submit_placed(index, name, tensor, is_there ? place->second : 0, is_there);
        }
        ++done[index];
      }
      is_over = is_over && done[index] == mine.size();
    }
    if (is_over) return;
    group.run_until(group.now() + std::chrono::microseconds(50 + group.random()() % 3000));
  }
  EXPECT_LT(group.now(), limit) << "not done";
}

/// Ranks close one after the other while some have names that others never call: nothing else is lost, and it is soon
/// over.
void close_group(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::size_t size = 2 + random() % 4;
  Group group(size, seed);
  std::vector<std::vector<std::string>> to_come(size);
  for (int i = 0; i < 10; ++i) {
    const bool is_missing = random() % 4 == 0;
    const std::size_t lacks = random() % size;
    for (std::size_t index = 0; index < size; ++index) {
      if (is_missing && (index == lacks || random() % 2 == 0)) continue;
      to_come[index].push_back((is_missing ? "missing" : "t") + std::to_string(i));
    }
  }
  for (auto& mine : to_come) std::ranges::shuffle(mine, random);
  std::vector<bool> is_closed(size, false);
  const auto has_ended = [&](std::size_t index) { return group.rank(index).engine->has_ended(); };
  const auto all_have_ended = [&] {
    for (std::size_t index = 0; index < size; ++index) {
      if (!has_ended(index)) return false;
    }
    return true;
  };
  const Instant limit = group.now() + 500ms;
  while (group.now() < limit && !all_have_ended()) {
    for (std::size_t index = 0; index < size; ++index) {
      auto& mine = to_come[index];
      if (random() % 3 == 0 && !mine.empty()) {
        group.submit(index, mine.back(), spec(10));
        mine.pop_back();
      } else if (mine.empty() && !is_closed[index] && random() % 3 == 0) {
        is_closed[index] = true;
        group.rank(index).engine->close(true);
      }
    }
    group.run_until(group.now() + std::chrono::microseconds(random() % 2000));
  }
  for (std::size_t index = 0; index < size; ++index) {
    EXPECT_TRUE(has_ended(index)) << "rank " << index;
    for (const auto& [ticket, tensor] : group.rank(index).wanted) {
      EXPECT_TRUE(tensor.name.starts_with("missing")) << tensor.name << " of rank " << index << " is lost";
    }
    EXPECT_EQ(group.rank(index).engine->give_up().size(), group.rank(index).wanted.size());
  }
}

TEST(FusionEngine, AGroupThatIsClosedLosesWhatSomeLackAndNothingElse) {
  const herring::testing::SeedRange range = herring::testing::seeds(1000);
  for (std::uint64_t seed = range.first; seed < range.first + range.count && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("HERRING_TEST_SEED=" + std::to_string(seed));
    close_group(seed);
  }
}

TEST(FusionEngine, EveryScheduleEndsAndAllRanksAgree) {
  const herring::testing::SeedRange range = herring::testing::seeds(1000);
  for (std::uint64_t seed = range.first; seed < range.first + range.count && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("HERRING_TEST_SEED=" + std::to_string(seed));
    train(seed);
  }
}

}  // namespace
}  // namespace herring::collectives
