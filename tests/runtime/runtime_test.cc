// The whole runtime, several workers and servers as threads of one process, over the real hub, the real shared memory
// and (where there is one) the real libfabric: what a user's job is made of.
#include "runtime/runtime.h"

#include <gtest/gtest.h>

#include <barrier>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime/job.h"

namespace herring::runtime {
namespace {

using namespace testing;

void every_collective(Runtime& runtime) {
  const auto n = static_cast<float>(runtime.size());
  for (const std::size_t count : {0ul, 1ul, 7ul, 1000ul, 70'000ul, 3'000'001ul}) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i)
      values[i] = static_cast<float>(i % 100) + static_cast<float>(runtime.rank());
    finish(runtime.submit(all_reduce(values, ReduceOp::kAverage)));
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_FLOAT_EQ(values[i], static_cast<float>(i % 100) + (n - 1) / 2) << "element " << i << " of " << count;
    }
  }
  for (std::uint32_t root = 0; root < runtime.size(); ++root) {
    std::vector<float> values(300'000, static_cast<float>(runtime.rank()));
    Request request = all_reduce(values);
    request.descriptor.collective = Collective::kBroadcast;
    request.descriptor.root = root;
    finish(runtime.submit(request));
    EXPECT_EQ(values.front(), static_cast<float>(root));
    EXPECT_EQ(values.back(), static_cast<float>(root));
  }
  for (const std::size_t block : {1ul, 50'000ul}) {
    const std::vector<float> mine(block, static_cast<float>(runtime.rank() + 1));
    std::vector<float> all(block * runtime.size());
    Request request = all_reduce(all);
    request.descriptor.collective = Collective::kAllGather;
    request.input = std::as_bytes(std::span(mine));
    finish(runtime.submit(request));
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<float>(i / block + 1));
  }
  Request barrier;
  barrier.descriptor.collective = Collective::kBarrier;
  finish(runtime.submit(barrier));
}

TEST(Runtime, OneProcessNeedsNobody) { expect_clean(run_job({.workers = 1}, every_collective)); }

TEST(Runtime, SharedMemoryCarriesEveryCollective) {
  expect_clean(run_job({.workers = 2}, every_collective));
  expect_clean(run_job({.workers = 3}, every_collective));
}

TEST(Runtime, ServersCarryEveryCollective) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric here (set HERRING_TEST_LIBFABRIC)";
  expect_clean(run_job({.workers = 2, .servers = 2}, every_collective));
  expect_clean(run_job({.workers = 3, .hosts = 3}, every_collective));
  expect_clean(run_job({.workers = 4, .servers = 1, .hosts = 2}, every_collective));
  expect_clean(run_job({.workers = 4, .hosts = 2}, every_collective));
}

TEST(Runtime, TheBitsDoNotDependOnThePlacement) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric here (set HERRING_TEST_LIBFABRIC)";
  constexpr std::size_t kCount = 100'003;
  const auto result_of = [](const JobShape& shape) {
    std::vector<std::vector<float>> results(shape.workers);
    const auto errors = run_job(shape, [&](Runtime& runtime) {
      std::vector<float> values(kCount);
      std::uint32_t state = 12345 + runtime.rank();
      for (float& value : values) {
        state = state * 1664525u + 1013904223u;
        value = (static_cast<float>(state >> 8) / 65536.0f - 128.0f) * (runtime.rank() % 2 == 0 ? 1.0f : 1e-4f);
      }
      finish(runtime.submit(all_reduce(values, ReduceOp::kAverage)));
      results[runtime.rank()] = values;
    });
    expect_clean(errors);
    for (const auto& result : results) EXPECT_EQ(result, results[0]) << "ranks differ";
    return results[0];
  };
  const std::vector<float> shared = result_of({.workers = 4});
  EXPECT_EQ(shared, result_of({.workers = 4, .servers = 3}));
  EXPECT_EQ(shared, result_of({.workers = 4, .hosts = 2}));
  EXPECT_EQ(shared, result_of({.workers = 4, .hosts = 4}));
}

TEST(Runtime, NamedOperationsMeetInAnyOrder) {
  const auto body = [](Runtime& runtime) {
    constexpr std::size_t kNames = 20;
    std::vector<std::vector<float>> values(kNames);
    std::vector<std::shared_ptr<Work>> works(kNames);
    for (std::size_t i = 0; i < kNames; ++i) {
      const std::size_t name = runtime.rank() == 0 ? i : kNames - 1 - i;
      values[name].assign(10'000 + name, static_cast<float>(name));
      Request request = all_reduce(values[name]);
      request.name = "tensor" + std::to_string(name);
      works[name] = runtime.submit(request);
    }
    for (std::size_t name = 0; name < kNames; ++name) {
      finish(works[name]);
      ASSERT_EQ(values[name].back(), static_cast<float>(2 * name));
    }
  };
  expect_clean(run_job({.workers = 2}, body));
  if (has_fabric()) expect_clean(run_job({.workers = 2, .servers = 1}, body));
}

void sizes_differ(Runtime& runtime) {
  std::vector<float> values(runtime.rank() == 0 ? 3 : 4'000'000);
  const auto work = runtime.submit(all_reduce(values));
  ASSERT_TRUE(work->wait(in_seconds(30)));
  EXPECT_EQ(work->status().code(), Code::kMismatch) << work->status().to_string();
  EXPECT_NE(work->status().message().find("rank 0"), std::string::npos) << work->status().to_string();
  EXPECT_NE(work->status().message().find("rank 1"), std::string::npos) << work->status().to_string();
  EXPECT_NE(work->status().message().find("4000000"), std::string::npos) << work->status().to_string();
  std::vector<float> good(10, 1.0f);  // The group goes on working.
  finish(runtime.submit(all_reduce(good)));
  EXPECT_EQ(good[0], static_cast<float>(runtime.size()));
}

TEST(Runtime, ThreadsThatWaitAtOnceAndThreadsThatWaitLaterShareTheJob) {
  expect_clean(run_job({.workers = 3}, [](Runtime& runtime) {
    const auto call = [&](const std::string& name, std::span<float> values, bool is_waited_for) {
      Request request = all_reduce(values);
      request.name = name;
      request.is_waited_for = is_waited_for;
      return runtime.submit(request);
    };
    constexpr int kCalls = 200;
    const auto expected = static_cast<float>(runtime.size());
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 2; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < kCalls; ++i) {
          std::vector<float> values(i % 7 == 0 ? 30'000 : 10, 1.0f);
          finish(call("at once " + std::to_string(thread * kCalls + i), values, true));
          ASSERT_EQ(values.back(), expected);
        }
      });
    }
    threads.emplace_back([&] {
      std::vector<std::vector<float>> values(kCalls, std::vector<float>(1000, 1.0f));
      std::vector<std::shared_ptr<Work>> pending;
      for (int i = 0; i < kCalls; ++i) pending.push_back(call("later " + std::to_string(i), values[i], false));
      for (const auto& work : pending) finish(work);
      for (const auto& each : values) ASSERT_EQ(each.back(), expected);
    });
    for (std::thread& thread : threads) thread.join();
  }));
}

/// run(), to its end.
Status run_small(Runtime& runtime, Request request) {
  request.is_waited_for = true;
  Status status;
  const std::shared_ptr<Work> work = runtime.run(request, status);
  if (!work) return status;
  EXPECT_TRUE(work->wait(in_seconds(60))) << "an operation never ended";
  return work->status();
}

TEST(Runtime, SmallOperationsMeetHoweverEachRankCallsThem) {
  expect_clean(run_job({.workers = 3}, [](Runtime& runtime) {
    const std::uint32_t me = runtime.rank();
    std::vector<float> large(100'000);
    for (std::uint32_t i = 0; i < 600; ++i) {
      std::vector<float> values(1 + i % 9, static_cast<float>(me + i));
      // In turn each rank comes late, queues it instead, has another one going on beside it, or all call it alike.
      if (i % 50 == me) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      std::shared_ptr<Work> beside;
      if (i % 7 == 3) beside = runtime.submit(all_reduce(large, ReduceOp::kMax));
      if (i % 5 == me) {
        finish(runtime.submit(all_reduce(values)));
      } else {
        ASSERT_TRUE(run_small(runtime, all_reduce(values)).is_ok());
      }
      for (const float value : values) ASSERT_EQ(value, static_cast<float>(3 * i + 3)) << "operation " << i;
      if (beside) finish(beside);
      Request barrier;
      barrier.descriptor.collective = Collective::kBarrier;
      if (i % 11 == 0) {
        ASSERT_TRUE(run_small(runtime, barrier).is_ok());
      }
    }
    EXPECT_GT(runtime.stats().ops_completed, 600u);
  }));
}

TEST(Runtime, SmallOperationsForWhichARankIsTooLateArriveAllTheSame) {
  // More than the rings hold, the one to all and those between two.
  constexpr std::uint32_t kMany = 6000;
  expect_clean(run_job({.workers = 3}, [](Runtime& runtime) {
    const std::uint32_t me = runtime.rank();
    if (me == 2) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    std::vector<float> values(kMany);
    std::vector<std::shared_ptr<Work>> works;
    for (std::uint32_t i = 0; i < kMany; ++i) {
      values[i] = static_cast<float>(me + i);
      works.push_back(runtime.submit(all_reduce(std::span(values).subspan(i, 1))));
    }
    for (const auto& work : works) finish(work);
    for (std::uint32_t i = 0; i < kMany; ++i) ASSERT_EQ(values[i], static_cast<float>(3 * i + 3)) << "operation " << i;
    std::vector<float> last(1, static_cast<float>(me));
    ASSERT_TRUE(run_small(runtime, all_reduce(last)).is_ok());
    ASSERT_EQ(last.front(), 3.0f);
  }));
}

TEST(Runtime, CountsWhatEndedAndHowHoweverItWasDone) {
  std::barrier both_are_done(2);
  expect_clean(run_job({.workers = 2}, [&](Runtime& runtime) {
    std::vector<float> values(10, 1.0f);
    for (std::uint64_t i = 1; i <= 20; ++i) {
      EXPECT_TRUE(run_small(runtime, all_reduce(values)).is_ok());
      if (i % 5 == 0) finish(runtime.submit(all_reduce(values)));
      const RuntimeStats stats = runtime.stats();
      EXPECT_EQ(stats.ops_completed, i + i / 5);
      EXPECT_EQ(stats.staged_ops + stats.zero_copy_ops, i + i / 5);
      EXPECT_EQ(stats.ops_failed, 0u);
    }
    both_are_done.arrive_and_wait();
    std::vector<float> alone(10);
    Request nobody_else_calls = all_reduce(alone);
    nobody_else_calls.name = "of rank " + std::to_string(runtime.rank());
    const auto pending = runtime.submit(nobody_else_calls);
    runtime.abort("enough");
    EXPECT_TRUE(pending->wait(in_seconds(30)));
    EXPECT_FALSE(run_small(runtime, all_reduce(values)).is_ok());
    EXPECT_FALSE(run_small(runtime, all_reduce(values)).is_ok());
    EXPECT_EQ(runtime.stats().ops_failed, 3u);
    EXPECT_EQ(runtime.stats().ops_completed, 24u);
  }));
}

TEST(Runtime, SmallOperationsThatDisagreeAreAnErrorOnEveryRankAndTheGroupGoesOn) {
  expect_clean(run_job({.workers = 3}, [](Runtime& runtime) {
    std::vector<float> values(runtime.rank() == 2 ? 3 : 2, 1.0f);
    const Status status = run_small(runtime, all_reduce(values));
    EXPECT_EQ(status.code(), Code::kMismatch);
    EXPECT_NE(status.message().find("float32[3]"), std::string::npos) << status.message();
    std::vector<float> again(4, 1.0f);
    ASSERT_TRUE(run_small(runtime, all_reduce(again)).is_ok());
    EXPECT_EQ(again.front(), 3.0f);
  }));
}

TEST(Runtime, ASmallOperationThatARankNeverCallsNamesIt) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    if (runtime.rank() == 0) {
      std::vector<float> values(2);
      Request request = all_reduce(values);
      request.timeout = std::chrono::milliseconds(300);
      const Status status = run_small(runtime, request);
      EXPECT_EQ(status.code(), Code::kTimeout);
      EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
    }
  }));
}

TEST(Runtime, DisagreementIsAnErrorOnEveryRankAndTheGroupGoesOn) {
  expect_clean(run_job({.workers = 2}, sizes_differ));
  if (!has_fabric()) return;
  expect_clean(run_job({.workers = 2, .servers = 2}, sizes_differ));
  expect_clean(run_job({.workers = 4, .hosts = 2}, sizes_differ));
}

void one_never_comes(Runtime& runtime) {
  std::vector<float> values(1000);
  if (runtime.rank() == 1) {
    // Stays alive, in the job, and does not call.
    Request barrier;
    barrier.descriptor.collective = Collective::kBarrier;
    barrier.name = "end";
    finish(runtime.submit(barrier));
    return;
  }
  Request request = all_reduce(values);
  request.name = "lonely";
  request.timeout = std::chrono::milliseconds(300);
  const auto work = runtime.submit(request);
  ASSERT_TRUE(work->wait(in_seconds(30)));
  EXPECT_EQ(work->status().code(), Code::kTimeout) << work->status().to_string();
  EXPECT_NE(work->status().message().find("rank 1"), std::string::npos) << work->status().to_string();
  Request barrier;
  barrier.descriptor.collective = Collective::kBarrier;
  barrier.name = "end";
  finish(runtime.submit(barrier));
}

TEST(Runtime, ARankThatNeverComesIsNamed) {
  expect_clean(run_job({.workers = 3}, one_never_comes));
  if (has_fabric()) expect_clean(run_job({.workers = 3, .servers = 1}, one_never_comes));
}

void expect_named(const std::string& text, const std::string& needle) {
  EXPECT_NE(text.find(needle), std::string::npos) << "lacks '" << needle << "': " << text;
}

/// Ranks 0, 2 on one host and 1, 3 on the other.
TEST(Runtime, RanksPlacedByTurnsGetEveryCollectiveAndTheirOwnNames) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric here";
  const JobShape shape{.workers = 4, .hosts = 2, .is_cyclic = true};
  expect_clean(run_job(shape, every_collective));
  // One host calls one thing and the other another.
  const auto errors = run_job(shape, [](Runtime& runtime) {
    std::vector<float> values(runtime.rank() % 2 == 1 ? 5000 : 6000, 1.0f);
    const auto work = runtime.submit(all_reduce(values));
    ASSERT_TRUE(work->wait(in_seconds(60)));
    expect_named(work->status().message(), "ranks 1, 3 said all_reduce(float32[5000]");
    expect_named(work->status().message(), "ranks 0, 2 said all_reduce(float32[6000]");
  });
  expect_clean(errors);
}

TEST(Runtime, OfRanksPlacedByTurnsTheOneThatNeverComesIsNamed) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric here";
  const JobShape shape{.workers = 4, .servers = 1, .hosts = 2, .is_cyclic = true};
  expect_clean(run_job(shape, [](Runtime& runtime) {
    std::vector<float> values(6000, 1.0f);
    if (runtime.rank() % 2 == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(4));
      return;  // Ranks 1 and 3, one host.
    }
    Request request = all_reduce(values);
    request.timeout = std::chrono::seconds(2);
    const auto work = runtime.submit(request);
    ASSERT_TRUE(work->wait(in_seconds(60)));
    expect_named(work->status().message(), "ranks 1, 3 had not called");
    expect_named(work->status().message(), "ranks 0, 2 had");
  }));
}

TEST(Runtime, GroupsInAnyOrderOverHostsWork) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric here";
  for (const bool is_cyclic : {false, true}) {
    const JobShape shape{.workers = 6, .hosts = 2, .is_cyclic = is_cyclic};
    expect_clean(run_job(shape, [](Runtime& runtime) {
      const std::vector<std::vector<std::uint32_t>> groups = {{5, 4, 3, 2, 1, 0}, {5, 0, 3}, {4, 1, 0}, {2, 5}};
      std::uint32_t id = 0;
      for (const std::vector<std::uint32_t>& ranks : groups) {
        const GroupId group{++id};
        const auto self = std::find(ranks.begin(), ranks.end(), runtime.rank());
        if (self == ranks.end()) continue;
        runtime.add_group(group, ranks);
        std::vector<float> values(100'000, static_cast<float>(1u << runtime.rank()));
        Request request = all_reduce(values);
        request.group = group;
        finish(runtime.submit(request));
        float sum = 0;
        for (const std::uint32_t rank : ranks) sum += static_cast<float>(1u << rank);
        EXPECT_EQ(values.front(), sum);
        EXPECT_EQ(values.back(), sum);
        const std::vector<float> mine(1000, static_cast<float>(runtime.rank()));
        std::vector<float> all(mine.size() * ranks.size());
        Request gather = all_reduce(all);
        gather.descriptor.collective = Collective::kAllGather;
        gather.input = std::as_bytes(std::span(mine));
        gather.group = group;
        finish(runtime.submit(gather));
        for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<float>(ranks[i / mine.size()]));
      }
    }));
  }
}

TEST(Runtime, SubGroupsWorkSideBySide) {
  const auto body = [](Runtime& runtime) {
    const std::uint32_t half = runtime.rank() / 2;
    const std::vector<std::uint32_t> ranks{2 * half, 2 * half + 1};
    runtime.add_group(GroupId{10 + half}, ranks);
    std::vector<float> values(5000, static_cast<float>(runtime.rank()));
    Request request = all_reduce(values);
    request.group = GroupId{10 + half};
    finish(runtime.submit(request));
    EXPECT_EQ(values[0], static_cast<float>(4 * half + 1));
  };
  expect_clean(run_job({.workers = 4}, body));
  if (has_fabric()) expect_clean(run_job({.workers = 4, .servers = 2}, body));
}

TEST(Runtime, AllocatedMemoryIsUsedInPlace) {
  const auto errors = run_job({.workers = 2}, [](Runtime& runtime) {
    constexpr std::size_t kCount = 1 << 20;
    const std::shared_ptr<std::byte> memory = runtime.allocate(kCount * sizeof(float));
    ASSERT_NE(memory, nullptr);
    const std::span<float> values(reinterpret_cast<float*>(memory.get()), kCount);
    std::fill(values.begin(), values.end(), 1.0f);
    finish(runtime.submit(all_reduce(values)));
    EXPECT_EQ(values[kCount - 1], 2.0f);
    EXPECT_EQ(runtime.stats().zero_copy_ops, 1u);
    EXPECT_EQ(runtime.stats().staged_ops, 0u);
  });
  expect_clean(errors);
}

TEST(Runtime, BadArgumentsComeBackInTheWork) {
  expect_clean(run_job({.workers = 1}, [](Runtime& runtime) {
    std::vector<float> values(4);
    Request request = all_reduce(values);
    request.descriptor.reduce = ReduceOp::kBor;
    EXPECT_EQ(runtime.submit(request)->status().code(), Code::kInvalidArgument);
    request = all_reduce(values);
    request.group = GroupId{77};
    EXPECT_EQ(runtime.submit(request)->status().code(), Code::kInvalidArgument);
    request = all_reduce(values);
    request.descriptor.collective = Collective::kBroadcast;
    request.descriptor.root = 5;
    EXPECT_EQ(runtime.submit(request)->status().code(), Code::kInvalidArgument);
    runtime.shutdown();
    EXPECT_EQ(runtime.submit(all_reduce(values))->status().code(), Code::kShutdown);
  }));
}

}  // namespace
}  // namespace herring::runtime
