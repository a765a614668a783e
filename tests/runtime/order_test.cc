// Pending operations that meet on one name, one number or the same bytes; and calls that come while the runtime ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"
#include "runtime/job.h"
#include "runtime/memory_in_use.h"
#include "runtime/operation_order.h"
#include "runtime/places.h"

namespace herring::runtime {
namespace {

using namespace testing;

constexpr std::size_t kCount = 200'000;  // Several parts.

Status end_of(const std::shared_ptr<Work>& work) {
  EXPECT_TRUE(work->wait(in_seconds(60))) << "an operation never ended";
  return work->is_done() ? work->status() : Status(Code::kInternal, "it never ended");
}

void expect_refused(const Status& status, std::initializer_list<const char*> words) {
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.to_string();
  for (const char* word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos) << word << " is not in: " << status.to_string();
  }
}

Request named(std::span<float> values, const char* name) {
  Request request = all_reduce(values);
  request.name = name;
  return request;
}

Request broadcast(std::span<float> values, std::uint32_t root) {
  Request request = all_reduce(values);
  request.descriptor.collective = Collective::kBroadcast;
  request.descriptor.root = root;
  return request;
}

void barrier(Runtime& runtime) {
  Request request;
  request.descriptor.collective = Collective::kBarrier;
  finish(runtime.submit(request));
}

TEST(MemoryInUse, SaysWhatCountingEveryByteSays) {
  std::mt19937_64 random(7);
  constexpr std::size_t kBytes = 64;
  std::array<std::byte, kBytes> memory{};
  struct User {
    std::span<const std::byte> reads, writes;
  };
  const auto some = [&] {
    const std::size_t begin = random() % kBytes;
    return std::span<const std::byte>(memory).subspan(begin, random() % (kBytes - begin) / (1 + random() % 4));
  };
  MemoryInUse in_use;
  std::vector<User> users;
  for (int round = 0; round < 20'000; ++round) {
    if (!users.empty() && random() % 2 == 0) {
      const std::size_t i = random() % users.size();
      in_use.remove(users[i].reads, users[i].writes);
      users.erase(users.begin() + static_cast<std::ptrdiff_t>(i));
    }
    User user{random() % 2 == 0 ? some() : std::span<const std::byte>{}, some()};
    if (random() % 3 == 0) std::swap(user.reads, user.writes);
    const bool is_free = std::none_of(users.begin(), users.end(), [&user](const User& other) {
      return overlap(other.writes, user.reads) || overlap(other.writes, user.writes) ||
             overlap(other.reads, user.writes);
    });
    ASSERT_EQ(in_use.is_free(user.reads, user.writes), is_free) << "round " << round;
    if (users.size() > 6) continue;
    in_use.add(user.reads, user.writes);
    users.push_back(user);
  }
  for (const User& user : users) in_use.remove(user.reads, user.writes);
  EXPECT_TRUE(in_use.is_empty());
}

// Nobody would notice that ranks sum two tensors of different names.
TEST(PendingOrder, TwoNamesWithOneHashDoNotMeet) {
  const auto order = std::make_shared<OperationOrder>();
  const auto call = std::make_shared<OrderedCall>();
  call->name = "layer.1";
  call->key = {GroupId{0}, kNamedKey | 5, 0};
  call->is_keyed = call->is_named = true;
  OrderedCall other = *call;
  order->enter(call);
  EXPECT_TRUE(order->check(other).is_ok());
  other.name = "layer.2";
  expect_refused(order->check(other), {"'layer.1'", "'layer.2'", "same hash", "choose another name"});
  other.key.group = GroupId{1};
  EXPECT_TRUE(order->check(other).is_ok());
  order->leave(*call);
  EXPECT_TRUE(order->is_empty());
}

TEST(PendingOrder, UsesOfOneNameGoOneAfterTheOther) {
  on_every_place(3, [](Runtime& runtime) {
    for (const std::size_t count : {std::size_t{5}, kCount}) {
      std::vector<std::vector<float>> values;
      std::vector<std::shared_ptr<Work>> works;
      for (int use = 0; use < 4; ++use) values.emplace_back(count, static_cast<float>(use + 1));
      for (auto& each : values) works.push_back(runtime.submit(named(each, "tw")));
      // Another name does not wait for them.
      std::vector<float> other(count, 1.0f);
      finish(runtime.submit(named(other, "other")));
      for (int use = 0; use < 4; ++use) {
        finish(works[static_cast<std::size_t>(use)]);
        ASSERT_EQ(values[static_cast<std::size_t>(use)].back(), 3.0f * static_cast<float>(use + 1)) << "use " << use;
      }
      std::vector<std::vector<float>> sent;
      works.clear();
      for (int use = 0; use < 3; ++use) sent.emplace_back(count, static_cast<float>(runtime.rank() * 10 + use));
      for (auto& each : sent) {
        Request request = broadcast(each, 1);
        request.name = "tw";
        works.push_back(runtime.submit(request));
      }
      for (std::size_t use = 0; use < 3; ++use) {
        finish(works[use]);
        ASSERT_EQ(sent[use].back(), 10.0f + static_cast<float>(use));
      }
    }
  });
}

TEST(PendingOrder, OneNameFromSeveralThreadsWhileOtherRanksAreAhead) {
  on_every_place(2, [](Runtime& runtime) {
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&] {
        for (int round = 0; round < 20; ++round) {
          std::vector<float> values(1000, 1.0f);
          Status status;
          Request request = named(values, "tw");
          request.is_waited_for = true;
          const auto work = runtime.run(request, status);
          if (work) status = end_of(work);
          if (status.is_ok() && values.back() == 2.0f) ++right;
          if (runtime.rank() == 1 && round % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(right.load(), 60);
  });
}

TEST(PendingOrder, ANumberThatIsInUseIsRefused) {
  on_every_place(2, [](Runtime& runtime) {
    std::vector<float> first(kCount, 1.0f), second(kCount, 1.0f);
    if (runtime.rank() == 0) {
      Request request = all_reduce(first);
      request.key = kNamedKey | 7;
      const auto work = runtime.submit(request);
      request.output = std::as_writable_bytes(std::span(second));
      request.input = request.output;
      expect_refused(end_of(runtime.submit(request)), {"number", "pending"});
      barrier(runtime);
      finish(work);
    } else {
      barrier(runtime);
      Request request = all_reduce(first);
      request.key = kNamedKey | 7;
      finish(runtime.submit(request));
    }
    EXPECT_EQ(first.back(), 2.0f);
  });
}

TEST(PendingOrder, CallsOnTheSameMemoryGoInTheirOrder) {
  on_every_place(4, [](Runtime& runtime) {
    for (const std::size_t count : {std::size_t{9}, kCount}) {
      std::vector<float> values(count, 1.0f), copy(count), all(count * 4);
      std::vector<std::shared_ptr<Work>> works;
      works.push_back(runtime.submit(all_reduce(values)));  // 4
      works.push_back(runtime.submit(all_reduce(values)));  // 16
      Request read = all_reduce(copy);
      read.input = std::as_bytes(std::span(values));
      works.push_back(runtime.submit(read));  // copy: 64
      Request gather = all_reduce(all);
      gather.descriptor.collective = Collective::kAllGather;
      gather.input = std::as_bytes(std::span(values));
      works.push_back(runtime.submit(gather));
      works.push_back(runtime.submit(all_reduce(std::span(values).first(count / 3))));  // 64
      works.push_back(runtime.submit(broadcast(std::span(values).last(count / 3), 2)));
      for (const auto& work : works) finish(work);
      ASSERT_EQ(copy.front(), 64.0f);
      ASSERT_EQ(copy.back(), 64.0f);
      ASSERT_EQ(all.front(), 16.0f);
      ASSERT_EQ(all.back(), 16.0f);
      ASSERT_EQ(values.front(), 64.0f);
      ASSERT_EQ(values.back(), 16.0f);
    }
  });
}

TEST(PendingOrder, TwoThatReadTheSameMemoryDoNotWaitForEachOther) {
  on_every_place(2, [](Runtime& runtime) {
    const std::vector<float> values(kCount, 1.0f);
    std::vector<float> first(kCount), second(kCount);
    Request one = named(first, "one");
    Request two = named(second, "two");
    one.input = two.input = std::as_bytes(std::span(values));
    // In another order on each rank: whoever waited for the other would wait for ever.
    if (runtime.rank() == 1) {
      finish(runtime.submit(two));
    }
    const auto work = runtime.submit(one);
    if (runtime.rank() == 0) finish(runtime.submit(two));
    finish(work);
    EXPECT_EQ(first.back(), 2.0f);
    EXPECT_EQ(second.back(), 2.0f);
  });
}

TEST(PendingOrder, NamesThatShareMemoryAreRefusedForTheirOrderIsUnknown) {
  on_every_place(2, [](Runtime& runtime) {
    std::vector<float> values(kCount, 1.0f);
    std::shared_ptr<Work> work;
    if (runtime.rank() == 0) {
      work = runtime.submit(named(values, "weight"));
      expect_refused(end_of(runtime.submit(named(std::span(values).last(10), "bias"))),
                     {"'bias'", "'weight'", "memory", "still pending", "wait"});
      expect_refused(end_of(runtime.submit(all_reduce(values))), {"'weight'", "memory"});
    }
    Request request;
    request.group = GroupId{0};
    request.name = "met";
    request.descriptor.collective = Collective::kBarrier;
    finish(runtime.submit(request));
    if (runtime.rank() == 1) work = runtime.submit(named(values, "weight"));
    finish(work);
    EXPECT_EQ(values.back(), 2.0f);
    finish(runtime.submit(named(values, "bias")));  // Free again.
  });
}

TEST(PendingOrder, MessagesAndOperationsDoNotShareMemory) {
  on_every_place(2, [](Runtime& runtime) {
    std::vector<float> values(kCount, 1.0f);
    const std::uint32_t peer = 1 - runtime.rank();
    if (runtime.rank() == 0) {
      const auto receive =
          runtime.receive({GroupId{0}, peer, 5, std::as_writable_bytes(std::span(values)), std::chrono::seconds(60)});
      expect_refused(end_of(runtime.receive({GroupId{0}, peer, 6, std::as_writable_bytes(std::span(values).last(1))})),
                     {"memory", "message", "wait"});
      expect_refused(end_of(runtime.send({GroupId{0}, peer, 6, std::as_bytes(std::span(values))})), {"memory"});
      expect_refused(end_of(runtime.submit(named(values, "weight"))), {"'weight'", "message", "memory"});
      runtime.send({GroupId{0}, peer, 4, {}});
      finish(receive);
      EXPECT_EQ(values.back(), 3.0f);
      // Many may read the same.
      std::vector<std::shared_ptr<Work>> works;
      for (std::uint64_t tag = 0; tag < 4; ++tag) {
        works.push_back(runtime.send({GroupId{0}, peer, 10 + tag, std::as_bytes(std::span(values))}));
      }
      for (const auto& work : works) finish(work);
    } else {
      finish(runtime.receive({GroupId{0}, peer, 4, {}}));
      std::fill(values.begin(), values.end(), 3.0f);
      finish(runtime.send({GroupId{0}, peer, 5, std::as_bytes(std::span(values))}));
      for (std::uint64_t tag = 0; tag < 4; ++tag) {
        finish(runtime.receive({GroupId{0}, peer, 10 + tag, std::as_writable_bytes(std::span(values))}));
      }
    }
  });
}

TEST(PendingOrder, WhoWaitsForAnotherKeepsItsOwnTimeOut) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    std::vector<float> values(100, 1.0f);
    if (runtime.rank() == 1) {
      finish(runtime.receive({GroupId{0}, 0, 1, {}}));
      finish(runtime.submit(all_reduce(values)));
    } else {
      const auto first = runtime.submit(all_reduce(values));
      Request second = all_reduce(values);
      second.timeout = std::chrono::milliseconds(50);
      const Status status = end_of(runtime.submit(second));
      EXPECT_EQ(status.code(), Code::kTimeout) << status.to_string();
      EXPECT_NE(status.message().find("same memory"), std::string::npos) << status.to_string();
      finish(runtime.send({GroupId{0}, 1, 1, {}}));
      finish(first);
    }
    EXPECT_EQ(values[0], 2.0f);
  }));
}

TEST(PendingOrder, AnInputThatOverlapsItsOwnOutputIsRefused) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    std::vector<float> values(100, 1.0f);
    Request request = all_reduce(std::span(values).first(50));
    request.input = std::as_bytes(std::span(values).subspan(1, 50));
    expect_refused(end_of(runtime.submit(request)), {"overlap"});
    request = all_reduce(values);
    request.descriptor.collective = Collective::kAllGather;
    request.input = std::as_bytes(std::span(values).subspan(1, 50));
    expect_refused(end_of(runtime.submit(request)), {"overlap"});
    request.input = std::as_bytes(std::span(values).subspan(50 * (1 - runtime.rank()), 50));
    expect_refused(end_of(runtime.submit(request)), {"overlap"});
    std::fill_n(values.begin() + 50 * runtime.rank(), 50, static_cast<float>(runtime.rank() + 1));
    request.input = std::as_bytes(std::span(values).subspan(50 * runtime.rank(), 50));  // Its own block: in place.
    finish(runtime.submit(request));
    EXPECT_EQ(values[0], 1.0f);
    EXPECT_EQ(values[99], 2.0f);
  }));
}

TEST(PendingOrder, ManyOnOneMemoryEndInAReasonableTime) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    std::vector<float> values(4, 1.0f);
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 2000; ++i) works.push_back(runtime.submit(all_reduce(values, ReduceOp::kAverage)));
    for (const auto& work : works) finish(work);
    EXPECT_EQ(values[0], 1.0f);
  }));
}

void leave_with_an_operation_under_way(Runtime& runtime) {
  const std::vector<std::uint32_t> ranks{0, 1};
  runtime.add_group(GroupId{3}, ranks);
  std::vector<float> values(kCount, 1.0f), behind(kCount, 1.0f);
  Request request = all_reduce(values);
  request.group = GroupId{3};
  if (runtime.rank() == 0) {
    const auto work = runtime.submit(request);
    const auto held = runtime.submit(request);
    runtime.remove_group(GroupId{3});
    EXPECT_TRUE(work->is_done() && held->is_done()) << "the group is gone, and its operations are not";
    EXPECT_EQ(end_of(work).code(), Code::kCancelled) << end_of(work).to_string();
    EXPECT_EQ(end_of(held).code(), Code::kCancelled);
    finish(runtime.send({GroupId{0}, 1, 1, {}}));
  } else {
    finish(runtime.receive({GroupId{0}, 0, 1, {}}));
    const Status status = end_of(runtime.submit(request));
    EXPECT_FALSE(status.is_ok()) << values.back();
    EXPECT_NE(status.message().find("rank 0"), std::string::npos) << status.to_string();
  }
  barrier(runtime);
}

void leave_while_it_moves(Runtime& runtime) {
  const std::vector<std::uint32_t> ranks{0, 1};
  for (std::uint32_t round = 0; round < 12; ++round) {
    const GroupId group{10 + round};
    runtime.add_group(group, ranks);
    std::vector<float> values(10 * kCount, 1.0f);
    Request request = all_reduce(values);
    request.group = group;
    barrier(runtime);
    const auto work = runtime.submit(request);
    if (runtime.rank() == round % 2) {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
      runtime.remove_group(group);
      EXPECT_TRUE(work->is_done());
      std::fill(values.begin(), values.end(), 7.0f);
      barrier(runtime);
      EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float value) { return value == 7.0f; }));
    } else {
      if (end_of(work).is_ok()) {
        EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float value) { return value == 2.0f; }));
      }
      barrier(runtime);
    }
  }
}

TEST(PendingOrder, WhoLeavesAGroupHasItsMemoryBack) { on_every_place(2, leave_with_an_operation_under_way); }

TEST(PendingOrder, WhoLeavesAGroupWhileDataMovesHasItsMemoryBack) { on_every_place(2, leave_while_it_moves); }

void call_everything(Runtime& runtime) {
  std::vector<float> values(64, 1.0f);
  Status status;
  const auto ended = [](const std::shared_ptr<Work>& work) {
    work->on_done([work](const Status&) {});
    EXPECT_TRUE(work->wait(in_seconds(60)));
  };
  ended(runtime.submit(named(values, "late")));
  Request request = all_reduce(values);
  request.is_waited_for = true;
  if (const auto work = runtime.run(request, status)) ended(work);
  ended(runtime.send({GroupId{0}, 0, 1, {}, std::chrono::milliseconds(5)}));
  ended(runtime.receive({GroupId{0}, 0, 1, {}, std::chrono::milliseconds(5)}));
  static_cast<void>(runtime.stats());
  runtime.remove_group(GroupId{9});
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { runtime.add_group(GroupId{9}, std::vector<std::uint32_t>{0}); },
           [&] { static_cast<void>(runtime.allocate(100)); }, [&] { static_cast<void>(runtime.stragglers()); },
           [&] { static_cast<void>(runtime.server_counters()); }}) {
    try {
      call();
    } catch (const Error&) {
    }
  }
}

TEST(Shutdown, CallsAfterItAreErrors) {
  expect_clean(run_job({.workers = 1}, [](Runtime& runtime) {
    runtime.shutdown();
    call_everything(runtime);
    runtime.abort("too late");
    std::vector<float> values(4);
    Status status;
    EXPECT_EQ(runtime.run(all_reduce(values), status), nullptr);
    EXPECT_EQ(status.code(), Code::kShutdown);
    EXPECT_THROW(runtime.add_group(GroupId{9}, std::vector<std::uint32_t>{0}), Error);
    EXPECT_THROW(static_cast<void>(runtime.allocate(100)), Error);
    EXPECT_THROW(static_cast<void>(runtime.stragglers()), Error);
    EXPECT_THROW(static_cast<void>(runtime.server_counters()), Error);
  }));
}

TEST(Shutdown, CallsOfOtherThreadsMayComeAtAnyMomentOfIt) {
  for (int round = 0; round < 30; ++round) {
    expect_clean(run_job({.workers = 1}, [round](Runtime& runtime) {
      std::atomic<bool> stop{false};
      std::vector<std::thread> threads;
      for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
          while (!stop.load()) call_everything(runtime);
        });
      }
      if (round % 3 == 1) threads.emplace_back([&] { runtime.abort("stop"); });
      if (round % 3 == 2) threads.emplace_back([&] { runtime.shutdown(); });
      std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
      runtime.shutdown();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      stop.store(true);
      for (std::thread& thread : threads) thread.join();
    }));
  }
}

}  // namespace
}  // namespace herring::runtime
