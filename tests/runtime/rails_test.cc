// Several ranks on each of several hosts: every rank has a server, and each host's data for it has one owner.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "runtime/job.h"

namespace herring::runtime {
namespace {

using namespace testing;

constexpr GroupId kGroup{7};

float sum_of(const std::vector<std::uint32_t>& ranks) {
  return static_cast<float>(std::accumulate(ranks.begin(), ranks.end(), 0u) + ranks.size());
}

/// Sums of sizes that take no chunk, one, some and many of each lane, and a barrier.
void sum_all_sizes(Runtime& runtime, GroupId group, const std::vector<std::uint32_t>& ranks) {
  for (const std::size_t count : {0u, 1u, 100u, 5'000u, 20'000u, 300'001u}) {
    std::vector<float> values(count, static_cast<float>(runtime.rank() + 1));
    Request request = all_reduce(values);
    request.group = group;
    finish(runtime.submit(request));
    for (const float value : values) ASSERT_EQ(value, sum_of(ranks)) << count << " elements";
  }
  Request barrier;
  barrier.descriptor.collective = Collective::kBarrier;
  barrier.group = group;
  finish(runtime.submit(barrier));
}

/// A broadcast from the last of them, and everybody's value gathered.
void spread(Runtime& runtime, GroupId group, const std::vector<std::uint32_t>& ranks) {
  constexpr std::size_t kCount = 70'000;
  std::vector<float> values(kCount, static_cast<float>(runtime.rank()));
  Request broadcast = all_reduce(values);
  broadcast.descriptor.collective = Collective::kBroadcast;
  broadcast.descriptor.root = static_cast<std::uint32_t>(ranks.size() - 1);
  broadcast.group = group;
  finish(runtime.submit(broadcast));
  EXPECT_EQ(values.front(), static_cast<float>(ranks.back()));
  EXPECT_EQ(values.back(), static_cast<float>(ranks.back()));
  std::vector<float> own(kCount, static_cast<float>(runtime.rank()));
  std::vector<float> all(kCount * ranks.size());
  Request gather = all_reduce(own);
  gather.descriptor.collective = Collective::kAllGather;
  gather.output = std::as_writable_bytes(std::span(all));
  gather.group = group;
  finish(runtime.submit(gather));
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    EXPECT_EQ(all[i * kCount], static_cast<float>(ranks[i]));
    EXPECT_EQ(all[(i + 1) * kCount - 1], static_cast<float>(ranks[i]));
  }
}

std::vector<std::uint32_t> everybody(const Runtime& runtime) {
  std::vector<std::uint32_t> ranks(runtime.size());
  std::iota(ranks.begin(), ranks.end(), 0u);
  return ranks;
}

TEST(Rails, HostsOfAllSizesSumSpreadAndGather) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  for (const auto& [workers, hosts, lanes, is_cyclic] : {std::tuple{4u, 2u, 1u, false},
                                                         {5u, 2u, 1u, false},
                                                         {6u, 2u, 2u, true},
                                                         {7u, 3u, 1u, true},
                                                         {8u, 2u, 1u, false}}) {
    SCOPED_TRACE(std::to_string(workers) + " workers, " + std::to_string(hosts) + " hosts, " + std::to_string(lanes) +
                 " lanes");
    JobShape shape{.workers = workers, .hosts = hosts};
    shape.is_cyclic = is_cyclic;
    shape.config.lanes = lanes;
    expect_clean(run_job(shape, [](Runtime& runtime) {
      const std::vector<std::uint32_t> all = everybody(runtime);
      sum_all_sizes(runtime, GroupId{0}, all);
      spread(runtime, GroupId{0}, all);
      // Not all of each host, and not in order.
      std::vector<std::uint32_t> some(all.rbegin(), all.rend() - 1);
      if (runtime.rank() == 0) return;
      runtime.add_group(kGroup, some);
      sum_all_sizes(runtime, kGroup, some);
      spread(runtime, kGroup, some);
    }));
  }
}

TEST(Rails, AGroupWithOneRankOnEachHostHasItsOwnServersAlone) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  expect_clean(run_job({.workers = 6, .hosts = 2}, [](Runtime& runtime) {
    const std::uint32_t rail = runtime.rank() % 3;
    const std::vector<std::uint32_t> ranks{rail, rail + 3};
    const GroupId group{kGroup.value + rail};
    runtime.add_group(group, ranks);
    const std::vector<ServerCounters> before = runtime.server_counters();
    ASSERT_EQ(before.size(), 6u);
    // Only the middle rail's group works.
    if (rail == 1) {
      sum_all_sizes(runtime, group, ranks);
      spread(runtime, group, ranks);
    }
    const std::vector<ServerCounters> after = runtime.server_counters();
    for (std::size_t server = 0; server < after.size(); ++server) {
      const std::uint64_t bytes = after[server].bytes_received - before[server].bytes_received;
      const bool is_on_rail = after[server].place.find("worker 1 ") != std::string::npos ||
                              after[server].place.find("worker 4 ") != std::string::npos;
      if (is_on_rail) {
        EXPECT_GT(bytes, 500'000u) << after[server].place;
      } else {
        EXPECT_LT(bytes, 10'000u) << after[server].place << ": more than these counters themselves take";
      }
    }
  }));
}

TEST(Rails, AGroupHasTheServersOfItsOwnMembersWhereTheyAreOnTheSameRails) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  expect_clean(run_job({.workers = 8, .hosts = 2}, [](Runtime& runtime) {
    const std::vector<std::uint32_t> ranks{7, 5, 1, 3};  // The second and fourth of each host, not in order.
    const bool is_in = std::ranges::find(ranks, runtime.rank()) != ranks.end();
    if (is_in) runtime.add_group(kGroup, ranks);
    const std::vector<ServerCounters> before = runtime.server_counters();
    if (is_in) {
      sum_all_sizes(runtime, kGroup, ranks);
      spread(runtime, kGroup, ranks);
    }
    const std::vector<ServerCounters> after = runtime.server_counters();
    ASSERT_EQ(after.size(), 8u);
    std::size_t busy = 0;
    for (std::size_t server = 0; server < after.size(); ++server) {
      const std::uint64_t bytes = after[server].bytes_received - before[server].bytes_received;
      busy += bytes > 100'000 ? 1 : 0;
      EXPECT_TRUE(bytes > 100'000 || bytes < 10'000) << after[server].place << ": " << bytes;
    }
    EXPECT_EQ(busy, 4u);
  }));
}

/// Nobody owns a byte of it, and all the same nobody goes on before all have come, or hears of another's mistake.
TEST(Rails, AnOperationWithoutBytesWaitsForAllHostsAndFailsOnAllRanks) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  expect_clean(run_job({.workers = 6, .hosts = 2}, [](Runtime& runtime) {
    std::vector<float> nothing;
    sum_all_sizes(runtime, GroupId{0}, everybody(runtime));
    const auto begun = std::chrono::steady_clock::now();
    if (runtime.rank() >= 3) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    finish(runtime.submit(all_reduce(nothing)));
    EXPECT_GT(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(250));
    std::vector<float> values(runtime.rank() < 3 ? 0 : 1, 1);
    const auto work = runtime.submit(all_reduce(values));
    ASSERT_TRUE(work->wait(in_seconds(20)));
    EXPECT_EQ(work->status().code(), Code::kMismatch) << work->status().to_string();
    sum_all_sizes(runtime, GroupId{0}, everybody(runtime));
  }));
}

/// Whoever of its host owns nothing at the lane where hosts meet hears of another host's failure all the same.
TEST(Rails, WhatFailsOnOneHostEndsOnAllRanksOfTheOthersAtOnce) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  for (std::uint32_t guilty = 0; guilty < 6; guilty += 2) {
    SCOPED_TRACE("rank " + std::to_string(guilty));
    expect_clean(run_job({.workers = 6, .hosts = 2}, [guilty](Runtime& runtime) {
      for (const std::size_t count : {10u, 300'000u}) {
        std::vector<float> values(count + (runtime.rank() == guilty ? 1 : 0), 1);
        const auto work = runtime.submit(all_reduce(values));
        ASSERT_TRUE(work->wait(in_seconds(20))) << "rank " << runtime.rank() << " waits in vain";
        EXPECT_EQ(work->status().code(), Code::kMismatch) << work->status().to_string();
      }
      sum_all_sizes(runtime, GroupId{0}, everybody(runtime));
    }));
  }
}

}  // namespace
}  // namespace herring::runtime
