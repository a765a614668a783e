// What a user would lose: sums by name that are wrong, or never come, with real processes' memory, servers and threads
// below.
#include "collectives/fusion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <random>

#include "core/status.h"
#include "runtime/job.h"

namespace herring::collectives {
namespace {

using runtime::Runtime;
using runtime::testing::expect_clean;
using runtime::testing::JobShape;
using runtime::testing::run_job;
using namespace std::chrono_literals;

constexpr GroupId kOwnGroup{77};

TensorSpec spec(std::size_t elements) {
  TensorSpec made;
  made.descriptor.dims = 1;
  made.descriptor.shape[0] = elements;
  made.descriptor.op_bytes = elements * sizeof(float);
  return made;
}

/// What a binding does: tensors by name, and those that go alone as operations of the runtime.
class Door {
 public:
  explicit Door(Runtime& runtime, FusionSettings settings = {}) : runtime_(runtime) {
    std::vector<std::uint32_t> ranks(runtime.size());
    std::iota(ranks.begin(), ranks.end(), 0u);
    settings.engine.index = runtime.rank();
    if (settings.timeout == Duration{}) settings.timeout = 20s;
    const std::shared_ptr<runtime::Communicator> borrowed(&runtime, [](runtime::Communicator*) {});
    fusion_ = std::make_shared<Fusion>(borrowed, kOwnGroup, ranks, settings,
                                       [this](Ticket ticket, const auto&) { return go_alone(ticket); });
  }

  /// In place.
  Ticket start(const std::string& name, std::span<float> values, TensorSpec tensor) {
    const std::span<std::byte> memory = std::as_writable_bytes(values);
    const std::scoped_lock lock(mutex_);  // Else it may have to go alone before it is known here.
    const std::optional<Ticket> ticket = fusion_->submit({name, tensor, memory, memory});
    const Ticket number = ticket.value_or(next_own_--);
    tensors_[number] = {name, tensor, memory, nullptr};
    if (!ticket) start_alone(tensors_[number]);
    return number;
  }
  Ticket start(const std::string& name, std::span<float> values) { return start(name, values, spec(values.size())); }

  Status finish(Ticket ticket) {
    const Instant limit = runtime::testing::in_seconds(60);
    if (fusion_->wait(ticket, limit) == Fusion::State::kPending) return {Code::kTimeout, "still pending"};
    std::shared_ptr<runtime::Work> work;
    {
      const std::scoped_lock lock(mutex_);
      work = tensors_.at(ticket).work;
    }
    const Status status = fusion_->forget(ticket);
    if (!work) return status;
    ++alone_;
    return work->wait(limit) ? work->status() : Status(Code::kTimeout, "still pending alone");
  }

  Fusion& fusion() { return *fusion_; }
  int alone() const { return alone_; }
  void close() { fusion_->close(runtime::testing::in_seconds(10)); }

 private:
  struct Tensor {
    std::string name;
    TensorSpec spec;
    std::span<std::byte> memory;
    std::shared_ptr<runtime::Work> work;
  };

  Status go_alone(Ticket ticket) {
    const std::scoped_lock lock(mutex_);
    start_alone(tensors_.at(ticket));
    return Status::ok();
  }

  void start_alone(Tensor& tensor) {
    runtime::Request request;
    request.name = tensor.name;
    request.descriptor = tensor.spec.descriptor;
    request.input = request.output = tensor.memory;
    fusion_->went_outside(tensor.name);
    tensor.work = runtime_.submit(request);
    tensor.work->on_done([fusion = fusion_, name = tensor.name](const Status&) { fusion->came_back(name); });
  }

  Runtime& runtime_;
  std::shared_ptr<Fusion> fusion_;
  std::mutex mutex_;
  std::map<Ticket, Tensor> tensors_;
  Ticket next_own_ = ~Ticket{0};
  int alone_ = 0;
};

std::vector<float> data(std::size_t elements, std::uint64_t seed) {
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  std::uniform_real_distribution<float> values(-1, 1);
  std::vector<float> made(elements);
  for (float& value : made) value = values(random);
  return made;
}

std::vector<float> reduced_by_the_runtime(Runtime& runtime, std::vector<float> values, ReduceOp op) {
  runtime::Request request;
  request.descriptor = spec(values.size()).descriptor;
  request.descriptor.reduce = op;
  request.input = request.output = std::as_writable_bytes(std::span(values));
  const auto work = runtime.submit(request);
  work->wait(Instant::max());
  work->status().or_throw();
  return values;
}

class FusionOnJobs : public ::testing::TestWithParam<JobShape> {};

TEST_P(FusionOnJobs, TensorsInAnyOrderHaveTheBitsThatTheyHaveAlone) {
  if (GetParam().hosts > 1 && !runtime::testing::has_fabric()) GTEST_SKIP() << "no libfabric";
  expect_clean(run_job(GetParam(), [](Runtime& runtime) {
    Door door(runtime);
    constexpr int kTensors = 60;
    std::mt19937 order(runtime.rank());
    for (int step = 0; step < 4; ++step) {
      std::vector<int> turn(kTensors);
      std::iota(turn.begin(), turn.end(), 0);
      std::ranges::shuffle(turn, order);
      std::vector<std::vector<float>> values(kTensors), wanted(kTensors);
      std::vector<Ticket> tickets(kTensors);
      const auto op = [](int i) {
        return i % 3 == 0 ? ReduceOp::kMax : i % 3 == 1 ? ReduceOp::kSum : ReduceOp::kAverage;
      };
      for (int i = 0; i < kTensors; ++i) {
        values[i] = data(static_cast<std::size_t>(i * i + 1), 1000 * step + 10 * i + runtime.rank());
        wanted[i] = reduced_by_the_runtime(runtime, values[i], op(i));
      }
      for (const int i : turn) {
        TensorSpec tensor = spec(values[i].size());
        tensor.descriptor.reduce = op(i);
        tickets[i] = door.start("t" + std::to_string(i), values[i], tensor);
        if (i % 20 == 0) std::this_thread::sleep_for(2ms);  // The thread in the background has its turn.
      }
      for (const int i : turn) {
        EXPECT_TRUE(door.finish(tickets[i]).is_ok());
        EXPECT_EQ(values[i], wanted[i]) << i;
      }
    }
    EXPECT_EQ(door.alone(), 0);
    door.close();
  }));
}

/// Tensors of a rank, which lie in a row that it has asked for, or by themselves.
class Tensors {
 public:
  static constexpr int kCount = 40;

  Tensors(Door& door, std::string prefix, bool has_row) : door_(door), prefix_(std::move(prefix)) {
    std::vector<NamedBytes> asked;
    for (int i = 0; i < kCount; ++i) asked.push_back({name(i), elements(i) * sizeof(float)});
    if (has_row) row_ = door.fusion().place(asked);
    for (int i = 0; i < kCount; ++i) {
      own_.emplace_back(has_row ? 0 : elements(i));
      values_.emplace_back(
          has_row ? reinterpret_cast<float*>(row_.memory.get() + row_.offsets[at(i)]) : own_[at(i)].data(),
          elements(i));
    }
  }

  /// Two of them are too large to travel with others by themselves.
  static bool is_large(int i) { return i == 7 || i == 30; }
  static std::size_t elements(int i) { return is_large(i) ? 400'000 : at(i) * 37; }
  std::string name(int i) const { return prefix_ + std::to_string(i); }
  std::span<float> operator[](int i) { return values_[at(i)]; }
  bool are(int i, float value) const {
    return std::ranges::all_of(values_[at(i)], [&](float each) { return each == value; });
  }

  /// Every tensor once, in an order of this rank's own.
  void step(Runtime& runtime, ReduceOp op, std::uint64_t seed) {
    std::mt19937 order(static_cast<std::uint32_t>(seed * 10 + runtime.rank()));
    std::vector<int> turn(kCount);
    std::iota(turn.begin(), turn.end(), 0);
    std::ranges::shuffle(turn, order);
    std::vector<std::vector<float>> wanted;
    for (int i = 0; i < kCount; ++i) {
      const std::vector<float> made = data(elements(i), 1000 * seed + 10 * at(i) + runtime.rank());
      std::ranges::copy(made, values_[at(i)].begin());
      wanted.push_back(reduced_by_the_runtime(runtime, made, op));
    }
    std::vector<Ticket> tickets(kCount);
    for (const int i : turn) {
      TensorSpec tensor = spec(elements(i));
      tensor.descriptor.reduce = op;
      tickets[at(i)] = door_.start(name(i), values_[at(i)], tensor);
      if (i % 20 == 0) std::this_thread::sleep_for(2ms);  // The thread in the background has its turn.
    }
    for (const int i : turn) {
      const Status status = door_.finish(tickets[at(i)]);
      EXPECT_TRUE(status.is_ok()) << status.message();
      EXPECT_TRUE(std::ranges::equal(values_[at(i)], wanted[at(i)])) << name(i);
    }
  }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }

  Door& door_;
  const std::string prefix_;
  TensorRow row_;
  std::vector<std::vector<float>> own_;
  std::vector<std::span<float>> values_;
};

TEST_P(FusionOnJobs, WhatLiesInARowIsReducedThereAndHasTheBitsThatItHasAlone) {
  if (GetParam().hosts > 1 && !runtime::testing::has_fabric()) GTEST_SKIP() << "no libfabric";
  expect_clean(run_job(GetParam(), [](Runtime& runtime) {
    Door door(runtime);
    Tensors tensors(door, "t", true);
    for (int step = 0; step < 5; ++step) tensors.step(runtime, step == 4 ? ReduceOp::kMax : ReduceOp::kAverage, step);
    EXPECT_GT(door.fusion().counters().in_place, 0u);
    door.close();
  }));
}

/// Who packs and who does not is each rank's own business.
TEST_P(FusionOnJobs, RanksThatAskedForMemoryMeetThoseThatDidNot) {
  if (GetParam().hosts > 1 && !runtime::testing::has_fabric()) GTEST_SKIP() << "no libfabric";
  expect_clean(run_job(GetParam(), [](Runtime& runtime) {
    Door door(runtime);
    Tensors without_0(door, "a", runtime.rank() != 0), without_1(door, "b", runtime.rank() != 1);
    for (int step = 0; step < 3; ++step) {
      without_0.step(runtime, ReduceOp::kSum, step);
      without_1.step(runtime, ReduceOp::kSum, step);
    }
    EXPECT_EQ(door.alone(), 2 * 2 * 3) << "the large ones";
    door.close();
  }));
}

std::string shape_name(const ::testing::TestParamInfo<JobShape>& info) {
  const JobShape& shape = info.param;
  return std::to_string(shape.workers) + "On" + std::to_string(shape.hosts) + "With" + std::to_string(shape.servers) +
         (shape.strict ? "Strict" : "");
}

INSTANTIATE_TEST_SUITE_P(Jobs, FusionOnJobs,
                         ::testing::Values(JobShape{.workers = 2}, JobShape{.workers = 3},
                                           JobShape{.workers = 2, .servers = 2}, JobShape{.workers = 4, .hosts = 2},
                                           JobShape{.workers = 2, .hosts = 2, .strict = true}),
                         shape_name);

TEST(Fusion, FactorsAreAppliedBeforeAndAfter) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    Door door(runtime);
    std::vector<float> values(10, 1.0f + static_cast<float>(runtime.rank()));
    TensorSpec tensor = spec(10);
    tensor.prescale = 0.5;
    tensor.postscale = 4;
    EXPECT_TRUE(door.finish(door.start("t", values, tensor)).is_ok());
    EXPECT_EQ(values, std::vector<float>(10, 6.0f));
    door.close();
  }));
}

TEST(Fusion, ANameThatIsInFlightIsRefused) {
  expect_clean(run_job({.workers = 1}, [](Runtime& runtime) {
    Door door(runtime);
    std::vector<float> one(10), two(10);
    const Ticket ticket = door.start("t", one);
    EXPECT_THROW(door.start("t", two), Error);
    EXPECT_TRUE(door.finish(ticket).is_ok());
    EXPECT_TRUE(door.finish(door.start("t", two)).is_ok());
    door.close();
  }));
}

/// A bucket that a waiter has started ends without him.
TEST(Fusion, WhoWaitsForAShortTimeAndLeavesHoldsUpNobody) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    Door door(runtime);
    std::vector<float> values(200'000, 1);
    for (int step = 0; step < 100; ++step) {
      std::ranges::fill(values, 1.0F);
      const Ticket ticket = door.start("t", values);
      const Instant soon = std::chrono::steady_clock::now() + std::chrono::microseconds(10 * step);
      static_cast<void>(door.fusion().wait(ticket, soon));
      const Instant limit = runtime::testing::in_seconds(20);
      while (door.fusion().state(ticket) == Fusion::State::kPending && std::chrono::steady_clock::now() < limit) {
        std::this_thread::sleep_for(100us);
      }
      ASSERT_NE(door.fusion().state(ticket), Fusion::State::kPending) << "step " << step;
      EXPECT_TRUE(door.finish(ticket).is_ok());
      EXPECT_EQ(values, std::vector<float>(200'000, 2));
    }
    door.close();
  }));
}

TEST(Fusion, MemoryThatIsInUseIsRefused) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    Door door(runtime);
    std::vector<float> values(10, 1), others(10, 1);
    const Ticket ticket = door.start("t", values);
    EXPECT_THROW(door.start("u", values), Error);
    runtime::Request request = runtime::testing::all_reduce(std::span(values));
    request.name = "v";
    const auto work = runtime.submit(request);
    EXPECT_EQ(work->status().code(), Code::kInvalidArgument) << work->status().message();
    EXPECT_TRUE(door.finish(ticket).is_ok());
    EXPECT_TRUE(door.finish(door.start("u", values)).is_ok());
    EXPECT_EQ(values, std::vector<float>(10, 4));
    door.close();
  }));
}

TEST(Fusion, AShapeThatDiffersIsNamedAndTheRestIsWhole) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    Door door(runtime);
    for (int step = 0; step < 2; ++step) {
      std::vector<float> odd(10 + runtime.rank()), even(10, 1);
      const Ticket first = door.start("odd", odd), second = door.start("even", even);
      const Status status = door.finish(first);
      EXPECT_EQ(status.code(), Code::kMismatch);
      EXPECT_NE(status.message().find("float32[10]"), std::string::npos) << status.message();
      EXPECT_NE(status.message().find("float32[11]"), std::string::npos) << status.message();
      EXPECT_TRUE(door.finish(second).is_ok());
      EXPECT_EQ(even, std::vector<float>(10, 2));
    }
    door.close();
  }));
}

TEST(Fusion, NaNIsBlamedOnItsTensorAlone) {
  JobShape shape{.workers = 2};
  shape.config.check_finite = Toggle::kOn;
  expect_clean(run_job(shape, [](Runtime& runtime) {
    Door door(runtime);
    for (int step = 0; step < 2; ++step) {
      std::vector<float> bad(10, 1), good(10, 1);
      if (runtime.rank() == 1) bad[3] = std::nanf("");
      const Ticket first = door.start("bad", bad), second = door.start("good", good);
      const Status status = door.finish(first);
      EXPECT_EQ(status.code(), Code::kNotFinite) << status.message();
      EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
      EXPECT_TRUE(door.finish(second).is_ok());
      EXPECT_EQ(good, std::vector<float>(10, 2));
    }
    door.close();
  }));
}

TEST(Fusion, NaNInARowIsBlamedOnItsTensorAlone) {
  JobShape shape{.workers = 2};
  shape.config.check_finite = Toggle::kOn;
  expect_clean(run_job(shape, [](Runtime& runtime) {
    FusionSettings settings;
    settings.checks_finite = true;
    Door door(runtime, settings);
    Tensors tensors(door, "t", true);
    for (int step = 0; step < 3; ++step) {
      std::vector<Ticket> tickets;
      for (int i = 0; i < Tensors::kCount; ++i) std::ranges::fill(tensors[i], 1.0f);
      if (runtime.rank() == 1) tensors[7][300'000] = tensors[9][3] = std::nanf("");
      for (int i = 0; i < Tensors::kCount; ++i) tickets.push_back(door.start(tensors.name(i), tensors[i]));
      for (int i = 0; i < Tensors::kCount; ++i) {
        const Status status = door.finish(tickets[static_cast<std::size_t>(i)]);
        const bool is_bad = i == 7 || i == 9;
        EXPECT_EQ(status.code(), is_bad ? Code::kNotFinite : Code::kOk) << status.message();
        EXPECT_TRUE(is_bad || tensors.are(i, 2)) << i;
      }
    }
    door.close();
  }));
}

TEST(Fusion, FactorsAreAppliedInARowToo) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    Door door(runtime);
    Tensors before(door, "a", true), after(door, "b", true);
    for (int step = 0; step < 6; ++step) {
      const bool is_after = step % 2 == 0;
      Tensors& tensors = is_after ? after : before;
      std::vector<Ticket> tickets;
      for (int i = 0; i < Tensors::kCount; ++i) {
        std::ranges::fill(tensors[i], 1.0f + static_cast<float>(runtime.rank()));
        TensorSpec tensor = spec(tensors[i].size());
        if (!Tensors::is_large(i)) {  // This door's own operations know no factors.
          tensor.prescale = is_after ? 1 : 0.5;
          tensor.postscale = 4;
        }
        tickets.push_back(door.start(tensors.name(i), tensors[i], tensor));
      }
      for (int i = 0; i < Tensors::kCount; ++i) {
        EXPECT_TRUE(door.finish(tickets[static_cast<std::size_t>(i)]).is_ok());
        const float wanted = Tensors::is_large(i) ? 3.0f : is_after ? 12.0f : 6.0f;
        EXPECT_TRUE(tensors.are(i, wanted)) << i << " in step " << step;
      }
    }
    EXPECT_GT(door.fusion().counters().in_place, 0u);
    door.close();
  }));
}

TEST(Fusion, AShapeThatDiffersInARowIsNamedAndTheRestIsWhole) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    Door door(runtime);
    Tensors tensors(door, "t", true);
    for (int step = 0; step < 4; ++step) {
      std::vector<Ticket> tickets;
      for (int i = 0; i < Tensors::kCount; ++i) {
        std::ranges::fill(tensors[i], 1.0f);
        const bool is_odd = i == 20 && step > 1 && runtime.rank() == 1;
        tickets.push_back(door.start(tensors.name(i), is_odd ? tensors[i].first(5) : tensors[i]));
      }
      for (int i = 0; i < Tensors::kCount; ++i) {
        const Status status = door.finish(tickets[static_cast<std::size_t>(i)]);
        const bool is_odd = i == 20 && step > 1;
        EXPECT_EQ(status.code(), is_odd ? Code::kMismatch : Code::kOk) << status.message();
        EXPECT_TRUE(is_odd || tensors.are(i, 2)) << i;
      }
    }
    door.close();
  }));
}

TEST(Fusion, MemoryOfARowThatHasGoneIsNoRow) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    Door door(runtime);
    auto first = std::make_unique<Tensors>(door, "t", true);
    for (int step = 0; step < 3; ++step) first->step(runtime, ReduceOp::kSum, step);
    const auto in_place = door.fusion().counters().in_place;
    EXPECT_GT(in_place, 0u);
    first.reset();
    Tensors second(door, "t", false);
    for (int step = 0; step < 3; ++step) second.step(runtime, ReduceOp::kSum, step);
    EXPECT_EQ(door.fusion().counters().in_place, in_place);
    Tensors third(door, "t", true);
    for (int step = 0; step < 3; ++step) third.step(runtime, ReduceOp::kSum, step);
    EXPECT_GT(door.fusion().counters().in_place, in_place);
    door.close();
  }));
}

TEST(Fusion, ATwiceNamedTensorIsRefused) {
  expect_clean(run_job({.workers = 1}, [](Runtime& runtime) {
    Door door(runtime);
    EXPECT_THROW(door.fusion().place(std::vector<NamedBytes>{{"a", 4}, {"b", 4}, {"a", 4}}), Error);
    EXPECT_THROW(door.fusion().place(std::vector<NamedBytes>{{"a", ~std::uint64_t{0} - 100}}), Error);
    EXPECT_EQ(door.fusion().place(std::vector<NamedBytes>{{"a", 1}, {"", 65}, {"c", 0}}).offsets,
              (std::vector<std::uint64_t>{0, 64, 192}));
    door.close();
  }));
}

TEST(Fusion, ATensorThatNeverComesIsNamedWhenItsTimeIsOver) {
  JobShape shape{.workers = 2};
  shape.config.timeout_s = 3;
  expect_clean(run_job(shape, [](Runtime& runtime) {
    FusionSettings settings;
    settings.timeout = 3s;
    settings.engine.patience = 500ms;
    Door door(runtime, settings);
    std::vector<float> values(10, 1), both(10, 1);
    EXPECT_TRUE(door.finish(door.start("both", both)).is_ok());
    if (runtime.rank() == 0) {
      const Status status = door.finish(door.start("only on 0", values));
      EXPECT_EQ(status.code(), Code::kTimeout);
      EXPECT_NE(status.message().find("only on 0"), std::string::npos) << status.message();
    } else {
      std::this_thread::sleep_for(5s);
    }
    door.close();
  }));
}

TEST(Fusion, WhoClosesInARoundThatNobodyElseEntersIsNotHeldUp) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    Door door(runtime);
    std::vector<float> values(10, 1);
    EXPECT_TRUE(door.finish(door.start("t", values)).is_ok());
    if (runtime.rank() == 0) {
      door.fusion().went_outside("large");
      std::this_thread::sleep_for(500ms);  // Rank 0 is in a round now.
      door.fusion().came_back("large");
    }
    const Instant begun = std::chrono::steady_clock::now();
    door.close();
    EXPECT_LT(std::chrono::steady_clock::now() - begun, 2s);
  }));
}

}  // namespace
}  // namespace herring::collectives
