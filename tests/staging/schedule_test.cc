// The staging engine and its pump over FakeDevices, several ranks, under seeded schedules: copies in random pieces and
// order, operations submitted in another order on each rank, time-outs in mid-copy, cancellations, stalled streams,
// devices that fail.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "device/fake_device.h"
#include "device/host_pages.h"
#include "seeds.h"
#include "staging/pump.h"

namespace herring::staging {
namespace {

using namespace std::chrono_literals;
using testing::FakeDevice;
using testing::FakeGpu;
using testing::HostPages;

constexpr std::uint64_t kPartBytes = 512;

struct Plan {
  std::uint32_t ranks = 1;
  std::uint32_t slots = 1;
  std::vector<std::uint64_t> sizes;
  Until until = Until::kDone;
  bool has_faults = false;
};

class Rank;

/// Reduces a part when all ranks have it: bytes added, as hosts and servers would.
class Reduction {
 public:
  explicit Reduction(std::size_t ranks) : ranks_(ranks) {}
  void bring(Rank* rank, const Part& part, std::span<std::byte> memory);
  void leave(Rank* rank, const Part& part);
  /// Operations that some rank gave up: the others' parts of it fail.
  void give_up(OperationId id) { given_up_.insert(id.value); }
  /// Ends something that may end, by the seed. False where nothing may.
  bool step(Instant now, std::mt19937_64& random);

 private:
  struct Held {
    Rank* rank;
    Part part;
    std::span<std::byte> memory;
    bool is_reduced = false;
    bool is_left = false;
  };
  using Key = std::pair<std::uint32_t, std::uint32_t>;
  void reduce(std::vector<Held>& held);

  const std::size_t ranks_;
  std::map<Key, std::vector<Held>> parts_;
  std::set<std::uint32_t> given_up_;
};

class Rank final : public Owner {
 public:
  Rank(const Plan& plan, std::uint64_t seed, Reduction& reduction)
      : plan_(plan),
        reduction_(reduction),
        random_(seed),
        gpu_({.seed = seed * 7 + 1, .largest_piece = 400}),
        device_(gpu_),
        slots_(8 * kPartBytes),
        theirs_(gpu_.create_stream()) {
    if (!device_.pin(slots_.span()).is_ok()) throw std::runtime_error("pin");
    out_ = device_.create_stream();
    back_ = device_.create_stream();
    const Options options{.slots = plan.slots, .part_bytes = kPartBytes, .drain = 500ms};
    pump_ = std::make_unique<Pump>(device_, out_, back_, options, slots_.span(), *this);
    for (std::uint32_t i = 0; i < plan.sizes.size(); ++i) to_submit_.push_back(i);
    std::ranges::shuffle(to_submit_, random_);
  }

  void reduce(const Part& part, std::span<std::byte> memory) override {
    EXPECT_TRUE(reducing_.insert(part.slot.value).second) << "slot " << part.slot.value << " given out twice";
    reduction_.bring(this, part, memory);
  }
  void abandon(const Part& part) override { reduction_.leave(this, part); }
  void complete(OperationId id, const Status& status) override {
    EXPECT_TRUE(ends_.try_emplace(id.value, status).second) << "operation " << id.value << " completed twice";
    if (!status.is_ok()) {
      reduction_.give_up(id);
      return;
    }
    Operation& operation = operations_.at(id.value);
    // Somebody who works on the back stream now sees the result.
    gpu_.launch(back_.value, [this, &operation] {
      if (operation.bytes == 0) return;
      const std::byte* const there = gpu_.alias(operation.memory.address, operation.bytes);
      operation.result.assign(there, there + operation.bytes);
    });
  }
  void release(OperationId id) override {
    EXPECT_TRUE(ends_.contains(id.value)) << "released before its end";
    Operation& operation = operations_.at(id.value);
    EXPECT_FALSE(operation.is_released);
    operation.is_released = true;
    if (!gpu_.is_broken()) to_free_.push_back(id.value);
  }

  void submit_next(Instant now) {
    if (to_submit_.empty()) return;
    const std::uint32_t index = to_submit_.back();
    to_submit_.pop_back();
    Operation& operation = operations_[index];
    operation.bytes = plan_.sizes[index];
    if (!device_.allocate(std::max<std::uint64_t>(operation.bytes, 1), operation.memory).is_ok()) {
      ends_[index] = device_.health();
      reduction_.give_up({index});
      return;
    }
    // Their stream writes the gradient when it likes; until then the memory holds something else.
    gpu_.launch(theirs_, [] {});
    gpu_.launch(theirs_, [this, index, &operation] {
      fill(index, std::span(gpu_.alias(operation.memory.address, operation.bytes), operation.bytes));
    });
    const std::uint64_t ready = gpu_.create_event();
    gpu_.record(ready, theirs_);
    const DeviceSpan memory = operation.memory.subspan(0, operation.bytes);
    const Duration limit = plan_.has_faults && random_() % 4 == 0 ? Duration(random_() % 2000 * 1ms + 1ms) : 1h;
    const Status status = pump_->submit(now, OperationId{index}, {memory, memory, {ready}, now + limit, plan_.until});
    if (!status.is_ok()) {
      ends_[index] = status;
      reduction_.give_up({index});
    }
  }

  void fill(std::uint32_t index, std::span<std::byte> to) const { fill_for(number_, index, to); }
  static void fill_for(std::uint64_t rank, std::uint32_t index, std::span<std::byte> to) {
    std::mt19937 random(static_cast<std::uint32_t>(rank * 1000 + index));
    for (std::byte& each : to) each = static_cast<std::byte>(random());
  }

  /// What goes wrong here, by the seed.
  void upset(Instant now) {
    switch (random_() % 60) {
      case 0:
        pump_->cancel(now, OperationId{static_cast<std::uint32_t>(random_() % plan_.sizes.size())},
                      {Code::kCancelled, "not wanted"});
        return;
      case 1:
        gpu_.stall((random_() % 2 == 0 ? out_ : back_).value);
        is_stalled_ = true;
        return;
      case 2:
      case 3:
        unstall();
        return;
      case 4:
        if (random_() % 20 == 0) gpu_.fail();
        return;
      default:
        return;
    }
  }
  void unstall() {
    gpu_.unstall(out_.value);
    gpu_.unstall(back_.value);
    is_stalled_ = false;
  }
  void free_released() {
    if (is_stalled_) return;  // Our own reader on the back stream comes first.
    for (const std::uint32_t id : std::exchange(to_free_, {})) {
      gpu_.run_all();
      if (!gpu_.is_broken()) {
        EXPECT_TRUE(device_.release(operations_.at(id).memory).is_ok());
      }
    }
  }
  bool is_done() const { return to_submit_.empty() && pump_->engine().operations() == 0; }

  struct Operation {
    std::uint64_t bytes = 0;
    DeviceSpan memory;
    std::vector<std::byte> result;
    bool is_released = false;
  };

  const Plan& plan_;
  Reduction& reduction_;
  std::mt19937_64 random_;
  FakeGpu gpu_;
  FakeDevice device_;
  HostPages slots_;
  std::uint64_t theirs_;
  std::uint64_t number_ = 0;
  StreamHandle out_, back_;
  std::unique_ptr<Pump> pump_;
  std::vector<std::uint32_t> to_submit_;
  std::vector<std::uint32_t> to_free_;
  bool is_stalled_ = false;
  std::map<std::uint32_t, Operation> operations_;
  std::map<std::uint32_t, Status> ends_;
  std::set<std::uint32_t> reducing_;
};

void Reduction::bring(Rank* rank, const Part& part, std::span<std::byte> memory) {
  std::vector<Held>& held = parts_[{part.operation.value, part.index}];
  held.push_back({rank, part, memory});
  if (held.size() == ranks_) reduce(held);
}

void Reduction::leave(Rank* rank, const Part& part) {
  for (Held& each : parts_[{part.operation.value, part.index}]) {
    if (each.rank == rank) each.is_left = true;
  }
}

void Reduction::reduce(std::vector<Held>& held) {
  for (std::size_t i = 0; i < held.front().memory.size(); ++i) {
    std::uint32_t sum = 0;
    for (const Held& each : held) sum += static_cast<std::uint32_t>(each.memory[i]);
    for (const Held& each : held) each.memory[i] = static_cast<std::byte>(sum);
  }
  for (Held& each : held) each.is_reduced = true;
}

bool Reduction::step(Instant now, std::mt19937_64& random) {
  std::vector<std::pair<Key, std::size_t>> able;
  for (const auto& [key, held] : parts_) {
    for (std::size_t i = 0; i < held.size(); ++i) {
      if (held[i].is_reduced || held[i].is_left || given_up_.contains(key.first)) able.emplace_back(key, i);
    }
  }
  if (able.empty()) return false;
  const auto [key, index] = able[random() % able.size()];
  std::vector<Held>& held = parts_.at(key);
  const Held each = held[index];
  // What was reduced stays so for the others.
  held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
  each.rank->reducing_.erase(each.part.slot.value);
  const Status status = each.is_reduced ? Status::ok() : Status(Code::kPeerLost, "a rank gave up");
  each.rank->pump_->reduced(now, each.part.operation, each.part.index, status);
  return true;
}

class World {
 public:
  World(const Plan& plan, std::uint64_t seed) : plan_(plan), random_(seed), reduction_(plan.ranks) {
    for (std::uint32_t i = 0; i < plan.ranks; ++i) {
      ranks_.push_back(std::make_unique<Rank>(plan_, seed * 31 + i, reduction_));
      ranks_.back()->number_ = i;
    }
  }

  void play() {
    for (int turn = 0; turn < 200'000 && !is_done(); ++turn) {
      now_ += Duration(random_() % 2'000'000);
      Rank& rank = *ranks_[random_() % ranks_.size()];
      if (random_() % 4 == 0) rank.submit_next(now_);
      if (random_() % 2 == 0) reduction_.step(now_, random_);
      rank.pump_->run(now_);
      rank.free_released();
      if (!plan_.has_faults) continue;
      if (turn < 3000) {
        rank.upset(now_);
      } else {
        rank.unstall();
      }
    }
    ASSERT_TRUE(is_done()) << "operations are left";
    for (const auto& rank : ranks_) {
      rank->unstall();
      rank->gpu_.run_all();
      rank->free_released();
    }
  }

  void check() {
    for (const auto& rank : ranks_) {
      EXPECT_EQ(rank->gpu_.faults(), std::vector<std::string>{});
      EXPECT_EQ(rank->ends_.size(), plan_.sizes.size()) << "each operation has one end";
      const Engine& engine = rank->pump_->engine();
      EXPECT_EQ(engine.free_slots() + engine.lost_slots(), engine.slots()) << "slots have gone missing";
      EXPECT_LE(engine.slots(), plan_.slots + plan_.sizes.size());
      if (!rank->gpu_.is_broken()) {
        EXPECT_EQ(engine.lost_slots(), 0u);
      }
      for (const auto& [id, status] : rank->ends_) check_end(*rank, id, status);
    }
  }

 private:
  void check_end(Rank& rank, std::uint32_t id, const Status& status) {
    if (!plan_.has_faults) {
      EXPECT_TRUE(status.is_ok()) << status.to_string();
    }
    if (rank.gpu_.is_broken()) return;
    EXPECT_TRUE(rank.operations_.at(id).is_released);
    if (!status.is_ok()) return;
    const std::vector<std::byte>& result = rank.operations_.at(id).result;
    std::vector<std::byte> wanted(plan_.sizes[id]), each(plan_.sizes[id]);
    for (std::uint32_t i = 0; i < plan_.ranks; ++i) {
      Rank::fill_for(i, id, each);
      for (std::size_t k = 0; k < wanted.size(); ++k) {
        wanted[k] = static_cast<std::byte>(static_cast<int>(wanted[k]) + static_cast<int>(each[k]));
      }
    }
    EXPECT_TRUE(result == wanted) << "operation " << id << " has a wrong result";
  }
  bool is_done() const {
    return std::ranges::all_of(ranks_, [](const auto& rank) { return rank->is_done(); });
  }

  const Plan& plan_;
  std::mt19937_64 random_;
  Reduction reduction_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  Instant now_{1s};
};

Plan random_plan(std::uint64_t seed, bool has_faults) {
  std::mt19937_64 random(seed);
  Plan plan;
  plan.ranks = 1 + static_cast<std::uint32_t>(random() % 3);
  plan.slots = 1 + static_cast<std::uint32_t>(random() % 5);
  for (std::uint64_t count = 1 + random() % 6; count > 0; --count) plan.sizes.push_back(random() % (6 * kPartBytes));
  plan.until = random() % 2 == 0 ? Until::kDone : Until::kSubmitted;
  plan.has_faults = has_faults;
  return plan;
}

void play(std::uint64_t seed, bool has_faults) {
  SCOPED_TRACE("HERRING_TEST_SEED=" + std::to_string(seed));
  const Plan plan = random_plan(seed, has_faults);
  World world(plan, seed);
  world.play();
  if (!::testing::Test::HasFailure()) world.check();
}

TEST(StagingSchedule, EveryOrderGivesTheSameBytes) {
  const testing::SeedRange range = testing::seeds(2000);
  for (std::uint64_t seed = range.first; seed < range.first + range.count && !HasFailure(); ++seed) play(seed, false);
}

TEST(StagingSchedule, NothingThatGoesWrongCorruptsOrHangs) {
  const testing::SeedRange range = testing::seeds(3000);
  for (std::uint64_t seed = range.first; seed < range.first + range.count && !HasFailure(); ++seed) play(seed, true);
}

}  // namespace
}  // namespace herring::staging
