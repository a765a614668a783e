// Point-to-point messages through the whole runtime: shared memory, the network, and both at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime/job.h"
#include "runtime/messages.h"
#include "runtime/runtime.h"

namespace herring::runtime {
namespace {

using namespace testing;
using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t bytes, std::uint32_t seed) {
  Bytes data(bytes);
  std::uint32_t state = seed * 2654435761u + 1;
  for (std::byte& b : data) {
    state = state * 1664525u + 1013904223u;
    b = static_cast<std::byte>(state >> 24);
  }
  return data;
}

Send send_of(std::uint32_t to, std::uint64_t tag, std::span<const std::byte> data) {
  return {{}, to, tag, data, std::chrono::seconds(60)};
}

Receive receive_of(std::optional<std::uint32_t> from, std::optional<std::uint64_t> tag, std::span<std::byte> memory) {
  return {{}, from, tag, memory, std::chrono::seconds(60)};
}

Status end_of(const std::shared_ptr<Work>& work) {
  return work->wait(in_seconds(60)) ? work->status() : Status(Code::kInternal, "it never ended");
}

void expect_has(const Status& status, Code code, const std::vector<std::string>& texts) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  for (const std::string& text : texts) {
    EXPECT_NE(status.message().find(text), std::string::npos) << "no '" << text << "' in: " << status.to_string();
  }
}

void barrier(Runtime& runtime, const std::string& name) {
  Request request;
  request.descriptor.collective = Collective::kBarrier;
  request.name = name;
  finish(runtime.submit(request));
}

/// The same on every placement: one host, several hosts, several ranks on each, servers elsewhere.
void on_every_placement(const Body& body, std::uint32_t workers = 4) {
  expect_clean(run_job({.workers = workers}, body));
  if (!has_fabric()) return;
  expect_clean(run_job({.workers = workers, .servers = 1}, body));
  expect_clean(run_job({.workers = workers, .hosts = workers}, body));
  expect_clean(run_job({.workers = workers, .hosts = 2}, body));
}

constexpr std::size_t kSizes[] = {0, 1, 7, 1000, 16 << 10, (16 << 10) + 1, 100'000, (1 << 20) + 3, 9'000'001};

/// Everybody sends everything to everybody, itself too, at once; the receives come in another order.
void everybody_to_everybody(Runtime& runtime) {
  const std::uint32_t n = runtime.size();
  std::vector<Bytes> out, in;
  std::vector<std::shared_ptr<Work>> works;
  const auto seed = [](std::uint32_t from, std::uint32_t to, std::size_t size) {
    return static_cast<std::uint32_t>(from * 10'000 + to * 100 + size);
  };
  for (std::uint32_t to = 0; to < n; ++to) {
    for (std::size_t i = 0; i < std::size(kSizes); ++i) out.push_back(pattern(kSizes[i], seed(runtime.rank(), to, i)));
  }
  for (std::uint32_t to = 0; to < n; ++to) {
    for (std::size_t i = 0; i < std::size(kSizes); ++i) {
      works.push_back(runtime.send(send_of(to, i, out[to * std::size(kSizes) + i])));
    }
  }
  for (std::uint32_t k = 0; k < n; ++k) {
    for (const std::size_t bytes : kSizes) in.emplace_back(bytes, std::byte{0xEE});
  }
  for (std::uint32_t k = n; k-- > 0;) {
    for (std::size_t i = std::size(kSizes); i-- > 0;) {
      works.push_back(runtime.receive(receive_of(k, i, in[k * std::size(kSizes) + i])));
    }
  }
  for (const auto& work : works) EXPECT_TRUE(end_of(work).is_ok()) << end_of(work).to_string();
  for (std::uint32_t from = 0; from < n; ++from) {
    for (std::size_t i = 0; i < std::size(kSizes); ++i) {
      EXPECT_EQ(in[from * std::size(kSizes) + i], pattern(kSizes[i], seed(from, runtime.rank(), i)))
          << kSizes[i] << " bytes from " << from << " to " << runtime.rank();
    }
  }
}

TEST(RuntimeMessages, EverySizeBetweenAllRanksAtOnce) { on_every_placement(everybody_to_everybody); }

TEST(RuntimeMessages, OneProcessCanSendToItself) { expect_clean(run_job({.workers = 1}, everybody_to_everybody)); }

TEST(RuntimeMessages, AnySourceAndAnyTagTellWhatCame) {
  on_every_placement([](Runtime& runtime) {
    constexpr std::uint64_t kCount = 30;
    if (runtime.rank() != 0) {
      std::vector<std::uint64_t> values(kCount);
      std::vector<std::shared_ptr<Work>> works;
      for (std::uint64_t i = 0; i < kCount; ++i) {
        values[i] = runtime.rank() * 1000 + i;
        works.push_back(runtime.send(send_of(0, i % 3, std::as_bytes(std::span(&values[i], 1)))));
      }
      for (const auto& work : works) finish(work);
      return;
    }
    std::vector<std::uint64_t> next(runtime.size(), 0);
    for (std::uint64_t i = 0; i < kCount * (runtime.size() - 1); ++i) {
      std::uint64_t value = 0;
      const auto work = runtime.receive(receive_of({}, {}, std::as_writable_bytes(std::span(&value, 1))));
      finish(work);
      const Received received = work->received();
      ASSERT_LT(received.source, runtime.size());
      EXPECT_EQ(value, received.source * 1000 + next[received.source]) << "messages of one rank overtook each other";
      EXPECT_EQ(received.tag, next[received.source] % 3);
      EXPECT_EQ(received.bytes, sizeof(value));
      ++next[received.source];
    }
  });
}

TEST(RuntimeMessages, ManyUnreceivedMessagesHoldNobodyUp) {
  on_every_placement(
      [](Runtime& runtime) {
        constexpr std::uint64_t kCount = 1000;
        std::vector<Bytes> data, in(kCount);
        for (std::uint64_t i = 0; i < kCount; ++i)
          data.push_back(pattern(8 + i * 13 % 3000, static_cast<std::uint32_t>(i)));
        const std::uint32_t other = 1 - runtime.rank();
        std::vector<std::shared_ptr<Work>> sends;
        for (std::uint64_t i = 0; i < kCount; ++i) sends.push_back(runtime.send(send_of(other, i, data[i])));
        for (std::uint64_t i = kCount; i-- > 0;) {
          in[i].resize(data[i].size());
          finish(runtime.receive(receive_of(other, i, in[i])));  // One at a time, the last one first.
        }
        for (const auto& work : sends) finish(work);
        EXPECT_EQ(in, data);
      },
      2);
}

TEST(RuntimeMessages, GroupsAreApartAndRanksAreTheGroups) {
  on_every_placement([](Runtime& runtime) {
    // Ranks reversed: group rank g is worker 3 - g.
    const std::vector<std::uint32_t> ranks{3, 2, 1, 0};
    runtime.add_group(GroupId{5}, ranks);
    barrier(runtime, "groups");
    const std::uint32_t mine = 3 - runtime.rank();
    std::uint32_t out = 100 + mine, plain = 200 + runtime.rank(), in = 0, plain_in = 0;
    const std::uint32_t next = (mine + 1) % 4, before = (mine + 3) % 4;
    Send in_group = send_of(next, 1, std::as_bytes(std::span(&out, 1)));
    in_group.group = GroupId{5};
    const auto one = runtime.send(in_group);
    const auto two = runtime.send(send_of(runtime.rank() ^ 1u, 1, std::as_bytes(std::span(&plain, 1))));
    const auto plain_work = runtime.receive(receive_of({}, 1, std::as_writable_bytes(std::span(&plain_in, 1))));
    Receive receive = receive_of({}, 1, std::as_writable_bytes(std::span(&in, 1)));
    receive.group = GroupId{5};
    const auto work = runtime.receive(receive);
    for (const std::shared_ptr<Work>& each :
         {one, two, std::shared_ptr<Work>(plain_work), std::shared_ptr<Work>(work)}) {
      finish(each);
    }
    EXPECT_EQ(in, 100 + before);
    EXPECT_EQ(work->received().source, before);
    EXPECT_EQ(plain_in, 200 + (runtime.rank() ^ 1u));
    EXPECT_EQ(plain_work->received().source, runtime.rank() ^ 1u);
  });
}

TEST(RuntimeMessages, CollectivesAndMessagesShareTheWay) {
  on_every_placement([](Runtime& runtime) {
    std::mt19937 random(runtime.rank());
    const std::uint32_t next = (runtime.rank() + 1) % runtime.size();
    const std::uint32_t before = (runtime.rank() + runtime.size() - 1) % runtime.size();
    for (int round = 0; round < 10; ++round) {
      std::vector<float> values(100'000, 1.0f);
      const Bytes out = pattern(1'500'000, runtime.rank());
      Bytes in(out.size());
      const auto sum = runtime.submit(all_reduce(values));
      const auto receive = runtime.receive(receive_of(before, 0, in));
      const auto send = runtime.send(send_of(next, 0, out));
      finish(send);
      finish(receive);
      finish(sum);
      EXPECT_EQ(values.back(), static_cast<float>(runtime.size()));
      EXPECT_EQ(in, pattern(in.size(), before));
    }
  });
}

TEST(RuntimeMessages, ArenaMemoryGoesWithoutACopy) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    constexpr std::size_t kBytes = 5'000'000;
    const std::shared_ptr<std::byte> memory = runtime.allocate(kBytes);
    ASSERT_NE(memory, nullptr);
    const std::span<std::byte> shared(memory.get(), kBytes);
    const Bytes data = pattern(kBytes, 1);
    if (runtime.rank() == 0) std::memcpy(shared.data(), data.data(), kBytes);
    if (runtime.rank() == 0) finish(runtime.send(send_of(1, 1, shared)));
    if (runtime.rank() == 1) {
      finish(runtime.receive(receive_of(0, 1, shared)));
      EXPECT_EQ(std::memcmp(shared.data(), data.data(), kBytes), 0);
      EXPECT_EQ(runtime.stats().message_bytes_received, 0u + kBytes);
    }
  }));
}

void sizes_differ(Runtime& runtime) {
  for (const std::size_t bytes : {100, 3'000'000}) {
    Bytes memory(runtime.rank() == 0 ? bytes : bytes + 1);
    const std::shared_ptr<Work> work = runtime.rank() == 0
                                           ? runtime.send(send_of(1, 9, memory))
                                           : std::shared_ptr<Work>(runtime.receive(receive_of(0, 9, memory)));
    expect_has(end_of(work), Code::kMismatch,
               {"rank 0", "rank 1", std::to_string(bytes) + " bytes", std::to_string(bytes + 1) + " bytes", "tag 9"});
  }
  Bytes good(10, static_cast<std::byte>(runtime.rank()));
  finish(runtime.rank() == 0 ? runtime.send(send_of(1, 9, good)) : runtime.receive(receive_of(0, 9, good)));
  EXPECT_EQ(good[0], std::byte{0});
}

TEST(RuntimeMessages, DifferentSizesAreAnErrorOnBothSides) { on_every_placement(sizes_differ, 2); }

void nobody_comes(Runtime& runtime) {
  if (runtime.rank() == 0) {
    Bytes small(10), large(1'000'000), other(10), another(10);
    Send send = send_of(1, 3, small);
    send.timeout = std::chrono::milliseconds(300);
    const auto one = runtime.send(send);
    send.data = large;
    const auto two = runtime.send(send);
    Receive receive = receive_of(1, 4, other);
    receive.timeout = std::chrono::milliseconds(300);
    const auto three = runtime.receive(receive);
    receive.from = std::nullopt;
    receive.memory = another;
    const auto four = runtime.receive(receive);
    expect_has(end_of(one), Code::kTimeout, {"send of 10 bytes", "tag 3", "rank 1"});
    expect_has(end_of(two), Code::kTimeout, {"send of 1000000 bytes", "tag 3", "rank 1"});
    expect_has(end_of(three), Code::kTimeout, {"receive of 10 bytes", "tag 4", "rank 0 waits for rank 1"});
    expect_has(end_of(four), Code::kTimeout, {"tag 4", "one of ranks 0, 1"});
  }
  barrier(runtime, "after the time-outs");
  // What was given up is not received; the next message is.
  std::uint32_t value = runtime.rank();
  const std::span<std::uint32_t> one(&value, 1);
  finish(runtime.rank() == 0 ? runtime.send(send_of(1, 3, std::as_bytes(one)))
                             : runtime.receive(receive_of(0, 3, std::as_writable_bytes(one))));
  EXPECT_EQ(value, 0u);
}

TEST(RuntimeMessages, TimeOutsNameWhoDidNotCome) { on_every_placement(nobody_comes, 2); }

void pending_at_shutdown(Runtime& runtime) {
  Bytes memory(10), message(100'000, static_cast<std::byte>(7)), coming(100'000);
  const auto never = runtime.receive(receive_of(1 - runtime.rank(), 77, memory));
  // A send that the other side still receives is not lost by an early shutdown.
  const auto send = runtime.rank() == 0 ? runtime.send(send_of(1, 1, message)) : nullptr;
  if (runtime.rank() == 1) {
    finish(runtime.receive(receive_of(0, 1, coming)));
    EXPECT_EQ(coming, message);
  }
  runtime.shutdown();
  // Rank 0 shuts down with its send under way: it may have left before a slow rank 1 comes to that.
  if (const Status ended = end_of(never); runtime.rank() == 1 && ended.code() == Code::kPeerLost) {
    expect_has(ended, Code::kPeerLost, {"worker 0", "has left the job"});
  } else {
    expect_has(ended, Code::kShutdown, {"shut down"});
  }
  if (send) {
    EXPECT_TRUE(end_of(send).is_ok()) << end_of(send).to_string();
  }
  expect_has(end_of(runtime.receive(receive_of(0, 1, memory))), Code::kShutdown, {});
}

TEST(RuntimeMessages, ShutdownEndsPendingReceivesAndFinishesSends) { on_every_placement(pending_at_shutdown, 2); }

TEST(RuntimeMessages, AWorkerThatLeftIsNamed) {
  JobShape shape{.workers = 2};
  shape.config.dead_after_s = 1;  // Also how long a message of a worker that left may take to come.
  const auto body = [](Runtime& runtime) {
    barrier(runtime, "start");
    if (runtime.rank() == 1) return;  // run_job() shuts it down.
    Bytes memory(10);
    expect_has(end_of(runtime.receive(receive_of(1, 1, memory))), Code::kPeerLost, {"worker 1", "left"});
    expect_has(end_of(runtime.send(send_of(1, 1, memory))), Code::kPeerLost, {"worker 1", "left"});
  };
  expect_clean(run_job(shape, body));
  if (!has_fabric()) return;
  shape.servers = 1;  // Here a worker may go while others stay.
  expect_clean(run_job(shape, body));
}

void one_aborts(Runtime& runtime) {
  Bytes memory(10);
  const auto receive = runtime.receive(receive_of(1 - runtime.rank(), 1, memory));
  if (runtime.rank() == 0) runtime.abort("the user's reason");
  const Status status = end_of(receive);
  EXPECT_FALSE(status.is_ok());
  EXPECT_NE(status.message().find("the user's reason"), std::string::npos) << status.to_string();
  expect_has(end_of(runtime.receive(receive_of(1 - runtime.rank(), 1, memory))), status.code(), {});
}

TEST(RuntimeMessages, AbortFailsEverythingOnEveryRank) {
  expect_clean(run_job({.workers = 2}, one_aborts));
  if (has_fabric()) expect_clean(run_job({.workers = 2, .hosts = 2}, one_aborts));
}

/// What ends the job is what its callers hear, also where the runtime is shut down before anybody looked at it.
void aborts_and_shuts_down(Runtime& runtime) {
  std::vector<Bytes> memory(50, Bytes(10));
  std::vector<std::shared_ptr<Work>> works;
  for (Bytes& each : memory) works.push_back(runtime.receive(receive_of(1 - runtime.rank(), 1, each)));
  std::vector<float> values(10);
  Request request = all_reduce(values);
  request.name = "of rank " + std::to_string(runtime.rank());
  works.push_back(runtime.submit(request));
  runtime.give_up(Status(Code::kPeerLost, "the hub's reason"));
  runtime.shutdown();
  // The other rank may have left before.
  for (const auto& work : works) expect_has(end_of(work), Code::kPeerLost, {});
}

TEST(RuntimeMessages, WhatEndsTheJobIsHeardAlsoWhereShutdownFollows) {
  for (int round = 0; round < 20; ++round) {
    expect_clean(run_job({.workers = 2}, aborts_and_shuts_down));
    if (has_fabric()) expect_clean(run_job({.workers = 2, .hosts = 2}, aborts_and_shuts_down));
  }
}

TEST(RuntimeMessages, LeavingAGroupEndsItsReceives) {
  expect_clean(run_job({.workers = 2}, [](Runtime& runtime) {
    const std::vector<std::uint32_t> ranks{0, 1};
    runtime.add_group(GroupId{3}, ranks);
    Bytes memory(10);
    Receive receive = receive_of(1 - runtime.rank(), 1, memory);
    receive.group = GroupId{3};
    const auto work = runtime.receive(receive);
    runtime.remove_group(GroupId{3});
    expect_has(end_of(work), Code::kCancelled, {"has left the group"});
    barrier(runtime, "end");
  }));
}

TEST(RuntimeMessages, BadArgumentsComeBackInTheWork) {
  expect_clean(run_job({.workers = 1}, [](Runtime& runtime) {
    Bytes memory(4);
    expect_has(end_of(runtime.send(send_of(1, 0, memory))), Code::kInvalidArgument, {"rank 1", "ranks 0 to 0"});
    expect_has(end_of(runtime.receive(receive_of(5, 0, memory))), Code::kInvalidArgument, {"rank 5"});
    Send send = send_of(0, 0, memory);
    send.group = GroupId{9};
    expect_has(end_of(runtime.send(send)), Code::kInvalidArgument, {"group 9"});
    Receive receive = receive_of(0, 0, memory);
    receive.timeout = Duration::zero();
    expect_has(end_of(runtime.receive(receive)), Code::kInvalidArgument, {"timeout"});
  }));
}

TEST(RuntimeMessages, MemoryForUnreceivedMessagesIsBoundedForAnyJob) {
  for (const std::uint32_t workers : {1u, 2u, 64u, 1000u, 10'000u}) {
    Placement placement;
    placement.workers = workers;
    placement.host_first = true;
    for (std::uint32_t i = 0; i < workers; ++i) placement.host_of.push_back(i / 8);
    EXPECT_LE(message_memory_bound(Config{}, placement, 0), 192u << 20) << workers << " workers";
    const point_to_point::LinkConfig link = network_link(Config{}, workers);
    EXPECT_GE(link.credits, 4u);
    EXPECT_LE(link.eager_bytes, Config{}.eager_bytes);
  }
}

}  // namespace
}  // namespace herring::runtime
