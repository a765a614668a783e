// One hop: small data goes to the lane in each host, and the one in this process answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "worker/engine_bench.h"

namespace herring::worker {
namespace {

using namespace testing;

/// Worker `rank` of as many hosts as there are lanes; the lane with its number is in its process.
struct OneHopBench : Bench {
  explicit OneHopBench(std::uint32_t hosts = 3, std::uint32_t rank = 1) : Bench(hosts, rank) {
    config.near_lanes = {config.lanes[rank]};
    config.max_eager_bytes = config.one_hop_bytes = kChunk;
    copies = true;
    build();
    std::iota(reinterpret_cast<unsigned char*>(memory.data()), reinterpret_cast<unsigned char*>(memory.data()) + kChunk,
              static_cast<unsigned char>(1));
  }
  Operation small(std::uint64_t op) {
    Operation small = operation(op, memory);
    small.contributor_count = static_cast<std::uint32_t>(config.lanes.size());
    small.may_go_in_one_hop = true;
    return small;
  }
  SendAction announce_to(std::uint32_t lane, const std::vector<SendAction>& announces) const {
    return *std::ranges::find(announces, config.lanes[lane], &SendAction::to);
  }
  /// All of it is sent, and the lane in this process has answered.
  void finish(std::uint64_t op) {
    submit(small(op));
    const std::vector<SendAction> announces = sends(wire::MessageType::kAnnounce);
    sent(announces);
    result(announce_to(1, announces), 0);
    ASSERT_EQ(completed.size(), 1u);
  }
  void over(PeerId lane, std::uint64_t announces, std::uint32_t credits = 0) {
    wire::Header header;
    header.type = wire::MessageType::kCredit;
    header.job_id = kJob;
    header.sender = lane.value;
    header.count = credits;
    header.offset = announces;
    control(header);
  }

  std::vector<std::byte> memory = std::vector<std::byte>(kChunk);
};

TEST(WorkerOneHop, EveryLaneGetsAllOfItAndTheOneInThisProcessAnswers) {
  OneHopBench bench;
  bench.submit(bench.small(1));
  const std::vector<SendAction> announces = bench.sends(wire::MessageType::kAnnounce);
  ASSERT_EQ(announces.size(), 3u);
  for (const SendAction& announce : announces) {
    EXPECT_EQ(announce.header.flags, wire::kFlagEager | wire::kFlagOneHop);
    EXPECT_TRUE(std::ranges::equal(announce.payload, bench.memory)) << "all of it";
  }
  EXPECT_TRUE(bench.posted.empty()) << "the result lands on what is being sent";
  bench.sent({announces[0], announces[1]});
  EXPECT_TRUE(bench.posted.empty());
  bench.sent({announces[2]});
  ASSERT_EQ(bench.posted.size(), 1u);
  EXPECT_TRUE(bench.result(bench.announce_to(1, announces), 0));
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_TRUE(bench.completed[0].status.is_ok());
}

TEST(WorkerOneHop, ItIsNeededUntilTheOtherLanesSayThatItIsOver) {
  OneHopBench bench;
  bench.finish(1);
  EXPECT_FALSE(bench.engine->has_operations());
  EXPECT_TRUE(bench.engine->is_needed()) << "its data may be on its way to other lanes";
  bench.over(bench.config.lanes[0], 1);
  EXPECT_TRUE(bench.engine->is_needed());
  bench.over(bench.config.lanes[2], 1);
  EXPECT_FALSE(bench.engine->is_needed());
  EXPECT_TRUE(bench.engine->is_idle());
  bench.over(bench.config.lanes[2], 1);
  EXPECT_EQ(bench.engine->stats().messages_rejected, 1u) << "more than there were";
}

TEST(WorkerOneHop, ALostLaneNeedsNothing) {
  OneHopBench bench;
  bench.finish(1);
  bench.over(bench.config.lanes[0], 1);
  bench.engine->on_peer_lost(bench.now, bench.config.lanes[2], "lost");
  EXPECT_FALSE(bench.engine->is_needed());
}

TEST(WorkerOneHop, WhatALaneAsksForLaterComesFromACopy) {
  OneHopBench bench;
  bench.config.eager_window = 0;  // As where too many are unfinished there.
  bench.build();
  const std::vector<std::byte> before = bench.memory;
  bench.submit(bench.small(1));
  const std::vector<SendAction> announces = bench.sends(wire::MessageType::kAnnounce);
  for (const SendAction& announce : announces) {
    EXPECT_EQ(announce.header.flags, wire::kFlagOneHop);
    EXPECT_TRUE(announce.payload.empty());
  }
  bench.sent(announces);
  const SendAction near = bench.announce_to(1, announces);
  bench.take_push(near, 1);
  ASSERT_EQ(bench.posted.size(), 1u);
  ASSERT_TRUE(bench.result(near, 0));
  std::ranges::fill(bench.memory, std::byte{0xEE});  // The result has come.
  EXPECT_TRUE(bench.completed.empty()) << "other lanes have not asked yet";
  for (const std::uint32_t lane : {0u, 2u}) {
    bench.grant(bench.announce_to(lane, announces), 0, 1, 900);
    const std::vector<SendAction> pushes = bench.sends(wire::MessageType::kPush);
    ASSERT_EQ(pushes.size(), 1u);
    EXPECT_TRUE(std::ranges::equal(pushes[0].payload, before));
    EXPECT_TRUE(pushes[0].is_unregistered);
  }
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_TRUE(bench.completed[0].status.is_ok());
}

TEST(WorkerOneHop, AFailureIsToldToAllLanes) {
  OneHopBench bench;
  bench.submit(bench.small(1));
  const std::vector<SendAction> announces = bench.sends(wire::MessageType::kAnnounce);
  bench.sent(announces);
  bench.error(bench.announce_to(0, announces), Code::kMismatch, "shapes", 0);
  const std::vector<SendAction> cancels = bench.sends(wire::MessageType::kCancel);
  ASSERT_EQ(cancels.size(), 3u);
  for (const SendAction& cancel : cancels) {
    const bool is_near = cancel.to == bench.config.lanes[1];
    EXPECT_EQ(cancel.header.chunk, is_near ? 0u : 1u) << "only the lane in this process has something to answer";
  }
  bench.error(bench.announce_to(1, announces), Code::kMismatch, "too", 0);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.code(), Code::kMismatch);
}

TEST(WorkerOneHop, OnlyWhatIsSmallAndWholeAndOfAllHostsGoesSo) {
  OneHopBench bench;
  const auto announced = [&](const Operation& operation) {
    bench.submit(operation);
    std::size_t one_hop = 0;
    for (const SendAction& announce : bench.sends(wire::MessageType::kAnnounce)) {
      one_hop += (announce.header.flags & wire::kFlagOneHop) != 0 ? 1 : 0;
    }
    return one_hop;
  };
  EXPECT_EQ(announced(bench.small(1)), 3u);
  std::vector<std::byte> larger(kChunk + 1);
  Operation large = bench.operation(2, larger);
  large.may_go_in_one_hop = true;
  EXPECT_EQ(announced(large), 0u);
  Operation part = bench.small(3);
  part.descriptor.op_bytes += 1000;
  EXPECT_EQ(announced(part), 0u) << "one part of several";
  Operation group = bench.small(4);
  group.may_go_in_one_hop = false;
  EXPECT_EQ(announced(group), 0u);
  Operation barrier = bench.operation(5, {});
  barrier.may_go_in_one_hop = true;
  barrier.contributor_count = 3;
  barrier.descriptor.collective = Collective::kBarrier;
  EXPECT_EQ(announced(barrier), 3u);
  barrier.key.op = 6;
  barrier.owner_count = 2;
  EXPECT_EQ(announced(barrier), 0u) << "several processes of a host hear of it through one lane";
}

}  // namespace
}  // namespace herring::worker
