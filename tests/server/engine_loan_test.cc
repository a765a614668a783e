// What a worker in the lane's own process lends instead of sending it.
#include <gtest/gtest.h>

#include "engine_bench.h"

namespace herring::server {
namespace {

/// Counts who uses it and says when it is given back.
class TestLoan final : public Loan {
 public:
  TestLoan(std::span<std::byte> memory, bool& is_back) : memory_(memory), is_back_(is_back) {}
  ~TestLoan() override { is_back_ = true; }
  std::span<std::byte> memory() const override { return memory_; }
  bool begin() override { return true; }
  void end() override {}

 private:
  std::span<std::byte> memory_;
  bool& is_back_;
};

struct LoanBench : Bench {
  explicit LoanBench(std::uint32_t count, std::uint32_t near = 0) : Bench(count) {
    config.near_worker = PeerId{near};
    config.min_loan_bytes = kChunk;
    build();
  }
  void lend(std::uint32_t sender, std::uint64_t tag, std::uint32_t chunk) {
    wire::Header head = header(sender, wire::MessageType::kPush);
    head.tag = tag;
    head.chunk = chunk;
    head.offset = chunk * kChunk;
    head.payload_bytes = kChunk;
    is_back = false;
    engine->on_received(now, posted.at(tag).token, Status::ok(), head, std::make_shared<TestLoan>(lent, is_back));
    collect();
  }
  std::uint64_t tag_of_grant(std::uint32_t worker) const { return grants.at(worker).header.tag; }
  void announce_all(std::uint32_t chunks = 1) {
    for (std::uint32_t worker = 0; worker < workers; ++worker) send(worker, announce(worker, chunks));
    for (const SendAction& grant : sends(wire::MessageType::kGrant)) grants[grant.to.value] = grant;
  }

  std::vector<std::byte> lent = std::vector<std::byte>(kChunk);
  bool is_back = false;
  std::map<std::uint32_t, SendAction> grants;
};

TEST(ServerLoans, WhatIsLentTakesNoSlotAndTheSumGoesThereToo) {
  for (std::uint32_t near = 0; near < 2; ++near) {
    LoanBench bench(2, near);
    bench.announce_all();
    EXPECT_EQ(bench.engine->stats().slots_in_use, 1u);
    EXPECT_TRUE(bench.posted.at(bench.tag_of_grant(near)).is_loan);
    EXPECT_TRUE(bench.posted.at(bench.tag_of_grant(near)).payload.empty());
    EXPECT_FALSE(bench.posted.at(bench.tag_of_grant(1 - near)).is_loan);
    bench.lend(near, bench.tag_of_grant(near), 0);
    EXPECT_FALSE(bench.is_back);
    bench.push(1 - near, bench.tag_of_grant(1 - near), 0);

    const std::vector<ReduceAction> sums = bench.all<ReduceAction>();
    ASSERT_EQ(sums.size(), 1u);
    EXPECT_EQ(sums[0].inputs[near].data(), bench.lent.data()) << "in its contributor's place: the order of the sum";
    ASSERT_EQ(sums[0].outputs.size(), 2u);
    EXPECT_EQ(sums[0].outputs[0].data(), sums[0].inputs[1 - near].data()) << "what is sent lies in a slot";
    EXPECT_EQ(sums[0].outputs[1].data(), bench.lent.data());
    EXPECT_NE(sums[0].loan, nullptr);

    const std::vector<SendAction> results = bench.sends(wire::MessageType::kResult);
    ASSERT_EQ(results.size(), 2u);
    for (const SendAction& result : results) {
      const bool is_near = result.to == PeerId{near};
      EXPECT_EQ(result.header.flags, is_near ? wire::kFlagInPlace : 0);
      EXPECT_EQ(result.payload.size(), is_near ? 0u : kChunk);
    }
    EXPECT_FALSE(bench.is_back) << "the sum is not carried out yet";
    bench.actions.clear();
  }
}

TEST(ServerLoans, ItIsGivenBackWhenTheSumIsDone) {
  LoanBench bench(2);
  bench.announce_all();
  bench.lend(0, bench.tag_of_grant(0), 0);
  bench.push(1, bench.tag_of_grant(1), 0);
  bench.actions.clear();  // The engine keeps nothing.
  EXPECT_TRUE(bench.is_back);
}

TEST(ServerLoans, AnOperationThatFailsGivesItBackAtOnce) {
  LoanBench bench(2);
  bench.announce_all();
  bench.lend(0, bench.tag_of_grant(0), 0);
  bench.engine->on_peer_lost(bench.now, PeerId{1}, "rank 1 died");
  EXPECT_TRUE(bench.is_back);
}

TEST(ServerLoans, NothingIsLentWhereTheMemoryWouldBeNeededLonger) {
  const auto is_lent = [](LoanBench& bench, const wire::Announce& first) {
    bench.build();
    wire::Announce second = first;
    second.contributor = second.first_rank = 1;
    bench.send(0, first);
    bench.send(1, second);
    return std::ranges::any_of(bench.posted, [](const auto& entry) { return entry.second.is_loan; });
  };
  LoanBench plain(2), small(2), broadcast(2), finite(2), failover(2), alone(1);
  EXPECT_TRUE(is_lent(plain, plain.announce(0, 1)));
  small.config.min_loan_bytes = kChunk + 1;
  EXPECT_FALSE(is_lent(small, small.announce(0, 1)));
  wire::Announce from_one = broadcast.announce(0, 1);
  from_one.descriptor.collective = Collective::kBroadcast;
  EXPECT_FALSE(is_lent(broadcast, from_one)) << "its data is what is sent to all";
  finite.config.check_finite = true;
  EXPECT_FALSE(is_lent(finite, finite.announce(0, 1)));
  failover.config.failover = true;
  EXPECT_FALSE(is_lent(failover, failover.announce(0, 1)));
  alone.announce_all();
  EXPECT_FALSE(alone.posted.begin()->second.is_loan) << "there is no other slot to send from";
}

TEST(ServerLoans, DataThatIsNotLentMeetsNoLoan) {
  LoanBench bench(2);
  bench.announce_all();
  bench.push(0, bench.tag_of_grant(0), 0);
  EXPECT_EQ(bench.engine->stats().messages_rejected, 1u);
  bench.lend(0, bench.tag_of_grant(0), 0);
  bench.push(1, bench.tag_of_grant(1), 0);
  EXPECT_EQ(bench.all<ReduceAction>().size(), 1u) << "the receive was posted again";
}

/// Nobody else gets the sum. Small data may be on its way to other lanes, so it is not lent.
TEST(ServerLoans, InOneHopTheSumGoesToWhatIsLentAlone) {
  for (const bool is_large : {true, false}) {
    LoanBench bench(2);
    if (!is_large) bench.config.max_eager_bytes = 3 * kChunk;
    bench.build();
    for (std::uint32_t worker = 0; worker < 2; ++worker) {
      wire::Header head = bench.header(worker, wire::MessageType::kAnnounce);
      head.tag = 1000 + 100 * worker;
      head.count = 1;
      head.flags = wire::kFlagOneHop;
      bench.control(head, wire::encode(bench.announce(worker, 3)));
    }
    std::map<std::uint32_t, std::uint64_t> tags;
    for (const SendAction& grant : bench.sends(wire::MessageType::kGrant)) tags[grant.to.value] = grant.header.tag;
    ASSERT_EQ(tags.size(), 2u);
    EXPECT_EQ(bench.posted.at(tags[0]).is_loan, is_large);
    if (!is_large) continue;
    bench.lend(0, tags[0], 0);
    bench.push(1, tags[1], 0);
    const std::vector<ReduceAction> sums = bench.all<ReduceAction>();
    ASSERT_EQ(sums.size(), 1u);
    ASSERT_EQ(sums[0].outputs.size(), 1u);
    EXPECT_EQ(sums[0].outputs[0].data(), bench.lent.data());
    const std::vector<SendAction> results = bench.sends(wire::MessageType::kResult);
    ASSERT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].to, PeerId{0});
    EXPECT_EQ(results[0].header.flags, wire::kFlagInPlace);
    EXPECT_TRUE(results[0].payload.empty());
    bench.sent_all();
    EXPECT_EQ(bench.engine->stats().slots_in_use, 2u) << "of the two chunks that have yet to come";
  }
}

}  // namespace
}  // namespace herring::server
