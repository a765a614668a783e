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

#include "seeds.h"

namespace herring::collectives {
namespace {

using namespace std::chrono_literals;

TensorSpec spec(std::uint64_t elements, DataType dtype = DataType::kFloat32, ReduceOp op = ReduceOp::kAverage) {
  TensorSpec made;
  made.descriptor.dtype = dtype;
  made.descriptor.reduce = op;
  made.descriptor.dims = 1;
  made.descriptor.shape[0] = elements;
  made.descriptor.op_bytes = elements * element_bytes(dtype);
  return made;
}

/// What a rank has asked for and not got yet.
struct Wanted {
  std::string name;
  int use = 0;  ///< Which of the rank's tensors of this name.
  bool is_alone = false;
};

struct Rank {
  std::unique_ptr<FusionEngine> engine;
  std::map<Ticket, Wanted> wanted;
  std::vector<std::vector<std::string>> batches;  ///< names, in place order, of every batch so far
  std::map<std::string, int> uses, alone_uses;
  std::optional<std::vector<std::uint64_t>> round;  ///< entered, not ended
  std::optional<std::vector<std::byte>> plan;
  std::size_t batches_ended = 0;
  Ticket next_ticket = 1;
  std::uint64_t fused = 0, alone = 0;
};

/// A group whose collectives end when all ranks have called them, after delays; time is virtual.
class Group {
 public:
  Group(std::uint32_t size, std::uint64_t seed, FusionOptions options = {}) : random_(seed) {
    for (std::uint32_t index = 0; index < size; ++index) {
      options.index = index;
      ranks_.emplace_back().engine = std::make_unique<FusionEngine>(options);
    }
  }

  Rank& rank(std::size_t index) { return ranks_[index]; }
  std::size_t size() const { return ranks_.size(); }
  Instant now() const { return now_; }
  std::mt19937_64& random() { return random_; }
  std::uint64_t rounds() const { return ranks_[0].engine->rounds(); }

  void submit(std::size_t index, const std::string& name, const TensorSpec& tensor) {
    Rank& each = ranks_[index];
    const Ticket ticket = each.next_ticket++;
    each.wanted[ticket] = {name, each.uses[name]++};
    if (!each.engine->submit(ticket, name, tensor, now_)) go_alone(each, ticket);
  }
  /// As a blocking call does it: not through the engine.
  void submit_outside(std::size_t index, const std::string& name) {
    Rank& each = ranks_[index];
    const Ticket ticket = each.next_ticket++;
    each.wanted[ticket] = {name, each.uses[name]++};
    go_alone(each, ticket);
  }

  bool has(std::size_t index, const std::string& name) const {
    return std::ranges::any_of(ranks_[index].wanted, [&](const auto& each) { return each.second.name == name; });
  }
  bool is_idle() const {
    return std::ranges::all_of(ranks_, [](const Rank& each) { return each.wanted.empty(); });
  }

  /// Lets the ranks go on until nothing is left to do at this moment; then time passes, at most to `until`.
  void run_until(Instant until) {
    while (true) {
      bool moved = false;
      for (Rank& each : ranks_) {
        if (random_() % 4 != 0) moved = advance(each) || moved;  // Not all at once.
      }
      moved = end_rounds() || moved;
      moved = end_plans() || moved;
      moved = end_batches() || moved;
      moved = end_alone() || moved;
      if (moved || std::ranges::any_of(ranks_, [&](Rank& each) { return advance(each); })) continue;
      if (now_ >= until) return;
      now_ = std::min(until, now_ + 100us);
    }
  }

  /// False where something is left after so long.
  bool run_until_idle(Duration limit = 20s) {
    for (const Instant end = now_ + limit; !is_idle() && now_ < end;) run_until(now_ + 1ms);
    return is_idle();
  }

  void flush() {
    for (Rank& each : ranks_) each.engine->flush();
  }

 private:
  void go_alone(Rank& each, Ticket ticket) {
    each.wanted.at(ticket).is_alone = true;
    ++each.alone;
    each.engine->went_outside(each.wanted.at(ticket).name, now_);
  }

  bool advance(Rank& each) {
    Step step = each.engine->next(now_);
    if (auto* round = std::get_if<FusionStep::Round>(&step)) {
      EXPECT_FALSE(each.round) << "a second round at once";
      each.round = std::move(round->words);
    } else if (auto* plan = std::get_if<FusionStep::Plan>(&step)) {
      if (each.plan) return false;  // It is under way.
      each.plan = std::move(plan->bytes);
    } else if (auto* reduce = std::get_if<FusionStep::Reduce>(&step)) {
      for (const Batch& batch : reduce->batches) take(each, batch);
    } else if (auto* alone = std::get_if<FusionStep::Alone>(&step)) {
      for (const Ticket ticket : alone->tickets) go_alone(each, ticket);
    } else {
      return false;
    }
    return true;
  }

  static void take(Rank& each, const Batch& batch) {
    std::vector<std::string> names;
    std::uint64_t end = 0;
    for (const Batch::Item& item : batch.items) {
      EXPECT_GE(item.slice.offset, end);
      end = item.slice.offset + item.slice.bytes;
      const Wanted& wanted = each.wanted.at(item.ticket);
      names.push_back(wanted.name + "#" + std::to_string(wanted.use) + "@" + std::to_string(item.slice.offset));
      each.wanted.erase(item.ticket);
      ++each.fused;
    }
    EXPECT_LE(end, batch.bytes);
    each.batches.push_back(std::move(names));
  }

  bool end_rounds() {
    if (!std::ranges::all_of(ranks_, [](const Rank& each) { return each.round.has_value(); })) return false;
    std::vector<std::uint64_t> all = *ranks_[0].round;
    for (const Rank& each : ranks_) {
      EXPECT_EQ(each.round->size(), all.size()) << "ranks know different tensors";
      for (std::size_t i = 0; i < all.size(); ++i) all[i] &= (*each.round)[i];
    }
    for (Rank& each : ranks_) {
      each.round.reset();
      EXPECT_TRUE(each.engine->round_ended(all, now_));
    }
    return true;
  }

  bool end_plans() {
    if (!std::ranges::all_of(ranks_, [](const Rank& each) { return each.plan.has_value(); })) return false;
    const std::vector<std::byte> plan = *ranks_[0].plan;
    for (Rank& each : ranks_) {
      EXPECT_EQ(each.engine->plan_bytes(), plan.size());
      each.plan.reset();
      EXPECT_TRUE(each.engine->plan_came(plan, now_));
    }
    return true;
  }

  bool end_batches() {
    bool moved = false;
    std::size_t common = ranks_[0].batches.size();
    for (const Rank& each : ranks_) common = std::min(common, each.batches.size());
    for (Rank& each : ranks_) {
      for (; each.batches_ended < common && random_() % 3 != 0; moved = true) {
        EXPECT_EQ(each.batches[each.batches_ended], ranks_[0].batches[each.batches_ended]) << "a wrong sum";
        ++each.batches_ended;
        each.engine->batch_ended();
      }
    }
    return moved;
  }

  /// A reduction by name ends when all ranks have called it.
  bool end_alone() {
    bool moved = false;
    std::map<std::string, std::size_t> callers;
    for (const Rank& each : ranks_) {
      for (const auto& [ticket, tensor] : each.wanted) callers[tensor.name] += tensor.is_alone ? 1 : 0;
    }
    for (const auto& [name, count] : callers) {
      if (count < ranks_.size()) continue;
      moved = true;
      std::set<int> uses;
      for (Rank& each : ranks_) {
        const auto found = std::ranges::find_if(each.wanted, [&](const auto& one) { return one.second.name == name; });
        uses.insert(found->second.use);
        each.engine->came_back(name);
        each.wanted.erase(found);
        ++each.alone_uses[name];
      }
      EXPECT_EQ(uses.size(), 1u) << name << " of different steps meet";
    }
    return moved;
  }

  std::mt19937_64 random_;
  std::vector<Rank> ranks_;
  Instant now_{};
};

void submit_everywhere(Group& group, const std::string& name, const TensorSpec& tensor) {
  for (std::size_t index = 0; index < group.size(); ++index) group.submit(index, name, tensor);
}

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
  std::set<std::string> odd;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::pair<std::string, TensorSpec>> all;
    for (int i = 0; i < tensors; ++i) {
      if (random() % 5 == 0) continue;
      const DataType dtype = i % 7 == 0 ? DataType::kFloat64 : DataType::kFloat32;
      all.emplace_back("t" + std::to_string(i), spec(1 + static_cast<std::uint64_t>(i) * 3, dtype));
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
          group.submit(index, name, tensor);
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

TEST(FusionEngine, EveryScheduleEndsAndAllRanksAgree) {
  const herring::testing::SeedRange range = herring::testing::seeds(1000);
  for (std::uint64_t seed = range.first; seed < range.first + range.count && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("HERRING_TEST_SEED=" + std::to_string(seed));
    train(seed);
  }
}

}  // namespace
}  // namespace herring::collectives
