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
    config.max_eager_bytes = kChunk;
    copies = true;
    build();
    std::iota(reinterpret_cast<unsigned char*>(memory.data()), reinterpret_cast<unsigned char*>(memory.data()) + kChunk,
              static_cast<unsigned char>(1));
  }
  Operation small(std::uint64_t op) {
    Operation small = operation(op, memory);
    small.contributor_count = static_cast<std::uint32_t>(config.lanes.size());
    small.one_hop_bytes = limit;
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

  void tick(Duration later) {
    now += later;
    engine->on_tick(now);
    collect();
  }

  std::uint64_t limit = kChunk;  // Operation::one_hop_bytes
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

/// Two hosts, and data that does not fit into the announce.
struct LargeOneHopBench : OneHopBench {
  explicit LargeOneHopBench() : OneHopBench(2) {
    limit = 4 * kChunk;
    memory.resize(3 * kChunk);
    std::iota(reinterpret_cast<unsigned char*>(memory.data()), reinterpret_cast<unsigned char*>(memory.data() + 384),
              static_cast<unsigned char>(1));
    submit(small(1));
    const std::vector<SendAction> announces = sends(wire::MessageType::kAnnounce);
    near = announce_to(1, announces);
    far = announce_to(0, announces);
    sent(announces);
  }
  std::vector<SendAction> pushes() const { return sends(wire::MessageType::kPush); }
  std::span<const std::byte> chunk(std::size_t first, std::size_t count = 1) const {
    return std::span(memory).subspan(first * kChunk, count * kChunk);
  }
  bool is_from_memory(const SendAction& push, std::size_t first, std::size_t count = 1) const {
    return push.payload.data() == chunk(first, count).data() && push.payload.size() == count * kChunk;
  }

  SendAction near;
  SendAction far;
};

TEST(WorkerOneHop, TheLaneInThisProcessGetsWhatHasLeftForTheOther) {
  LargeOneHopBench bench;
  for (const SendAction& announce : {bench.near, bench.far}) {
    EXPECT_EQ(announce.header.flags, wire::kFlagOneHop);
    EXPECT_EQ(wire::decode_announce(announce.body)->shard_bytes, 3u * kChunk) << "all of it";
  }
  bench.grant(bench.near, 0, 3, 100);
  EXPECT_TRUE(bench.pushes().empty());
  bench.grant(bench.far, 0, 2, 200, 2);
  const std::vector<SendAction> first = bench.pushes();
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first[0].to, bench.far.to);
  EXPECT_TRUE(bench.is_from_memory(first[0], 0, 2));
  bench.sent(first);
  std::vector<SendAction> lent = bench.pushes();
  ASSERT_EQ(lent.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(lent[i].to, bench.near.to);
    EXPECT_TRUE(bench.is_from_memory(lent[i], i));
  }
  EXPECT_TRUE(bench.posted.empty()) << "the result lands on what is being pushed";
  bench.sent(lent);
  EXPECT_TRUE(bench.result(bench.near, 0, true, wire::kFlagInPlace));
  EXPECT_TRUE(bench.result(bench.near, 1));
  EXPECT_FALSE(bench.result(bench.near, 2));
  bench.grant(bench.far, 2, 1, 202);
  bench.sent(bench.pushes());
  lent = bench.pushes();
  ASSERT_EQ(lent.size(), 1u);
  bench.sent(lent);
  EXPECT_TRUE(bench.completed.empty());
  EXPECT_TRUE(bench.result(bench.near, 2));
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_TRUE(bench.completed[0].status.is_ok());
  EXPECT_EQ(bench.engine->stats().copied, 0u);
  EXPECT_TRUE(bench.engine->is_needed()) << "it may not have arrived yet";
  bench.over(bench.far.to, 1);
  EXPECT_TRUE(bench.engine->is_idle());
}

/// Each of two lanes may have given all its room to what the other one has no room for.
TEST(WorkerOneHop, WhatTheOtherLaneDoesNotAskForInTimeIsCopied) {
  LargeOneHopBench bench;
  const std::vector<std::byte> before = bench.memory;
  bench.grant(bench.near, 0, 3, 100);
  bench.grant(bench.far, 0, 1, 200);
  const std::vector<SendAction> on_way = bench.pushes();
  ASSERT_EQ(on_way.size(), 1u);
  ASSERT_LT(bench.engine->next_deadline(), bench.now + 1s);
  bench.tick(bench.engine->next_deadline() - bench.now);
  EXPECT_EQ(bench.count<CopyAction>(), 2u) << "chunk 0 is on its way already";
  const std::vector<SendAction> lent = bench.pushes();
  ASSERT_EQ(lent.size(), 2u);
  EXPECT_TRUE(bench.is_from_memory(lent[0], 1));
  EXPECT_TRUE(bench.is_from_memory(lent[1], 2));
  bench.sent(lent);
  ASSERT_TRUE(bench.result(bench.near, 1));
  ASSERT_TRUE(bench.result(bench.near, 2));
  std::ranges::fill(std::span(bench.memory).subspan(kChunk), std::byte{0xEE});
  EXPECT_GT(bench.engine->next_deadline(), bench.now) << "chunk 0 is waited for";
  bench.sent(on_way);
  bench.sent(bench.pushes());
  ASSERT_TRUE(bench.result(bench.near, 0));
  EXPECT_EQ(bench.engine->stats().copied, 2u);
  EXPECT_TRUE(bench.completed.empty()) << "the other lane has not asked yet";
  bench.tick(bench.engine->next_deadline() - bench.now);
  EXPECT_GE(bench.engine->next_deadline(), Instant{} + 15s) << "nothing more to copy";
  bench.grant(bench.far, 1, 2, 201, 2);
  const std::vector<SendAction> late = bench.pushes();
  ASSERT_EQ(late.size(), 1u);
  EXPECT_TRUE(std::ranges::equal(late[0].payload, std::span(before).subspan(kChunk)));
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_TRUE(bench.completed[0].status.is_ok());
}

/// One process has the chunks of both rails: those with the same number are not the same.
TEST(WorkerOneHop, EachRailsChunksAreCopied) {
  OneHopBench bench(4, 1);
  bench.config.rails = 2;
  bench.config.lane_rails = {0, 0, 1, 1};
  bench.config.near_lanes = {bench.config.lanes[1], bench.config.lanes[3]};
  bench.build();
  bench.limit = 8 * kChunk;
  bench.memory.resize(6 * kChunk);
  for (std::size_t i = 0; i < bench.memory.size(); ++i) bench.memory[i] = static_cast<std::byte>(1 + i / 7);
  const std::vector<std::byte> before = bench.memory;
  Operation both = bench.small(1);
  both.contributor_count = 2;
  bench.submit(both);
  const std::vector<SendAction> announces = bench.sends(wire::MessageType::kAnnounce);
  ASSERT_EQ(announces.size(), 4u);
  bench.sent(announces);
  for (const std::uint32_t lane : {1u, 3u}) bench.grant(bench.announce_to(lane, announces), 0, 3, 100 + 10 * lane);
  bench.tick(bench.engine->next_deadline() - bench.now);
  EXPECT_EQ(bench.count<CopyAction>(), 6u);
  std::ranges::fill(bench.memory, std::byte{0xEE});  // The results have come.
  std::vector<std::byte> told;
  for (const std::uint32_t lane : {0u, 2u}) {
    bench.grant(bench.announce_to(lane, announces), 0, 3, 100 + 10 * lane, 3);
    const std::vector<SendAction> pushes = bench.sends(wire::MessageType::kPush);
    ASSERT_EQ(pushes.size(), 1u);
    told.insert(told.end(), pushes[0].payload.begin(), pushes[0].payload.end());
  }
  ASSERT_EQ(told.size(), before.size());
  const std::size_t half = before.size() / 2;
  const bool is_turned = !std::ranges::equal(std::span(told).first(half), std::span(before).first(half));
  if (is_turned) std::ranges::rotate(told, told.begin() + static_cast<std::ptrdiff_t>(half));  // The other rail first.
  EXPECT_TRUE(told == before);
}

TEST(WorkerOneHop, WhereNothingWaitsNothingIsCopied) {
  LargeOneHopBench bench;
  bench.grant(bench.near, 0, 1, 100);
  bench.grant(bench.far, 0, 1, 200);
  bench.sent(bench.pushes());
  EXPECT_EQ(bench.pushes().size(), 1u);
  bench.tick(1s);
  EXPECT_EQ(bench.count<CopyAction>(), 0u) << "neither lane has asked for the rest";
  EXPECT_EQ(bench.engine->stats().copied, 0u);
}

TEST(WorkerOneHop, WhatIsHeldBackWhenTheOperationFailsIsNeverPushed) {
  LargeOneHopBench bench;
  bench.grant(bench.near, 0, 3, 100);
  bench.grant(bench.far, 0, 1, 200);
  const std::vector<SendAction> on_way = bench.pushes();
  bench.error(bench.far, Code::kMismatch, "shapes", 0);
  const std::vector<SendAction> cancels = bench.sends(wire::MessageType::kCancel);
  ASSERT_EQ(cancels.size(), 2u);
  for (const SendAction& cancel : cancels) EXPECT_EQ(cancel.header.count, cancel.to == bench.far.to ? 1u : 0u);
  bench.sent(on_way);
  EXPECT_TRUE(bench.pushes().empty());
  bench.tick(1s);
  EXPECT_TRUE(bench.pushes().empty());
  bench.error(bench.near, Code::kMismatch, "too", 0);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.code(), Code::kMismatch);
}

TEST(WorkerOneHop, ATimeOutIsSaidWhereTheOtherLaneNeverAsks) {
  LargeOneHopBench bench;
  bench.grant(bench.near, 0, 3, 100);
  bench.tick(1s);
  bench.sent(bench.pushes());
  for (std::uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(bench.result(bench.near, i));
  bench.tick(13s);
  EXPECT_TRUE(bench.sends(wire::MessageType::kCancel).empty());
  bench.tick(2s);
  const std::vector<SendAction> cancels = bench.sends(wire::MessageType::kCancel);
  ASSERT_EQ(cancels.size(), 1u) << "the lane in this process has ended it";
  EXPECT_EQ(cancels[0].to, bench.far.to);
}

TEST(WorkerOneHop, OnEveryRailGoesAPartOfWhatIsLarge) {
  OneHopBench bench(4);
  bench.config.rails = 2;
  bench.config.lane_rails = {0, 1, 0, 1};
  bench.config.near_lanes = {bench.config.lanes[1]};
  bench.limit = 8 * kChunk;
  bench.build();
  bench.memory.resize(6 * kChunk);
  Operation operation = bench.small(1);
  operation.contributor = operation.owner = 1;
  operation.contributor_count = operation.owner_count = 2;
  const auto ranges = owned_ranges(bench.config, operation);
  ASSERT_EQ(ranges.size(), 2u);
  ASSERT_EQ(ranges[0].size(), 1u);
  ASSERT_EQ(ranges[1].size(), 1u);
  EXPECT_EQ(ranges[0][0].bytes, 3u * kChunk);
  EXPECT_EQ(ranges[1][0].bytes, 3u * kChunk);
  EXPECT_NE(ranges[0][0].offset, ranges[1][0].offset);
  bench.submit(operation);
  const std::vector<SendAction> announces = bench.sends(wire::MessageType::kAnnounce);
  ASSERT_EQ(announces.size(), 2u) << "the lanes of its own rail";
  for (const SendAction& announce : announces) {
    EXPECT_TRUE(announce.to == bench.config.lanes[1] || announce.to == bench.config.lanes[3]);
    const auto body = wire::decode_announce(announce.body);
    EXPECT_EQ(body->shard_bytes, 3u * kChunk);
    EXPECT_EQ(body->shard_offset, ranges[1][0].offset);
  }
}

/// One owner of each host announces to the lanes where all meet. If these had nothing to send, they would never end it.
TEST(WorkerOneHop, WhatIsTooLittleForTwoRailsGoesWhereAllMeet) {
  for (std::uint64_t number = 1; number < 20; ++number) {
    std::vector<SendAction> announces;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      OneHopBench bench(4, rank);
      bench.config.rails = 2;
      bench.config.lane_rails = {0, 1, 0, 1};
      bench.config.max_eager_bytes = 0;
      bench.limit = 8 * kChunk;
      bench.build();
      bench.memory.resize(32);
      Operation operation = bench.small(number);
      operation.contributor = 0;
      operation.owner = rank;
      operation.contributor_count = operation.owner_count = 2;
      bench.submit(operation);
      for (const SendAction& announce : bench.sends(wire::MessageType::kAnnounce)) announces.push_back(announce);
    }
    ASSERT_EQ(announces.size(), 2u) << "operation " << number;
    for (const SendAction& announce : announces) EXPECT_EQ(wire::decode_announce(announce.body)->shard_bytes, 32u);
  }
}

/// It would never get a result.
TEST(WorkerOneHop, AnOwnerWithoutALaneIsRefusedWhatIsLarge) {
  LargeOneHopBench bench;
  Operation operation = bench.small(2);
  operation.owner = 1;
  operation.owner_count = 2;
  bench.submit(operation);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.code(), Code::kInvalidArgument);
}

TEST(WorkerOneHop, OnlyWhatIsNotTooLargeAndOfAllHostsGoesSo) {
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
  std::vector<std::byte> larger(4 * kChunk);
  Operation large = bench.operation(2, larger);
  large.contributor_count = 3;
  large.one_hop_bytes = kChunk;
  EXPECT_EQ(announced(large), 0u);
  Operation part = bench.small(3);
  part.descriptor.op_bytes += 1000;
  EXPECT_EQ(announced(part), 0u) << "one part of something larger";
  Operation group = bench.small(4);
  group.one_hop_bytes = 0;
  EXPECT_EQ(announced(group), 0u);
  Operation barrier = bench.operation(5, {});
  barrier.one_hop_bytes = kChunk;
  barrier.contributor_count = 3;
  barrier.descriptor.collective = Collective::kBarrier;
  EXPECT_EQ(announced(barrier), 3u);
  barrier.key.op = 6;
  barrier.owner_count = 2;
  EXPECT_EQ(announced(barrier), 0u) << "several processes of a host hear of it through one lane";
  large.key.op = 9;
  large.one_hop_bytes = 4 * kChunk;
  EXPECT_EQ(announced(large), 3u);
  large.key.op = 7;
  std::vector<std::byte> between(3 * kChunk);
  Operation medium = bench.operation(8, between);
  medium.contributor_count = 3;
  medium.one_hop_bytes = 4 * kChunk;
  EXPECT_EQ(announced(medium), 0u) << "its shards travel with the announces of two hops";
  large.descriptor.collective = Collective::kBroadcast;
  EXPECT_EQ(announced(large), 0u) << "nothing is summed: two hops move less";
}

}  // namespace
}  // namespace herring::worker
