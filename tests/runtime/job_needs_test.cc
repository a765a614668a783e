// What a job would take, for members that do not exist: the placement and the budget of a real start.
#include "runtime/job_needs.h"

#include <gtest/gtest.h>

#include <string>

#include "core/descriptors.h"
#include "core/status.h"
#include "transport/limits.h"

namespace herring::runtime {
namespace {

std::string refusal(const JobShape& shape) {
  try {
    static_cast<void>(job_needs(Config{}, shape));
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(JobNeeds, WorkersWithoutServerProcessesHaveLanesInThem) {
  const JobNeeds needs = job_needs(Config{}, {8, 8, 0, 0});
  EXPECT_EQ(needs.placement.hosts, 8u);
  EXPECT_EQ(needs.placement.lanes.size(), 8u);
  EXPECT_EQ(needs.worker.lanes, 1u);
  // The hub; messages with 7 workers; their 7 lanes; and 7 workers come to the lane here.
  EXPECT_EQ(needs.worker.connections, 1u + 7 + 7 + 7);
  EXPECT_EQ(needs.server.connections, 0u);
  EXPECT_GT(needs.worker.bytes, needs.worker.registered_bytes);
  EXPECT_GE(needs.worker.registered_bytes, needs.placement.budget.lane_bytes[0]);
  EXPECT_EQ(needs.hub_connections, 8u);
}

TEST(JobNeeds, ServersOfTheirOwnHaveTheLanes) {
  const JobNeeds needs = job_needs(Config{}, {16, 8, 8, 8});
  EXPECT_EQ(needs.placement.lanes.size(), 8u) << "as many hosts serve as work: no lane in a worker";
  EXPECT_EQ(needs.worker.lanes, 0u);
  EXPECT_EQ(needs.worker.connections, 1u + 15 + 8);
  EXPECT_EQ(needs.server.lanes, 1u);
  EXPECT_EQ(needs.server.connections, 1u + 16);
  EXPECT_EQ(needs.server.bytes, needs.placement.budget.lane_bytes[0]);
  EXPECT_EQ(needs.hub_connections, 24u);
  EXPECT_TRUE(needs.placement.failover);
}

TEST(JobNeeds, FewServersLeaveTheWorkersAShare) {
  const JobNeeds needs = job_needs(Config{}, {8, 8, 2, 2});
  EXPECT_EQ(needs.placement.lanes.size(), 10u);
  EXPECT_EQ(needs.worker.lanes, 1u);
  EXPECT_EQ(needs.server.lanes, 1u);
}

TEST(JobNeeds, ServersOnTheWorkersHostsAreSpreadOverThem) {
  const JobNeeds needs = job_needs(Config{}, {8, 4, 4, 0});
  EXPECT_EQ(needs.placement.hosts, 4u);
  EXPECT_EQ(needs.placement.lanes.size(), 4u);
  EXPECT_DOUBLE_EQ(needs.placement.lanes.front().weight, needs.placement.lanes.back().weight);
}

TEST(JobNeeds, OneHostHasNoNetwork) {
  const JobNeeds needs = job_needs(Config{}, {4, 1, 0, 0});
  EXPECT_TRUE(needs.placement.lanes.empty());
  EXPECT_EQ(needs.worker.connections, 1u);
  EXPECT_EQ(needs.worker.registered_bytes, 0u);
  EXPECT_EQ(needs.worker.descriptors, kOtherDescriptors);
}

TEST(JobNeeds, AsManyAsTwoThousandWorkersAnd256ServersFit) {
  const JobNeeds needs = job_needs(Config{}, {2048, 256, 256, 256});
  EXPECT_EQ(needs.placement.lanes.size(), 256u);
  EXPECT_TRUE(needs.placement.failover);
  const Budget& budget = needs.placement.budget;
  EXPECT_LE(budget.lane.total(), transport::kMaxOperations);
  EXPECT_LE(budget.worker.total(), transport::kMaxOperations);
  EXPECT_LE(budget.messages.total(), transport::kMaxOperations);
  EXPECT_LE(needs.server.bytes, 1u << 30);
  EXPECT_LE(needs.worker.bytes, 256u << 20);
}

TEST(JobNeeds, SettingsCount) {
  Config config;
  config.failover = Switch::kOff;
  const JobShape shape{64, 64, 8, 8};
  const JobNeeds without = job_needs(config, shape);
  const JobNeeds with = job_needs(Config{}, shape);
  EXPECT_GT(with.worker.registered_bytes, without.worker.registered_bytes) << "slots for results";
  config.checksum = Toggle::kOn;
  const JobNeeds checked = job_needs(config, shape);
  EXPECT_GT(checked.worker.bytes, without.worker.bytes);
  EXPECT_GT(checked.server.bytes, without.server.bytes);
}

TEST(JobNeeds, JobsThatCannotBeAreRefused) {
  EXPECT_NE(refusal({0, 1, 0, 0}).find("at least one worker"), std::string::npos);
  EXPECT_NE(refusal({2, 4, 0, 0}).find("use at most 2 hosts"), std::string::npos);
  EXPECT_NE(refusal({4, 4, 1, 2}).find("1 server process on 2 hosts"), std::string::npos);
  EXPECT_NE(refusal({6000, 6000, 0, 0}).find("this job is too large: 6000 workers on 6000 hosts"), std::string::npos);
}

}  // namespace
}  // namespace herring::runtime
