// One hop: the lane in each worker's process sums for that worker alone.
#include <gtest/gtest.h>

#include <vector>

#include "server/engine_bench.h"

namespace herring::server {
namespace {

struct OneHopBench : Bench {
  explicit OneHopBench(std::uint32_t workers_count = 3, std::uint32_t near = 1) : Bench(workers_count) {
    config.near_worker = PeerId{near};
    config.announce_credits = 8;
    build();
  }
  std::uint64_t say(std::uint32_t sender, const wire::Announce& body, std::span<const std::byte> eager,
                    std::uint16_t flags = wire::kFlagOneHop) {
    wire::Header head = header(sender, wire::MessageType::kAnnounce);
    head.tag = next_tag;
    next_tag += 100;
    head.offset = next_sequence[sender]++;
    head.count = 1;
    head.flags = static_cast<std::uint16_t>(flags | (eager.empty() ? 0 : wire::kFlagEager));
    const auto encoded = wire::encode(body);
    std::vector<std::byte> bytes(encoded.begin(), encoded.end());
    bytes.insert(bytes.end(), eager.begin(), eager.end());
    control(head, bytes);
    return head.tag;
  }
  std::uint64_t say(std::uint32_t sender) { return say(sender, announce(sender, 1), data); }
  /// Announces that the lane says to be over, by worker.
  std::vector<std::uint64_t> told() const {
    std::vector<std::uint64_t> over(workers);
    for (const SendAction& credit : sends(wire::MessageType::kCredit)) over[credit.to.value] += credit.header.offset;
    return over;
  }
  void tick(Duration later) {
    now += later;
    engine->on_tick(now);
    collect();
  }

  std::vector<std::byte> data = std::vector<std::byte>(kChunk);
};

TEST(ServerOneHop, OnlyTheWorkerInThisProcessGetsTheResult) {
  OneHopBench bench;
  bench.say(0);
  bench.say(1);
  EXPECT_TRUE(bench.sends(wire::MessageType::kResult).empty());
  bench.say(2);
  const std::vector<ReduceAction> sums = bench.all<ReduceAction>();
  ASSERT_EQ(sums.size(), 1u);
  EXPECT_EQ(sums[0].inputs.size(), 3u);
  const std::vector<SendAction> results = bench.sends(wire::MessageType::kResult);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].to, PeerId{1});
  EXPECT_EQ(results[0].payload.size(), kChunk);
  EXPECT_TRUE(bench.sends(wire::MessageType::kGrant).empty());
  EXPECT_EQ(bench.engine->stats().one_hop, 1u);
}

TEST(ServerOneHop, SmallDataIsAskedForChunkByChunk) {
  for (const bool is_one_hop : {true, false}) {
    OneHopBench bench;
    bench.config.max_eager_bytes = 4 * kChunk;
    bench.config.max_run = 4;
    bench.config.run_time = Duration::max();
    bench.config.window = 8;
    bench.build();
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      bench.say(rank, bench.announce(rank, 4), {}, is_one_hop ? wire::kFlagOneHop : std::uint16_t{0});
    }
    const std::vector<SendAction> grants = bench.sends(wire::MessageType::kGrant);
    ASSERT_FALSE(grants.empty());
    for (const SendAction& grant : grants) {
      EXPECT_EQ(grant.body.empty(), is_one_hop) << "chunks that go in one message are said in the body";
    }
  }
}

TEST(ServerOneHop, TheOthersAreToldThatItIsOverABitLaterAndTogether) {
  OneHopBench bench;
  for (std::uint64_t op = 1; op <= 3; ++op) {
    bench.op = op;
    for (std::uint32_t worker = 0; worker < 3; ++worker) bench.say(worker);
    bench.sent_all();
  }
  EXPECT_EQ(bench.told(), (std::vector<std::uint64_t>{0, 0, 0}));
  ASSERT_LT(bench.engine->next_deadline(), bench.now + 1s);
  bench.tick(bench.engine->next_deadline() - bench.now);
  EXPECT_EQ(bench.told(), (std::vector<std::uint64_t>{3, 0, 3})) << "the worker in this process has the results";
  bench.sent_all();
  bench.tick(1s);
  EXPECT_EQ(bench.told(), (std::vector<std::uint64_t>{0, 0, 0}));
  EXPECT_TRUE(bench.engine->is_idle());
}

TEST(ServerOneHop, AnAnnounceThatIsRefusedOrComesTooLateIsOverToo) {
  OneHopBench bench;
  bench.say(0);
  wire::Announce other = bench.announce(1, 1);
  other.descriptor.reduce = ReduceOp::kMax;
  bench.say(1, other, bench.data);
  bench.tick(5s);  // The mismatch is said.
  ASSERT_EQ(bench.sends(wire::MessageType::kError).size(), 2u);
  bench.sent_all();
  bench.say(2);  // It hears of it.
  ASSERT_EQ(bench.sends(wire::MessageType::kError).size(), 1u);
  bench.sent_all();
  wire::Announce large = bench.announce(2, 3);
  large.descriptor.collective = Collective::kBroadcast;
  large.pusher = 2;
  bench.say(2, large, {});
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 1u) << "a large one that is not summed goes in two hops";
  bench.sent_all();
  bench.tick(1s);
  EXPECT_EQ(bench.told(), (std::vector<std::uint64_t>{1, 0, 2}));
}

TEST(ServerOneHop, ALaneThatWaitsForItsOwnWorkerIsQuiet) {
  for (const std::uint16_t flags : {wire::kFlagOneHop, std::uint16_t{0}}) {
    OneHopBench bench;
    EXPECT_TRUE(bench.engine->is_quiet());
    bench.say(0, bench.announce(0, 1), bench.data, flags);
    bench.say(2, bench.announce(2, 1), bench.data, flags);
    EXPECT_TRUE(bench.engine->is_quiet());
    EXPECT_FALSE(bench.engine->is_idle());
    bench.say(1, bench.announce(1, 1), bench.data, flags);
    EXPECT_FALSE(bench.engine->is_quiet()) << "results are on their way";
    bench.sent_all();
    EXPECT_TRUE(bench.engine->is_quiet());
    bench.op = 2;
    bench.say(1, bench.announce(1, 1), bench.data, flags);
    EXPECT_FALSE(bench.engine->is_quiet()) << "it waits for others";
  }
  OneHopBench group;
  group.group = 5;
  group.say(0, group.announce(0, 1), group.data, 0);
  EXPECT_FALSE(group.engine->is_quiet()) << "its own worker may not be in that group";
}

TEST(ServerOneHop, WhoHasSentItsDataIsNotNeededAnyMore) {
  OneHopBench bench;
  bench.group = 5;
  bench.say(0);
  bench.engine->on_peer_left(bench.now, PeerId{0}, "rank 0 has left");
  bench.engine->on_peer_lost(bench.now, PeerId{0}, "rank 0 is lost");
  bench.collect();
  EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
  bench.say(1);
  bench.say(2);
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 1u);
}

TEST(ServerOneHop, WhoHasAnnouncedWithoutItsDataIsNeeded) {
  OneHopBench bench;
  bench.say(0, bench.announce(0, 1), {});
  bench.engine->on_peer_lost(bench.now, PeerId{0}, "rank 0 is lost");
  bench.collect();
  bench.say(1);
  const std::vector<SendAction> errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(Bench::text(errors[0]), "rank 0 is lost");
}

TEST(ServerOneHop, TheSameNameAgainWaitsForTheFirst) {
  OneHopBench bench;
  bench.say(0);
  bench.say(0);  // It has the result of the first one from its own lane.
  EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
  bench.say(1);
  bench.say(2);
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 1u);
  bench.sent_all();
  bench.say(1);
  bench.say(2);
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 1u);
  EXPECT_EQ(bench.engine->stats().one_hop, 2u);
}

TEST(ServerOneHop, ALaneOutsideOfWorkersRefusesIt) {
  OneHopBench bench;
  bench.config.near_worker.reset();
  bench.build();
  bench.say(0);
  const std::vector<SendAction> errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_NE(Bench::text(errors[0]).find("in one hop"), std::string::npos);
}

TEST(ServerOneHop, OneWarningOfAStallComesFromAllLanes) {
  for (std::uint32_t near = 0; near < 3; ++near) {
    OneHopBench bench(3, near);
    bench.config.stall_warning = 1s;
    bench.build();
    bench.say(1);
    bench.say(2);
    bench.tick(2s);
    EXPECT_EQ(bench.engine->take_warning().empty(), near != 1) << "of the lane of the first who has called it";
  }
}

}  // namespace
}  // namespace herring::server
