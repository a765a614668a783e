// A job that takes more receives than an endpoint holds hangs without a word: its lanes never take a chunk. So the
// sizes are computed beforehand, and a job that does not fit is refused with what to change.
#include "runtime/budget.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/status.h"
#include "core/text.h"
#include "runtime/messages.h"
#include "runtime/placement.h"
#include "transport/limits.h"

namespace herring::runtime {
namespace {

BudgetInput input_of(std::uint32_t workers, std::uint32_t lanes, std::uint32_t window = 6) {
  BudgetInput input;
  input.workers = workers;
  input.hosts = workers;
  input.lane_windows.assign(lanes, window);
  input.chunk_bytes = 32 << 10;
  input.eager_bytes = 16 << 10;
  return input;
}

std::string refusal(const BudgetInput& input) {
  try {
    static_cast<void>(make_budget(input));
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kInvalidArgument);
    return error.what();
  }
  return "";
}

std::vector<Member> members(Role role, std::uint32_t count, std::uint32_t per_host, const std::string& host) {
  std::vector<Member> result;
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    const std::string name = host + std::to_string(rank / per_host);
    result.push_back({role, rank, 100 + rank, "id-" + name, name});
  }
  return result;
}

void expect_fits(const Budget& budget, const std::string& where) {
  for (const EndpointBudget& endpoint : {budget.lane, budget.worker, budget.messages}) {
    EXPECT_LE(endpoint.receives(), transport::kMaxOperations - transport::kMaxSends) << where;
    EXPECT_GT(endpoint.data, 0u) << where;
  }
  EXPECT_GE(budget.announce_credits, 2u) << where;
  EXPECT_GE(budget.uncredited, 2u) << where;
  EXPECT_GE(budget.eager_window, 1u) << where;
  for (const std::uint32_t window : budget.lane_windows) EXPECT_GE(window, 1u) << where;
}

TEST(Budget, SmallJobsGetAllThatTheyAskFor) {
  BudgetInput input = input_of(8, 8);
  Budget budget = make_budget(input);
  EXPECT_EQ(budget.announce_credits, 32u);
  EXPECT_EQ(budget.eager_window, 16u);
  EXPECT_EQ(budget.uncredited, 24u);
  EXPECT_EQ(budget.control_messages(), 56u);
  EXPECT_EQ(budget.lane_windows, input.lane_windows);
  EXPECT_EQ(budget.worker.control, 64u + 8 * (6 + 8));
  input.failover = true;
  budget = make_budget(input);
  EXPECT_EQ(budget.control_messages(), 56u + 6 + 8);
}

// Receives have room for an announce and its data. With one for each lane that might be lost, a lane of 16 workers and
// 256 servers took 330 MB.
TEST(Budget, ManyServersTakeNoMoreMemoryEach) {
  BudgetInput input = input_of(16, 16);
  input.eager_bytes = 64 << 10;
  input.failover = true;
  const std::uint64_t few = make_budget(input).lane_bytes.front();
  input.lane_windows.assign(256, 6);
  EXPECT_LE(make_budget(input).lane_bytes.front(), few);
}

TEST(Budget, BytesAndDescriptorsGrowWithWhoIsThere) {
  const Budget small = make_budget(input_of(8, 4));
  const Budget large = make_budget(input_of(16, 4));
  EXPECT_EQ(small.worker_descriptors, 2u * (4 + 8));
  EXPECT_EQ(small.server_descriptors, 2u * 8);
  ASSERT_EQ(small.lane_bytes.size(), 4u);
  EXPECT_EQ(large.lane_bytes[0], 2 * small.lane_bytes[0]);
  const Budget local = make_budget(input_of(8, 0));
  EXPECT_EQ(local.worker_descriptors, 0u);
  EXPECT_EQ(local.messages.total(), 0u);
}

TEST(Budget, EveryJobEitherFitsOrIsRefused) {
  std::uint32_t refused = 0;
  for (const std::uint32_t workers : {1u, 2u, 64u, 105u, 283u, 500u, 1093u, 2000u, 3000u, 4000u, 4608u, 20'000u}) {
    for (const std::uint32_t lanes : {1u, 8u, 64u, 256u, 1000u, 2000u, 6000u}) {
      for (const bool failover : {false, true}) {
        for (const bool checksum : {false, true}) {
          BudgetInput input = input_of(workers, lanes);
          input.failover = failover;
          input.checksum = checksum;
          const std::string where = std::to_string(workers) + " x " + std::to_string(lanes);
          if (const std::string why = refusal(input); !why.empty()) {
            EXPECT_NE(why.find(counted(workers, "worker") + " on "), std::string::npos) << why;
            EXPECT_TRUE(workers > 3000 || lanes > 1000) << why;
            ++refused;
          } else {
            expect_fits(make_budget(input), where);
          }
        }
      }
    }
  }
  EXPECT_GT(refused, 0u);
}

TEST(Budget, ARefusalNamesTheNumbersAndTheRemedy) {
  BudgetInput input = input_of(20'000, 64);
  std::string why = refusal(input);
  for (const char* part : {"20000 workers", "64 server lanes", "Start at most about"}) {
    EXPECT_NE(why.find(part), std::string::npos) << why;
  }
  input.failover = true;
  why = refusal(input);
  EXPECT_NE(why.find("HERRING_FAILOVER=off"), std::string::npos) << why;
  // What the text recommends is true.
  const std::size_t at = why.find("about ") + 6;
  input.workers = static_cast<std::uint32_t>(std::stoul(why.substr(at)));
  EXPECT_EQ(refusal(input), "");
  input.failover = false;
  input.workers = 8;
  input.lane_windows.assign(9000, 6);
  input.lanes_of_server = 9;
  why = refusal(input);
  EXPECT_NE(why.find("HERRING_LANES (now 9)"), std::string::npos) << why;
  const std::size_t lanes = why.find("at most ") + 8;
  input.lane_windows.assign(std::stoul(why.substr(lanes)), 6);
  EXPECT_EQ(refusal(input), "");
}

TEST(Budget, ThePlacementIsWithinIt) {
  struct Job {
    std::uint32_t workers, per_host, servers;
  };
  for (const Job job : {Job{1093, 1, 0}, Job{105, 1, 256}, Job{283, 1, 64}, Job{2048, 8, 16}}) {
    Config config;
    config.servers = job.servers;
    const Placement placement = make_placement(config, members(Role::kWorker, job.workers, job.per_host, "w"),
                                               members(Role::kServer, job.servers, 1, "s"));
    const std::string where = std::to_string(job.workers) + " x " + std::to_string(job.servers);
    expect_fits(placement.budget, where);
    std::uint32_t most = 0;
    for (const LanePlace& lane : placement.lanes) {
      EXPECT_LE(lane.window, lane.max_window);
      most = std::max(most, lane.max_window);
    }
    EXPECT_EQ(placement.budget.lane.control, std::uint64_t{job.workers} * placement.budget.control_messages());
    EXPECT_EQ(placement.budget.lane.data, std::uint64_t{job.workers} * most) << where;
  }
  EXPECT_THROW(static_cast<void>(make_placement(Config{}, members(Role::kWorker, 6000, 1, "w"), {})), Error);
}

// Receives for announces have room for the largest one. Without this a lane of 2,048 workers would keep gigabytes.
TEST(Budget, ManyWorkersSendSmallerShardsInsideTheirAnnounces) {
  std::uint32_t before = 64 << 10;
  for (std::uint32_t workers = 1; workers <= 2048; ++workers) {
    BudgetInput input = input_of(workers, 2);
    input.eager_bytes = 64 << 10;
    const Budget budget = make_budget(input);
    EXPECT_LE(budget.eager_bytes, before) << workers;
    EXPECT_GE(budget.eager_bytes, 16u << 10) << workers;
    before = budget.eager_bytes;
    const std::uint64_t receives = std::uint64_t{workers} * budget.control_messages() * budget.body_bytes;
    if (budget.eager_bytes > 16u << 10) {
      EXPECT_LE(receives, 80u << 20) << workers;
    }
    input.eager_bytes = 4096;
    EXPECT_EQ(make_budget(input).eager_bytes, 4096u) << "what was set is not exceeded";
  }
  EXPECT_EQ(before, 16u << 10);
}

TEST(Budget, MessagesBetweenWorkersFitWhateverTheEagerSize) {
  for (const std::uint32_t eager : {0u, 1u << 10, 16u << 10, 64u << 10}) {
    for (std::uint32_t workers = 1; workers <= 4600; workers += 37) {
      Config config;
      config.eager_bytes = eager;
      const std::uint64_t receives = std::uint64_t{workers} * (network_link(config, workers).credits + 2);
      EXPECT_LE(receives, transport::kMaxOperations - transport::kMaxSends - 1024) << workers << " workers, " << eager;
    }
  }
}

}  // namespace
}  // namespace herring::runtime
