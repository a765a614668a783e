#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "collectives/fusion_engine.h"

/// Ranks of a group in one process, with an engine each, under virtual time.
namespace herring::collectives::testing {

using namespace std::chrono_literals;

inline TensorSpec spec(std::uint64_t elements, DataType dtype = DataType::kFloat32, ReduceOp op = ReduceOp::kAverage) {
  TensorSpec made;
  made.descriptor.dtype = dtype;
  made.descriptor.reduce = op;
  made.descriptor.dims = 1;
  made.descriptor.shape[0] = elements;
  made.descriptor.op_bytes = elements * element_bytes(dtype);
  return made;
}

inline constexpr std::uint64_t kMostPacked = 1 << 20;  // Larger tensors come to the engine where they have a place.

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
  /// As Fusion does it: the tensor has a place in this rank's memory, and lies there or not.
  void submit_placed(std::size_t index, const std::string& name, const TensorSpec& tensor, std::uint64_t place,
                     bool is_there) {
    Rank& each = ranks_[index];
    Placement placement{is_there ? place : 0, false};
    if (tensor.descriptor.op_bytes > kMostPacked) {
      if (!each.engine->knows_place(name, tensor)) {
        if (is_there) each.engine->propose(name, tensor, placement.place);
        return submit_outside(index, name);
      }
      placement.goes_alone = !is_there;
    }
    const Ticket ticket = each.next_ticket++;
    each.wanted[ticket] = {name, each.uses[name]++};
    if (!each.engine->submit(ticket, name, tensor, now_, placement)) go_alone(each, ticket);
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

inline void submit_everywhere(Group& group, const std::string& name, const TensorSpec& tensor) {
  for (std::size_t index = 0; index < group.size(); ++index) group.submit(index, name, tensor);
}

}  // namespace herring::collectives::testing
