#include <limits>
#include <set>

#include "server/engine_bench.h"

namespace herring::server {
namespace {

TEST(ServerSums, ResultsWaitForTheEndOfTheSum) {
  Bench bench(2);
  bench.reduces_at_once = false;
  for (std::uint32_t worker = 0; worker < 2; ++worker) bench.send(worker, bench.announce(worker, 1));
  const std::vector<SendAction> grants = bench.sends(wire::MessageType::kGrant);
  bench.sent_all();
  for (std::uint32_t worker = 0; worker < 2; ++worker) bench.push(worker, grants[worker].header.tag, 0);
  const std::vector<ReduceAction> sums = bench.all<ReduceAction>();
  ASSERT_EQ(sums.size(), 1u);
  EXPECT_TRUE(bench.sends(wire::MessageType::kResult).empty());
  EXPECT_EQ(bench.engine->stats().slots_in_use, 2u) << "its inputs are in use";
  EXPECT_FALSE(bench.engine->is_idle());
  bench.engine->on_reduced(bench.now, sums[0].token, {});
  bench.collect();
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 2u);
  EXPECT_EQ(bench.engine->stats().slots_in_use, 1u);
  bench.sent_all();
  EXPECT_EQ(bench.engine->stats().slots_in_use, 0u);
  EXPECT_TRUE(bench.engine->is_idle());
}

TEST(ServerSums, AFailureWaitsForTheSumBeforeItsMemoryIsFree) {
  for (const bool is_eager : {false, true}) {
    Bench bench(2);
    bench.reduces_at_once = false;
    const std::vector<std::byte> data(kChunk);
    std::vector<std::uint64_t> tags;
    for (std::uint32_t worker = 0; worker < 2; ++worker) {
      tags.push_back(bench.send(worker, bench.announce(worker, 1), is_eager ? data : std::vector<std::byte>{}));
    }
    const std::vector<SendAction> grants = bench.sends(wire::MessageType::kGrant);
    const std::vector<ReduceAction> at_once = bench.all<ReduceAction>();
    if (!is_eager) bench.sent_all();
    for (std::uint32_t worker = 0; !is_eager && worker < 2; ++worker) {
      bench.push(worker, grants[worker].header.tag, 0);
    }
    const std::vector<ReduceAction> sums = is_eager ? at_once : bench.all<ReduceAction>();
    ASSERT_EQ(sums.size(), 1u);
    bench.cancel(0, tags[0], 0, is_eager ? 0 : 1, "rank 0 gave up");
    bench.sent_all();
    EXPECT_EQ(bench.engine->stats().slots_in_use, is_eager ? 0u : 2u);
    EXPECT_EQ(bench.bodies.size(), is_eager ? 2u : 0u);
    bench.engine->on_reduced(bench.now, sums[0].token, {});
    bench.collect();
    EXPECT_TRUE(bench.sends(wire::MessageType::kResult).empty());
    EXPECT_EQ(bench.engine->stats().slots_in_use, 0u);
    EXPECT_TRUE(bench.bodies.empty());
    EXPECT_TRUE(bench.engine->is_idle());
    bench.engine->on_reduced(bench.now, sums[0].token, {});  // Known no more.
  }
}

TEST(ServerEngine, CountsHowLateEachWorkerComesAndTellsIt) {
  Bench bench(3);
  const std::vector<Lateness> before(3);
  EXPECT_EQ(straggler_text(bench.engine->lateness(), before), "");
  for (int step = 0; step < 4; ++step) {
    ++bench.op;
    bench.send(0, bench.announce(0, 0));
    bench.now += 1ms;
    bench.send(2, bench.announce(2, 0));
    bench.now += 20ms;
    bench.send(1, bench.announce(1, 0));
    for (const SendAction& result : bench.sends(wire::MessageType::kResult)) {
      const std::uint32_t late[] = {0, 21'000 | wire::kWasLast, 1'000};
      EXPECT_EQ(result.header.count, late[result.to.value]) << "rank " << result.to.value;
    }
    bench.sent_all();
  }
  const auto& lateness = bench.engine->lateness();
  EXPECT_EQ(lateness[1].announces, 4u);
  EXPECT_EQ(lateness[1].last, 4u);
  EXPECT_EQ(lateness[1].total, 84ms);
  EXPECT_EQ(lateness[2].last, 0u);
  EXPECT_EQ(lateness[2].total, 4ms);
  EXPECT_EQ(straggler_text(lateness, before),
            "rank 1 came last in 100 % of 4 operations, on average 21.0 ms after the first");
  EXPECT_EQ(straggler_text(lateness, lateness), "") << "nothing since then";
}

TEST(ServerEngine, NamesWhoseInputIsNotFiniteAndSendsNoResultOfIt) {
  Bench bench(3);
  bench.config.check_finite = true;
  bench.build();
  for (std::uint32_t sender = 0; sender < 3; ++sender) bench.send(sender, bench.announce(sender, 2));
  std::map<std::uint32_t, std::uint64_t> push_tags;
  for (const SendAction& grant : bench.sends(wire::MessageType::kGrant)) push_tags[grant.to.value] = grant.header.tag;
  const auto put = [&](std::uint32_t sender, std::uint32_t chunk, std::size_t element, float value) {
    std::byte* const at = bench.posted.at(push_tags[sender] + chunk).payload.data();
    std::memset(at, 0, kChunk);
    std::memcpy(at + element * sizeof value, &value, sizeof value);
  };
  for (std::uint32_t sender = 0; sender < 3; ++sender) {
    put(sender, 0, 0, 1.5f);
    put(sender, 1, 3, sender == 1 ? std::numeric_limits<float>::infinity() : 1.0f);
  }
  for (std::uint32_t sender = 0; sender < 3; ++sender) bench.push(sender, push_tags[sender], 0);
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 3u) << "the first chunk is good";
  bench.sent_all();
  for (std::uint32_t sender = 0; sender < 3; ++sender) bench.push(sender, push_tags[sender] + 1, 1);
  EXPECT_TRUE(bench.sends(wire::MessageType::kResult).empty());
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 3u);
  for (const SendAction& error : errors) {
    EXPECT_EQ(static_cast<Code>(error.body.front()), Code::kNotFinite);
    // 32 elements of the first chunk come before.
    EXPECT_NE(Bench::text(error).find("in the input of rank 1 (first seen at element 35)"), std::string::npos)
        << Bench::text(error);
  }
  bench.sent_all();
  EXPECT_EQ(bench.engine->stats().slots_in_use, 0u);
}

/// Who gives up again and again and reads no answer costs a lane what has room, and no more.
TEST(ServerEngine, AnswersToAWorkerThatNeverReadsAreBounded) {
  Bench bench(2);
  bench.config.max_ops_per_worker = 100;
  bench.build();
  const std::uint64_t tag = bench.send(1, bench.announce(1, 1));
  std::vector<SendAction> on_way;
  for (bench.op = 2; bench.op < 10'002; ++bench.op) {
    bench.cancel(1, tag, 0, 0, "enough");
    for (const SendAction& error : bench.sends(wire::MessageType::kError)) on_way.push_back(error);
  }
  EXPECT_EQ(on_way.size(), 64u);
  EXPECT_EQ(bench.engine->stats().messages_rejected, 10'000u - 64 - 100);
  // Who reads them in the end gets those that there was room for, each once.
  std::set<std::uint64_t> answered;
  while (!on_way.empty()) {
    answered.insert(on_way.back().header.op);
    const Token token = on_way.back().token;
    on_way.pop_back();
    bench.engine->on_sent(bench.now, token, Status::ok());
    bench.collect();
    for (const SendAction& error : bench.sends(wire::MessageType::kError)) on_way.push_back(error);
  }
  EXPECT_EQ(answered.size(), 164u);
}

}  // namespace
}  // namespace herring::server
