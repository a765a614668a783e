#include <gtest/gtest.h>

#include <iostream>
#include <optional>
#include <set>

#include "intra_node/local_cluster.h"
#include "intra_node/shortcut.h"
#include "seeds.h"

/// Thousands of seeded schedules. A failing one prints its seed; HERRING_TEST_SEED=<seed> in the environment replays
/// just that one.
namespace herring::intra_node {
namespace {

using testing::LocalCluster;

constexpr std::size_t kArenaBytes = 512 << 10;
constexpr std::uint32_t kInlineBytes = 256;
constexpr std::uint64_t kNamed = std::uint64_t{1} << 63;
constexpr std::byte kUntouched{0xA7};

/// One operation of a schedule, as all members see it.
struct Plan {
  OpKey key;
  OpDescriptor descriptor;
  std::vector<std::uint32_t> members;
  std::vector<std::vector<ByteSpan>> owned;
  std::uint32_t root = 0;
  bool network = false;
  std::vector<std::vector<std::byte>> inputs;  // By member.
  std::vector<std::byte> expected;
};

/// What one rank does with it.
struct Call {
  const Plan* plan = nullptr;
  std::uint32_t member = 0;
  std::vector<std::byte> private_memory;
  std::span<std::byte> memory;
  bool in_arena = false;
  bool submitted = false;
  std::optional<Shortcut> shortcut;  // Being taken.
  bool done = false;
  Status status;
};

template <class T>
T tree(const std::vector<std::vector<std::byte>>& inputs, std::size_t index, std::size_t lo, std::size_t hi) {
  if (hi - lo == 1) {
    T value;
    std::memcpy(&value, inputs[lo].data() + index * sizeof(T), sizeof(T));
    return value;
  }
  std::size_t half = 1;
  while (half * 2 < hi - lo) half *= 2;
  return static_cast<T>(tree<T>(inputs, index, lo, lo + half) + tree<T>(inputs, index, lo + half, hi));
}

template <class T>
std::vector<std::byte> summed(const Plan& plan) {
  std::vector<std::byte> out(plan.descriptor.part_bytes);
  for (std::size_t i = 0; i < out.size() / sizeof(T); ++i) {
    T value = tree<T>(plan.inputs, i, 0, plan.inputs.size());
    if (plan.descriptor.reduce == ReduceOp::kAverage && !plan.network) {
      value = static_cast<T>(value / static_cast<T>(plan.members.size()));
    }
    if (plan.network) value = static_cast<T>(value + value);  // What this test's network does.
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
  return out;
}

std::vector<std::vector<ByteSpan>> random_ranges(std::mt19937& random, std::size_t members, std::uint64_t bytes,
                                                 std::uint64_t element) {
  std::vector<std::vector<ByteSpan>> owned(members);
  for (std::uint64_t at = 0; at < bytes;) {
    const std::uint64_t elements = 1 + random() % std::max<std::uint64_t>(bytes / element / 3, 1);
    const std::uint64_t size = std::min(bytes - at, elements * element);
    owned[random() % members].push_back({at, size});
    at += size;
  }
  if (random() % 4 == 0) owned[random() % members].push_back({0, 0});
  return owned;
}

Plan random_plan(std::mt19937& random, std::uint32_t ranks, std::uint32_t number) {
  Plan plan;
  plan.key = {{0}, number, 0};
  for (std::uint32_t r = 0; r < ranks; ++r) plan.members.push_back(r);
  std::ranges::shuffle(plan.members, random);
  if (random() % 2 == 0) plan.members.resize(1 + random() % ranks);
  OpDescriptor& d = plan.descriptor;
  const bool floats = random() % 2 == 0;
  d.dtype = floats ? DataType::kFloat32 : DataType::kInt64;
  const std::uint64_t element = element_bytes(d.dtype);
  const std::uint32_t kind = random() % 8;
  d.collective = kind == 0 ? Collective::kBarrier : kind == 1 ? Collective::kBroadcast : Collective::kAllReduce;
  d.reduce = floats && random() % 3 == 0 ? ReduceOp::kAverage : ReduceOp::kSum;
  d.part_bytes = kind == 0 || random() % 12 == 0 ? 0 : element * (1 + random() % (random() % 2 == 0 ? 20 : 700));
  d.op_bytes = d.part_bytes;
  d.dims = 1;
  d.shape[0] = d.part_bytes / element;
  d.root = plan.root = kind == 1 ? random() % static_cast<std::uint32_t>(plan.members.size()) : 0;
  plan.network = kind != 1 && random() % 4 == 0;
  plan.owned = random_ranges(random, plan.members.size(), d.part_bytes, element);
  for (std::size_t i = 0; i < plan.members.size(); ++i) {
    std::vector<std::byte> input(d.part_bytes);
    for (std::size_t e = 0; e < input.size() / element; ++e) {
      if (floats) {
        const float value = std::uniform_real_distribution<float>(-1000, 1000)(random);
        std::memcpy(input.data() + e * element, &value, element);
      } else {
        const auto value = static_cast<std::int64_t>(random());
        std::memcpy(input.data() + e * element, &value, element);
      }
    }
    plan.inputs.push_back(std::move(input));
  }
  if (kind == 1) {
    plan.expected = plan.inputs[plan.root];
  } else {
    plan.expected = floats ? summed<float>(plan) : summed<std::int64_t>(plan);
  }
  return plan;
}

/// Some keys are those of names: operations on all ranks, one after the other.
std::vector<Plan> random_plans(std::mt19937& random, std::uint32_t ranks, std::uint32_t count) {
  std::vector<Plan> plans;
  for (std::uint32_t i = 0; i < count; ++i) {
    plans.push_back(random_plan(random, ranks, i));
    if (plans.back().members.size() == ranks && random() % 2 == 0) plans.back().key.op = kNamed | i;
  }
  return plans;
}

class Schedule {
 public:
  Schedule(std::uint32_t seed, bool faults)
      : random_(seed), faults_(faults), cluster_(2 + random_() % 7, kArenaBytes, kInlineBytes) {
    plans_ = random_plans(random_, cluster_.size(), 3 + random_() % 10);
    calls_.resize(cluster_.size());
    const bool in_step = random_() % 2 == 0;  // All ranks call in one order, as a loop does.
    for (std::uint32_t r = 0; r < cluster_.size(); ++r) {
      std::vector<const Plan*> order;
      for (const Plan& plan : plans_) order.push_back(&plan);
      if (!in_step) std::ranges::shuffle(order, random_);
      // Names keep their order.
      std::vector<const Plan*> named;
      for (const Plan& plan : plans_) {
        if ((plan.key.op & kNamed) != 0) named.push_back(&plan);
      }
      auto next = named.begin();
      for (const Plan*& plan : order) {
        if ((plan->key.op & kNamed) != 0) plan = *next++;
      }
      for (const Plan* plan : order) add_call(r, *plan);
    }
    cluster_.on_complete = [this](std::uint32_t r, const OpKey& key, const Status& status) {
      completed(r, key, status);
    };
  }

  void run() {
    for (std::uint64_t steps = 0; steps < 2'000'000; ++steps) {
      const std::uint32_t r = random_() % cluster_.size();
      const std::uint32_t dice = random_() % 16;
      bool moved = false;
      if (dice < 3) moved = submit_one(r);
      if (dice == 5) moved = end_shortcut(r, random_() % 8 == 0);
      if (dice == 3) moved = network_one(r);
      if (faults_ && dice == 4 && random_() % 40 == 0) moved = disturb(r);
      if (moved || cluster_.step(random_)) continue;
      for (std::uint32_t other = 0; other < cluster_.size() && !moved; ++other) {
        moved = submit_one(other) || network_one(other) || end_shortcut(other, true);
      }
      if (moved) continue;
      if (!pass_time()) return;
    }
    FAIL() << "no end";
  }

  std::uint64_t shortcuts() const { return shortcuts_; }

  void check() {
    std::uint64_t completed_ok = 0;
    for (std::uint32_t r = 0; r < cluster_.size(); ++r) {
      LocalCluster::Rank& rank = cluster_.rank(r);
      if (!rank.alive) continue;
      for (const Call& call : calls_[r]) check_call(r, call, completed_ok);
      EXPECT_TRUE(rank.engine->is_idle()) << "rank " << r;
      if (lost_.empty() && !faults_) {
        EXPECT_EQ(rank.engine->stats().staging_bytes, 0u) << "rank " << r;
        EXPECT_EQ(rank.engine->stats().messages_rejected, 0u) << "rank " << r;
      }
      for (Call& call : calls_[r]) {
        if (call.in_arena) cluster_.deallocate(r, call.memory);
      }
      EXPECT_EQ(rank.allocator->bytes_in_use(), 0u) << "rank " << r << " leaks staging memory";
    }
    if (!faults_) {
      EXPECT_GT(completed_ok, 0u);
    }
  }

  /// Calls whose callers were told that their memory may still be written to.
  std::uint64_t told() const { return told_; }

 private:
  void add_call(std::uint32_t r, const Plan& plan) {
    const auto found = std::ranges::find(plan.members, r);
    if (found == plan.members.end()) return;
    Call call;
    call.plan = &plan;
    call.member = static_cast<std::uint32_t>(found - plan.members.begin());
    const std::vector<std::byte>& input = plan.inputs[call.member];
    call.in_arena = random_() % 2 == 0 && !input.empty();
    if (call.in_arena) {
      call.memory = cluster_.allocate(r, input.size());
    } else {
      const std::size_t shift = random_() % 3;  // Private memory at any alignment.
      call.private_memory.resize(input.size() + shift);
      call.memory = std::span(call.private_memory).subspan(shift);
    }
    std::ranges::copy(input, call.memory.begin());
    calls_[r].push_back(std::move(call));
  }

  bool submit_one(std::uint32_t r) {
    if (!cluster_.is_free(r)) return false;
    for (Call& call : calls_[r]) {
      if (call.submitted) continue;
      // A name is used again when its last use is over.
      for (const Call& earlier : calls_[r]) {
        if (&earlier != &call && earlier.plan->key == call.plan->key && earlier.submitted && !earlier.done)
          return false;
      }
      call.submitted = true;
      if (!begin_shortcut(r, call)) cluster_.submit(r, operation_of(call));
      return true;
    }
    return false;
  }

  LocalOperation operation_of(const Call& call) {
    LocalOperation operation;
    operation.key = call.plan->key;
    operation.descriptor = call.plan->descriptor;
    operation.members = call.plan->members;
    for (const std::uint32_t member : call.plan->members) operation.world_ranks.push_back(100 + member);
    operation.owned = call.plan->owned;
    operation.memory = call.memory;
    operation.root = call.plan->root;
    operation.network = call.plan->network;
    if (operation.descriptor.reduce == ReduceOp::kAverage && !operation.network) {
      operation.average_over = static_cast<std::uint32_t>(operation.members.size());
    }
    operation.announced = call.shortcut.has_value();
    operation.timeout = std::chrono::seconds(30 + random_() % 3);
    return operation;
  }

  bool is_for_all(const Plan& plan) const { return plan.members.size() == cluster_.size(); }
  LocalCluster::Link& link_of(const Plan& plan, std::uint32_t from, std::uint32_t to) {
    return is_for_all(plan) ? cluster_.link_of_all(from, to) : cluster_.link(from, to);
  }

  /// As the runtime does it: small operations by number, where nothing else is known.
  bool begin_shortcut(std::uint32_t r, Call& call) {
    const Plan& plan = *call.plan;
    const bool is_small = !plan.network && plan.descriptor.collective != Collective::kBroadcast &&
                          plan.descriptor.part_bytes <= kInlineBytes && (plan.key.op & kNamed) == 0;
    if (!is_small || random_() % 4 == 0 || !cluster_.rank(r).engine->is_untroubled()) return false;
    call.shortcut.emplace(plan.key, plan.descriptor, plan.members, operation_of(call).average_over);
    std::vector<std::byte> message(call.shortcut->head().begin(), call.shortcut->head().end());
    message.insert(message.end(), call.memory.begin(), call.memory.end());
    message.insert(message.end(), call.shortcut->tail().begin(), call.shortcut->tail().end());
    if (is_for_all(plan)) {
      cluster_.send_to_all(r, message);
    } else {
      for (const std::uint32_t member : plan.members) {
        if (member != r) cluster_.link(r, member).push_back(message);
      }
    }
    cluster_.rank(r).busy = true;
    return true;
  }

  /// Ends a shortcut if everybody has come, or leaves the rest to the engine; neither where it may wait longer.
  bool end_shortcut(std::uint32_t r, bool gives_up) {
    if (!cluster_.rank(r).busy || !cluster_.rank(r).alive) return false;
    Call& call = *std::ranges::find_if(calls_[r], [](const Call& each) { return each.shortcut && !each.done; });
    const Plan& plan = *call.plan;
    std::vector<std::span<const std::byte>> inputs(plan.members.size(), call.memory);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (i == call.member) continue;
      const auto& link = link_of(plan, plan.members[i], r);
      const auto data = link.empty() ? std::nullopt : call.shortcut->data_in(link.front());
      if (data) {
        inputs[i] = *data;
        continue;
      }
      if (link.empty() && cluster_.link(plan.members[i], r).empty() && !gives_up) return false;
      cluster_.rank(r).busy = false;
      cluster_.submit(r, operation_of(call));
      return true;
    }
    if (plan.descriptor.part_bytes > 0) {
      const ReduceSpec spec{plan.descriptor.dtype, plan.descriptor.reduce, operation_of(call).average_over};
      const std::span<std::byte> output = call.memory;
      server::reduce(spec, inputs, std::span(&output, 1));
    }
    for (const std::uint32_t member : plan.members) {
      if (member != r) link_of(plan, member, r).pop_front();
    }
    ++shortcuts_;
    cluster_.rank(r).busy = false;
    completed(r, plan.key, Status::ok());
    return true;
  }

  bool network_one(std::uint32_t r) {
    if (!cluster_.is_free(r) || cluster_.rank(r).network.empty()) return false;
    const std::size_t which = random_() % cluster_.rank(r).network.size();
    const auto [key, part] = cluster_.rank(r).network[which];
    const Call& call = *find(r, key);
    if (faults_ && random_() % 10 == 0) {
      cluster_.finish_network(r, which, Status(Code::kPeerLost, "server 3 is gone"));
      return true;
    }
    const auto doubled = [&]<class T>(T, std::span<std::byte> bytes) {
      for (std::size_t at = 0; at < bytes.size(); at += sizeof(T)) {
        T value;
        std::memcpy(&value, bytes.data() + at, sizeof(T));
        value = static_cast<T>(value + value);
        std::memcpy(bytes.data() + at, &value, sizeof(T));
      }
    };
    for (const ByteSpan& range : call.plan->owned[call.member]) {
      const auto bytes = part.subspan(range.offset, range.bytes);
      call.plan->descriptor.dtype == DataType::kFloat32 ? doubled(float{}, bytes) : doubled(std::int64_t{}, bytes);
    }
    cluster_.finish_network(r, which, Status::ok());
    return true;
  }

  bool disturb(std::uint32_t r) {
    if (!cluster_.rank(r).alive) return false;
    switch (random_() % 3) {
      case 0:
        if (lost_.size() + 2 > cluster_.size()) return false;
        cluster_.rank(r).alive = false;
        lost_.insert(r);
        return true;
      case 1:
        if (!cluster_.is_free(r) || calls_[r].empty()) return false;
        cluster_.rank(r).engine->abort(cluster_.now(), calls_[r][random_() % calls_[r].size()].plan->key,
                                       Status(Code::kCancelled, "no longer wanted"));
        cluster_.take(r);
        return true;
      default:
        cluster_.advance_time(std::chrono::seconds(random_() % 4));
        return true;
    }
  }

  /// Nothing moves by itself: deaths are noticed, deadlines pass.
  bool pass_time() {
    for (const std::uint32_t lost : lost_) {
      for (std::uint32_t r = 0; r < cluster_.size(); ++r) {
        if (cluster_.is_free(r) && noticed_.emplace(r, lost).second) {
          cluster_.lose(r, lost);
          return true;
        }
      }
    }
    Instant next = Instant::max();
    for (std::uint32_t r = 0; r < cluster_.size(); ++r) {
      if (cluster_.rank(r).alive) next = std::min(next, cluster_.rank(r).engine->next_deadline());
    }
    if (next == Instant::max()) return false;
    if (next > cluster_.now()) cluster_.advance_time(next - cluster_.now());
    for (std::uint32_t r = 0; r < cluster_.size(); ++r) {
      if (cluster_.is_free(r)) cluster_.tick(r);
    }
    return true;
  }

  Call* find(std::uint32_t r, const OpKey& key) {
    for (Call& call : calls_[r]) {
      if (call.plan->key == key && call.submitted && !call.done) return &call;
    }
    return nullptr;
  }

  void completed(std::uint32_t r, const OpKey& key, const Status& status) {
    Call* call = find(r, key);
    ASSERT_NE(call, nullptr) << "rank " << r << " completes what is not pending";
    call->done = true;
    call->status = status;
    if (status.is_ok()) {
      EXPECT_TRUE(std::ranges::equal(call->memory, call->plan->expected))
          << "rank " << r << ", " << to_string(call->plan->descriptor) << (call->in_arena ? " in place" : " staged");
    }
    // From here on the memory is the caller's.
    std::ranges::fill(call->memory, kUntouched);
  }

  void check_call(std::uint32_t r, const Call& call, std::uint64_t& completed_ok) {
    EXPECT_TRUE(call.done) << "rank " << r << ": " << to_string(call.plan->descriptor) << " never completed";
    if (!faults_) {
      EXPECT_TRUE(call.status.is_ok()) << call.status.to_string();
    }
    completed_ok += call.status.is_ok();
    // Somebody was silent for all of the patience, by a clock that jumps here: its caller was told.
    if (call.status.message().find("may still write") != std::string::npos) {
      ++told_;
      return;
    }
    EXPECT_TRUE(std::ranges::all_of(call.memory, [](std::byte b) { return b == kUntouched; }))
        << "rank " << r << ": memory of " << to_string(call.plan->descriptor) << " was touched after its end ("
        << call.status.to_string() << ")";
  }

  std::uint64_t told_ = 0;
  std::mt19937 random_;
  bool faults_;
  LocalCluster cluster_;
  std::vector<Plan> plans_;
  std::vector<std::vector<Call>> calls_;  // By rank, in its order of calling.
  std::uint64_t shortcuts_ = 0;           // Taken to their end.
  std::set<std::uint32_t> lost_;
  std::set<std::pair<std::uint32_t, std::uint32_t>> noticed_;
};

void run_seeds(std::uint32_t first, std::uint32_t count, bool faults) {
  const herring::testing::SeedRange range = herring::testing::seeds(count, first);
  std::uint64_t told = 0;
  std::uint64_t shortcuts = 0;
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    Schedule schedule(static_cast<std::uint32_t>(seed), faults);
    schedule.run();
    schedule.check();
    told += schedule.told();
    shortcuts += schedule.shortcuts();
    if (::testing::Test::HasFailure()) {
      FAIL() << "seed " << seed << " fails; HERRING_TEST_SEED=" << seed << " replays it";
    }
  }
  if (range.count >= 1000) {  // Of fewer the share says little.
    EXPECT_GT(shortcuts, range.count / 20) << "the schedules hardly take any";
  }
  EXPECT_LE(told, faults ? 1 + range.count / 25 : 0) << "an exception that became the rule";
  std::cout << range.count << " schedules, " << told << " callers told that memory may still be written\n";
}

TEST(EngineSchedules, EveryResultIsTheTreeSumWhateverTheSchedule) { run_seeds(1, 1500, false); }

TEST(EngineSchedules, FaultsEndEveryOperationAndNobodyTouchesItsMemoryAfterwards) { run_seeds(100001, 3000, true); }

}  // namespace
}  // namespace herring::intra_node
