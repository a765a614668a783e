// Two hosts send small data to each other: the same sums as by way of servers, over the real endpoints.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/job.h"

namespace herring::runtime {
namespace {

using namespace testing;

/// Of very different size, so that another order of summation gives other bits.
std::vector<float> values_of(std::uint32_t rank, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = std::sin(static_cast<float>(i + 1) * static_cast<float>(rank + 3)) * (i % 2 == 0 ? 1.0f : 1e5f);
  }
  return values;
}

/// What every rank has after sums of all sizes, a broadcast, a barrier, and a name that is used again and again.
std::vector<std::vector<float>> results_of(const JobShape& shape) {
  std::vector<std::vector<float>> results(shape.workers);
  const auto errors = run_job(shape, [&](Runtime& runtime) {
    std::vector<float>& all = results[runtime.rank()];
    const auto keep = [&](const std::vector<float>& values) { all.insert(all.end(), values.begin(), values.end()); };
    for (const std::size_t count : {1u, 2u, 250u, 1'000u, 16'384u, 16'385u, 40'000u, 262'144u, 262'145u}) {
      std::vector<float> values = values_of(runtime.rank(), count);
      finish(runtime.submit(all_reduce(values)));
      keep(values);
    }
    std::vector<float> root = values_of(runtime.rank(), 100);
    Request broadcast = all_reduce(root);
    broadcast.descriptor.collective = Collective::kBroadcast;
    broadcast.descriptor.root = shape.workers - 1;
    finish(runtime.submit(broadcast));
    keep(root);
    Request barrier;
    barrier.descriptor.collective = Collective::kBarrier;
    finish(runtime.submit(barrier));
    std::vector<std::vector<float>> many;
    for (int i = 0; i < 200; ++i) many.push_back(values_of(runtime.rank() + i, i % 10 == 0 ? 50'000 : 64));
    std::vector<std::shared_ptr<Work>> works;
    for (std::vector<float>& values : many) works.push_back(runtime.submit(all_reduce(values)));
    for (const auto& work : works) finish(work);
    for (const std::vector<float>& values : many) keep(values);
    for (int i = 0; i < 50; ++i) {
      std::vector<float> again = values_of(runtime.rank() + i, 8);
      Request named = all_reduce(again);
      named.name = "again";
      finish(runtime.submit(named));
      keep(again);
    }
  });
  expect_clean(errors);
  return results;
}

class OneHop : public ::testing::TestWithParam<JobShape> {};

TEST_P(OneHop, TheBitsAreThoseOfTwoHops) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  JobShape one = GetParam();
  one.config.one_hop_hosts = one.hosts;
  JobShape two = GetParam();
  two.config.one_hop_hosts = 0;
  const auto direct = results_of(one);
  const auto through_servers = results_of(two);
  for (std::uint32_t rank = 0; rank < one.workers; ++rank) {
    ASSERT_EQ(direct[rank].size(), through_servers[rank].size());
    for (std::size_t i = 0; i < direct[rank].size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(direct[rank][i]), std::bit_cast<std::uint32_t>(through_servers[rank][i]))
          << "rank " << rank << ", value " << i;
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<JobShape>& info) {
  const JobShape& shape = info.param;
  return std::to_string(shape.workers) + "workers" + std::to_string(shape.hosts) + "hosts" +
         (shape.is_cyclic ? "cyclic" : "") + (shape.config.checksum == Toggle::kOn ? "checksums" : "");
}

JobShape with_checksums(JobShape shape) {
  shape.config.checksum = Toggle::kOn;
  return shape;
}

INSTANTIATE_TEST_SUITE_P(Jobs, OneHop,
                         ::testing::Values(JobShape{.workers = 2, .hosts = 2}, JobShape{.workers = 3, .hosts = 2},
                                           JobShape{.workers = 4, .hosts = 2},
                                           JobShape{.workers = 4, .hosts = 2, .is_cyclic = true},
                                           JobShape{.workers = 4, .hosts = 4}, JobShape{.workers = 6, .hosts = 3},
                                           with_checksums({.workers = 2, .hosts = 2})),
                         name_of);

TEST(OneHopJobs, WhoDisagreesIsNamedOnBothHosts) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  expect_clean(run_job({.workers = 2, .hosts = 2}, [](Runtime& runtime) {
    // In the announce, after a grant, and so large that it goes in two hops.
    for (const std::size_t other : {3u, 100'000u, 300'000u}) {
      std::vector<float> values(runtime.rank() == 0 ? 2 : other, 1);
      const auto work = runtime.submit(all_reduce(values));
      wait_to_the_end(*work);
      EXPECT_EQ(work->status().code(), Code::kMismatch);
      EXPECT_NE(work->status().message().find("rank 0 said"), std::string::npos) << work->status().message();
      EXPECT_NE(work->status().message().find("rank 1 said"), std::string::npos) << work->status().message();
    }
    std::vector<float> values(10, 1);
    finish(runtime.submit(all_reduce(values)));
    EXPECT_EQ(values.front(), 2);
  }));
}

TEST(OneHopJobs, WhoNeverCallsItIsNamed) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  expect_clean(run_job({.workers = 2, .hosts = 2}, [](Runtime& runtime) {
    std::vector<float> values(10, 1);
    if (runtime.rank() == 0) {
      Request request = all_reduce(values);
      request.timeout = std::chrono::seconds(1);
      const auto work = runtime.submit(request);
      wait_to_the_end(*work);
      EXPECT_EQ(work->status().code(), Code::kTimeout) << work->status().message();
      EXPECT_NE(work->status().message().find("rank 1 had not called"), std::string::npos) << work->status().message();
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(2));
    }
  }));
}

/// The end of a job right after its last operation: nobody's data is lost on the way.
TEST(OneHopJobs, RanksMayLeaveAtOnce) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  for (int job = 0; job < 10; ++job) {
    JobShape shape{.workers = 3, .hosts = 3};
    shape.config.one_hop_hosts = 3;
    if (job % 2 == 1) shape = {.workers = 2, .hosts = 2};
    expect_clean(run_job(shape, [&](Runtime& runtime) {
      std::vector<float> values(shape.workers == 3 ? 600 : 200'000, 1);
      finish(runtime.submit(all_reduce(values)));
      EXPECT_EQ(values.back(), static_cast<float>(shape.workers));
    }));
  }
}

}  // namespace
}  // namespace herring::runtime
