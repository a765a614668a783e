#include "elastic/elastic_runtime.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <thread>

#include "elastic/elastic_job.h"
#include "elastic/rendezvous_client.h"

namespace herring::elastic {
namespace {

using namespace testing;
using namespace std::chrono_literals;
using runtime::Request;

/// Allreduces that have been called and not waited for.
class Calls {
 public:
  explicit Calls(ElasticRuntime& runtime) : runtime_(runtime) {}
  void call(std::size_t elements = 1000) {
    auto& values = memory_.emplace_back(elements, static_cast<float>(runtime_.rank() + 1));
    works_.push_back(runtime_.submit(all_reduce(values)));
  }
  /// All are done, and well.
  void wait(float sum) {
    for (const auto& work : works_) finish(work);
    for (const auto& values : memory_) {
      EXPECT_EQ(values.front(), sum);
      EXPECT_EQ(values.back(), sum);
    }
    works_.clear();
    memory_.clear();
  }

 private:
  ElasticRuntime& runtime_;
  std::deque<std::vector<float>> memory_;
  std::vector<std::shared_ptr<runtime::Work>> works_;
};

TEST(ElasticJobs, ServersComeBackOneAfterTheOtherWhileAWorkerLagsBehind) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  ElasticJob job({.workers = 2, .servers = 3});
  std::atomic<std::uint64_t> generation{1};
  std::atomic<bool> may_catch_up{false};
  std::atomic<int> inside{0};
  std::thread operator_thread([&] {
    ASSERT_TRUE(eventually([&] { return inside == 2; }));
    job.kill_server(0);
    job.kill_server(0);
    job.add_server();
    ASSERT_TRUE(eventually([&] { return job.rendezvous().generation() == 2; }));
    job.add_server();  // It has to wait: worker 1 still owes the first generation half of its calls.
    std::this_thread::sleep_for(1s);
    may_catch_up = true;
    EXPECT_TRUE(eventually([&] { return job.rendezvous().generation() == 3; })) << "the second never came in";
    generation = 3;
  });
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    Calls calls(runtime);
    ++inside;
    for (int i = 0; i < 10; ++i) {
      if (runtime.rank() == 1 && i == 5) {
        ASSERT_TRUE(eventually([&] { return may_catch_up.load(); }));
      }
      calls.call();
    }
    calls.wait(3);
    // On until the second one is in; both leave the loop with the same step.
    for (float is_over = 0; is_over == 0;) {
      std::vector<float> values(1, generation == 3 && runtime.generation() == 3 ? 1.0F : 0.0F);
      finish(runtime.submit(all_reduce(values, ReduceOp::kMin)));
      is_over = values.front();
    }
    calls.call(100'000);
    calls.wait(3);
  });
  operator_thread.join();
  runtime::testing::expect_clean(errors);
  EXPECT_TRUE(job.rendezvous().wait(in_seconds(10)));
  EXPECT_TRUE(job.rendezvous().ended_well());
}

TEST(ElasticJobs, AWorkerMayFinishWhileServersComeIn) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  for (int round = 0; round < 6; ++round) {
    ElasticJob job({.workers = 3, .servers = 2});
    std::atomic<bool> has_begun{false};
    std::thread operator_thread([&] {
      ASSERT_TRUE(eventually([&] { return has_begun.load(); }));
      job.kill_server(0);
      job.add_server();
    });
    const auto errors = job.run([&](ElasticRuntime& runtime) {
      Calls calls(runtime);
      calls.call();
      calls.wait(6);
      has_begun = true;
      // The switch takes a few hundredths of a second; each round another moment of it.
      if (runtime.rank() == 0) return void(std::this_thread::sleep_for(round * 20ms));
      std::this_thread::sleep_for(300ms);
      const std::vector<std::uint32_t> alone{runtime.rank()};
      runtime.add_group(GroupId{1}, alone);
      std::vector<float> values(10, 1);
      runtime::Request request = all_reduce(values);
      request.group = GroupId{1};
      finish(runtime.submit(request));
    });
    operator_thread.join();
    runtime::testing::expect_clean(errors);
    EXPECT_TRUE(job.rendezvous().wait(in_seconds(10)));
    EXPECT_TRUE(job.rendezvous().ended_well()) << "round " << round;
  }
}

/// It has been sent to the first generation and dies before it has joined its hub: nobody waits for it.
TEST(ElasticJobs, WhoDiesBetweenTheRendezvousAndTheHubIsKnownAtOnce) {
  ElasticJob job({.workers = 2, .servers = 1});
  job.kill_server(0);
  RendezvousClientOptions options;
  options.host = "127.0.0.1";
  options.port = job.rendezvous().port();
  options.secret = "secret";
  options.enter.role = control::Role::kServer;
  options.enter.host = "somewhere";
  RendezvousClient server(options, in_seconds(10));
  std::thread killer([&] {
    Message message;
    while (server.next(message, in_seconds(20)) && message.kind != MessageKind::kGo) {
    }
    std::this_thread::sleep_for(200ms);
    server.close();
  });
  const Instant begin = std::chrono::steady_clock::now();
  const auto errors = job.run([](ElasticRuntime&) { FAIL() << "there is no server"; });
  killer.join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
  for (const std::string& error : errors)
    EXPECT_NE(error.find("server 0 (pid 0 on somewhere) is lost"), std::string::npos) << error;
}

// With thousands of workers the launcher's core would be busy with reports of single operations.
TEST(ElasticJobs, WhatManySmallOperationsHaveCompletedIsReportedTogether) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  constexpr int kOperations = 400;
  ElasticJob job({.workers = 2, .is_elastic = true});
  std::atomic<std::uint64_t> before{0};
  std::atomic<std::uint64_t> after{0};
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    std::vector<float> values(8, 1.0F);
    finish(runtime.submit(all_reduce(values)));
    before = job.rendezvous().messages();
    for (int i = 0; i < kOperations; ++i) finish(runtime.submit(all_reduce(values)));
    after = job.rendezvous().messages();
  });
  const auto pauses = static_cast<std::uint64_t>((std::chrono::steady_clock::now() - begin) / 50ms);
  EXPECT_LE(after - before, 2 * (pauses + 2)) << "each worker speaks once in 50 ms";
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(ElasticJobs, CountersGoOnFromGenerationToGeneration) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  ElasticJob job({.workers = 2, .servers = 2});
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    Calls calls(runtime);
    for (int i = 0; i < 20; ++i) calls.call();
    calls.wait(3);
    const runtime::RuntimeCounters before = runtime.stats();
    EXPECT_GT(before.announces, 0U);
    if (runtime.rank() == 0) {
      job.kill_server(0);
      job.add_server();
    }
    float is_over = 0;
    while (is_over == 0) {
      std::vector<float> values(1, runtime.generation() == 2 ? 1.0F : 0.0F);
      finish(runtime.submit(all_reduce(values, ReduceOp::kMin)));
      is_over = values.front();
      const runtime::RuntimeCounters now = runtime.stats();
      EXPECT_GE(now.announces, before.announces);
      EXPECT_GE(now.bytes_to_servers, before.bytes_to_servers);
      EXPECT_GE(now.zero_copy_ops + now.staged_ops, before.zero_copy_ops + before.staged_ops);
    }
    EXPECT_GT(runtime.stats().ops_completed, before.ops_completed);
  });
  runtime::testing::expect_clean(errors);
}

runtime::Request all_gather(std::vector<float>& block, std::vector<float>& all) {
  runtime::Request request;
  request.descriptor.collective = Collective::kAllGather;
  request.descriptor.dims = 1;
  request.descriptor.shape[0] = block.size();
  request.input = std::as_bytes(std::span(block));
  request.output = std::as_writable_bytes(std::span(all));
  return request;
}

runtime::Request broadcast(std::vector<float>& values, std::uint32_t root) {
  runtime::Request request = all_reduce(values);
  request.descriptor.collective = Collective::kBroadcast;
  request.descriptor.root = root;
  return request;
}

/// Runs `early` as worker 0 of three and `late` as worker 2, which begins when worker 1 is lost: that is when `early`
/// has set its argument.
template <class Early, class Late>
void run_with_a_loss(const Early& early, const Late& late) {
  ElasticJob job({.workers = 3, .is_elastic = true});
  std::atomic<bool> may_die{false};
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    if (runtime.rank() == 0) return early(runtime, may_die);
    if (runtime.rank() == 1) {
      ASSERT_TRUE(eventually([&] { return may_die.load(); }));
      return runtime.abort("the test");
    }
    ASSERT_TRUE(eventually([&] { return runtime.size() == 2; }));
    late(runtime);
  });
  EXPECT_EQ(errors[0] + errors[2], "");
}

void expect_refused(const std::shared_ptr<runtime::Work>& work) {
  ASSERT_TRUE(work->wait(in_seconds(20)));
  EXPECT_EQ(work->status().code(), Code::kPeerLost) << work->status().message();
}

/// Nothing is lost: the job neither ends nor starts a generation, and a later one knows that the group is over.
TEST(ElasticJobs, AbortOfAGroupEndsThatGroupAlone) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  ElasticJob job({.workers = 3, .is_elastic = true});
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    const GroupId pair{7};
    if (runtime.rank() < 2) runtime.add_group(pair, std::vector<std::uint32_t>{0, 1});
    const auto goes_on = [&] {
      std::vector<float> values(1000, 1.0F);
      const auto work = runtime.submit(all_reduce(values));
      ASSERT_TRUE(work->wait(in_seconds(20)));
      EXPECT_EQ(work->status().code(), Code::kOk) << work->status().message();
      EXPECT_EQ(values.back(), 3.0F);
    };
    goes_on();
    std::vector<float> values(10);
    runtime::Request request = all_reduce(values);
    request.group = pair;
    if (runtime.rank() == 0) {
      for (int round = 0; round < 2; ++round) {
        const auto work = runtime.submit(request);
        ASSERT_TRUE(work->wait(in_seconds(20)));
        EXPECT_EQ(work->status().code(), Code::kCancelled) << work->status().message();
        EXPECT_NE(work->status().message().find("rank 1 aborted the group"), std::string::npos)
            << work->status().message();
      }
    } else if (runtime.rank() == 1) {
      std::this_thread::sleep_for(50ms);
      runtime.abort_group(pair, "enough");
      const auto work = runtime.submit(request);
      ASSERT_TRUE(work->wait(in_seconds(20)));
      EXPECT_EQ(work->status().message(), "enough");
    }
    goes_on();
    EXPECT_EQ(runtime.size(), 3u);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// Worker 0 has called for three of them; worker 2 calls the same when there are two.
TEST(ElasticJobs, WhoCallsAfterALossWhatOthersCalledBeforeItHasWhatTheyHave) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  const auto play = [](ElasticRuntime& runtime, float born, std::atomic<bool>& has_called) {
    std::vector<float> block{born};
    std::vector<float> all(3);
    std::vector<float> values{born == 2 ? 7.0F : 0.0F};
    const auto gathered = runtime.submit(all_gather(block, all));
    const auto given = runtime.submit(broadcast(values, 2));
    has_called = true;
    expect_refused(gathered);
    finish(given);
    EXPECT_EQ(values.front(), 7);
    // Nobody called these before the loss: refused alike, and not counted.
    expect_refused(runtime.submit(all_gather(block, all)));
    std::vector<float> both(2);
    finish(runtime.submit(all_gather(block, both)));
    EXPECT_EQ(both, (std::vector<float>{0, 2}));
  };
  run_with_a_loss([&](ElasticRuntime& runtime, std::atomic<bool>& may_die) { play(runtime, 0, may_die); },
                  [&](ElasticRuntime& runtime) {
                    std::atomic<bool> nobody_asks{false};
                    play(runtime, 2, nobody_asks);
                  });
}

/// Who wants the sum is lost, or has another number since: all have the sum either way.
TEST(ElasticJobs, AReduceGoesOnWithoutItsRoot) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  const auto reduce = [](ElasticRuntime& runtime, std::vector<float>& values, std::uint32_t root) {
    runtime::Request request = all_reduce(values);
    request.descriptor.collective = Collective::kReduce;
    request.descriptor.root = root;
    return runtime.submit(request);
  };
  const auto expect_sum = [](const std::shared_ptr<runtime::Work>& work, const std::vector<float>& values) {
    finish(work);
    EXPECT_EQ(values.front(), 3.0F);
  };
  run_with_a_loss(
      [&](ElasticRuntime& runtime, std::atomic<bool>& may_die) {
        std::vector<float> lost{1};
        std::vector<float> moved{1};
        const auto to_lost = reduce(runtime, lost, 1);
        const auto to_moved = reduce(runtime, moved, 2);
        may_die = true;
        expect_sum(to_lost, lost);
        expect_sum(to_moved, moved);
      },
      [&](ElasticRuntime& runtime) {
        for (int i = 0; i < 2; ++i) {
          std::vector<float> values{2};
          expect_sum(reduce(runtime, values, 1), values);
        }
      });
}

/// The old runtime is shut down before there is a new one: the caller asks for memory all the time.
TEST(ElasticJobs, MemoryAskedForWhileTheJobIsPutTogetherAnewIsNoError) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  const auto ask = [](ElasticRuntime& runtime) {
    const Instant limit = std::chrono::steady_clock::now() + 20s;
    while (runtime.size() == 3 && std::chrono::steady_clock::now() < limit) {
      for (int i = 0; i < 100; ++i) EXPECT_NO_THROW(static_cast<void>(runtime.allocate(4096)));
    }
    EXPECT_EQ(runtime.size(), 2u);
    std::vector<float> values{1};
    finish(runtime.submit(all_reduce(values)));
  };
  run_with_a_loss(
      [&](ElasticRuntime& runtime, std::atomic<bool>& may_die) {
        may_die = true;
        ask(runtime);
      },
      ask);
}

/// What failed for one and was never called by the other does not keep them from starting again.
TEST(ElasticJobs, AFailureThatOnlyOneHasSeenDoesNotHoldUpANewStart) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  const auto start_again = [](ElasticRuntime& runtime) {
    runtime.start_again(in_seconds(20));
    std::vector<float> values{1};
    finish(runtime.submit(all_reduce(values)));
    EXPECT_EQ(values.front(), 2);
  };
  run_with_a_loss(
      [&](ElasticRuntime& runtime, std::atomic<bool>& may_die) {
        std::vector<float> block(1);
        std::vector<float> all(3);
        const auto gathered = runtime.submit(all_gather(block, all));
        may_die = true;
        expect_refused(gathered);
        start_again(runtime);
      },
      start_again);
}

void on_both_kinds(const std::function<void(ElasticRuntime&)>& body) {
  for (const bool is_elastic : {false, true}) {
    SCOPED_TRACE(is_elastic ? "elastic" : "servers only");
    ElasticJob job({.workers = 2, .is_elastic = is_elastic});
    for (const std::string& error : job.run(body)) EXPECT_EQ(error, "");
  }
}

TEST(ElasticJobs, PendingCallsOnOneMemoryOrOfOneNameGoInTheirOrder) {
  // Rank 1 comes to "a" when rank 0 was refused "b": "a" must not end before.
  std::atomic<bool> was_refused{false};
  on_both_kinds([&was_refused](ElasticRuntime& runtime) {
    std::vector<float> values(100'000, 1.0F);
    std::vector<float> copy(values.size());
    std::vector<std::shared_ptr<runtime::Work>> works;
    for (int i = 0; i < 3; ++i) works.push_back(runtime.submit(all_reduce(values)));
    Request read = all_reduce(copy);
    read.input = std::as_bytes(std::span(values));
    works.push_back(runtime.submit(read));
    std::vector<std::vector<float>> named;
    for (int i = 0; i < 3; ++i) named.emplace_back(1000, static_cast<float>(i));
    for (auto& each : named) {
      Request request = all_reduce(each);
      request.name = "tw";
      works.push_back(runtime.submit(request));
    }
    for (const auto& work : works) finish(work);
    EXPECT_EQ(values.back(), 8);
    EXPECT_EQ(copy.back(), 16);
    EXPECT_EQ(named[2].back(), 4);
    if (runtime.rank() == 0) {
      Request request = all_reduce(values);
      request.name = "a";
      works.push_back(runtime.submit(request));
      request.name = "b";
      const auto refused = runtime.submit(request);
      const bool has_ended = refused->wait(in_seconds(20));
      was_refused = true;
      ASSERT_TRUE(has_ended);
      EXPECT_EQ(refused->status().code(), Code::kInvalidArgument) << refused->status().message();
    } else {
      ASSERT_TRUE(eventually([&] { return was_refused.exchange(false); }));
      Request request = all_reduce(values);
      request.name = "a";
      works.push_back(runtime.submit(request));
    }
    finish(works.back());
    EXPECT_EQ(values.back(), 16);
    Request request = all_reduce(values);
    request.name = "b";
    finish(runtime.submit(request));
  });
}

TEST(ElasticJobs, WhoLeavesAGroupHasItsMemoryBackAndTheJobGoesOn) {
  on_both_kinds([](ElasticRuntime& runtime) {
    const std::vector<std::uint32_t> ranks{0, 1};
    std::vector<float> step{1};
    for (std::uint32_t round = 0; round < 8; ++round) {
      const GroupId group{3 + round};
      runtime.add_group(group, ranks);
      std::vector<float> values(1'000'000, 1.0F);
      Request request = all_reduce(values);
      request.group = group;
      finish(runtime.submit(all_reduce(step)));
      if (runtime.rank() == 0) {
        const auto work = runtime.submit(request);
        const auto behind = runtime.submit(request);
        std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
        runtime.remove_group(group);
        EXPECT_TRUE(work->is_done() && behind->is_done());
        std::fill(values.begin(), values.end(), 7.0F);
      } else {
        // In the first round rank 0 has left when this one comes.
        if (round == 0) std::this_thread::sleep_for(200ms);
        const auto work = runtime.submit(request);
        ASSERT_TRUE(work->wait(in_seconds(60)));
        const bool is_right = std::all_of(values.begin(), values.end(), [](float value) { return value == 2; });
        EXPECT_TRUE(is_right || !work->status().is_ok()) << "garbage, and Ok";
        if (round == 0) {
          EXPECT_FALSE(work->status().is_ok());
        }
        runtime.remove_group(group);
      }
      finish(runtime.submit(all_reduce(step)));
      if (runtime.rank() == 0) {
        EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float value) { return value == 7; }));
      }
      EXPECT_EQ(runtime.generation(), 1U);
    }
  });
}

TEST(ElasticJobs, CallsAfterAShutdownAreErrors) {
  on_both_kinds([](ElasticRuntime& runtime) {
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    const auto call = [&runtime] {
      std::vector<float> values(10);
      Request request = all_reduce(values);
      request.name = "late";
      request.timeout = 20ms;
      runtime.submit(request)->wait(in_seconds(60));
      runtime.send({GroupId{0}, runtime.rank(), 1, {}, 5ms})->wait(in_seconds(60));
      runtime.receive({GroupId{0}, runtime.rank(), 1, {}, 5ms})->wait(in_seconds(60));
      static_cast<void>(runtime.stats());
      runtime.remove_group(GroupId{9});
      for (const auto& throwing : std::vector<std::function<void()>>{
               [&] { runtime.add_group(GroupId{9}, std::vector<std::uint32_t>{runtime.rank()}); },
               [&] { static_cast<void>(runtime.allocate(100)); }}) {
        try {
          throwing();
        } catch (const Error&) {
        }
      }
    };
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        while (!stop) call();
      });
    }
    std::this_thread::sleep_for(5ms);
    runtime.shutdown();
    call();
    stop = true;
    for (std::thread& thread : threads) thread.join();
    std::vector<float> values(10);
    EXPECT_EQ(runtime.submit(all_reduce(values))->status().code(), Code::kShutdown);
    EXPECT_THROW(runtime.add_group(GroupId{9}, std::vector<std::uint32_t>{0}), Error);
    EXPECT_THROW(static_cast<void>(runtime.allocate(100)), Error);
    runtime.abort("too late");
  });
}

TEST(RuntimeStats, AddUpInEveryField) {
  using Counters = std::array<std::uint64_t, sizeof(runtime::RuntimeCounters) / sizeof(std::uint64_t)>;
  Counters a;
  Counters b;
  Counters expected;
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = 1 + i;
    b[i] = 1000 * (i + 1);
    expected[i] = a[i] + b[i];
  }
  auto sum = std::bit_cast<runtime::RuntimeCounters>(a);
  sum += std::bit_cast<runtime::RuntimeCounters>(b);
  EXPECT_EQ(std::bit_cast<Counters>(sum), expected);
}

}  // namespace
}  // namespace herring::elastic
