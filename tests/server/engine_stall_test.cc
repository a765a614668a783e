#include "server/engine_bench.h"

/// The warning of an operation that waits for long: it goes on, and another one has its turn later.
namespace herring::server {
namespace {

/// What is warned of when so much time has passed.
std::string tick(Bench& bench, Duration later) {
  bench.now += later;
  if (bench.now >= bench.engine->next_deadline()) bench.engine->on_tick(bench.now);
  bench.collect();
  return bench.engine->take_warning();
}

TEST(ServerStalls, EachOperationThatStallsIsWarnedOfOnceInItsTurnAndGoesOn) {
  Bench bench(3);
  bench.config.stall_warning = 3s;
  bench.build();
  for (const std::uint32_t worker : {0u, 2u}) bench.send(worker, bench.announce(worker, 1));
  bench.op = 2;  // It waits behind the first.
  bench.send(0, bench.announce(0, 1));
  bench.op = 1;
  EXPECT_EQ(tick(bench, 2999ms), "");
  EXPECT_EQ(
      tick(bench, 1ms),
      "all_reduce(float32[32], sum) has waited for rank 1 for 3 s (operation 1). Look at what the missing ones are "
      "doing");
  EXPECT_EQ(tick(bench, 2999ms), "");
  EXPECT_EQ(
      tick(bench, 1ms),
      "all_reduce(float32[32], sum) has waited for ranks 1, 2 for 6 s (operation 2). Look at what the missing ones are "
      "doing");
  EXPECT_EQ(tick(bench, 3s), "") << "each has been told of";
  EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
  bench.send(1, bench.announce(1, 1));
  EXPECT_EQ(bench.sends(wire::MessageType::kGrant).size(), 3u);
  EXPECT_EQ(tick(bench, 1s), "");
}

TEST(ServerStalls, WhoLetsOthersComeWhenTheyLikeIsNoStallAndDoesNotHoldUpTheDeadlineOfWhoDoesNot) {
  Bench bench(3);
  bench.config.stall_warning = 3s;
  bench.build();
  wire::Announce listener = bench.announce(0, 1);
  listener.timeout_ms = 0xFFFF'FFFF;
  bench.send(0, listener);
  EXPECT_EQ(tick(bench, 1h), "");
  bench.send(1, bench.announce(1, 1));
  EXPECT_EQ(tick(bench, 2999ms), "");
  EXPECT_EQ(tick(bench, 1ms),
            "all_reduce(float32[32], sum) has waited for rank 2 for 3 s (operation 1). Look at what the missing ones "
            "are doing");
  EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
  EXPECT_EQ(tick(bench, 7s), "");
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 2u);
}

TEST(ServerStalls, OfAllLanesOneWarns) {
  for (const bool is_first_shard : {true, false}) {
    Bench bench(2);
    bench.config.stall_warning = 3s;
    bench.build();
    wire::Announce body = bench.announce(0, 1);
    body.descriptor.shape[0] *= 2;
    body.descriptor.op_bytes *= 2;
    body.descriptor.part_bytes *= 2;
    if (!is_first_shard) body.shard_offset = body.shard_bytes;
    bench.send(0, body);
    bench.now += 4s;
    bench.engine->on_tick(bench.now);
    EXPECT_EQ(bench.engine->take_warning().empty(), !is_first_shard);
  }
}

TEST(ServerStalls, AStallDoesNotCutShortTheWaitForWhoMayDisagreeToo) {
  Bench bench(3);
  bench.config.stall_warning = 3s;
  bench.build();
  bench.send(0, bench.announce(0, 1));
  bench.now += 2900ms;
  wire::Announce other = bench.announce(1, 1);
  other.descriptor.reduce = ReduceOp::kMax;
  bench.send(1, other);
  bench.now += 1s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.engine->take_warning(), "");
  EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
  bench.now += 2s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 2u);
}

}  // namespace
}  // namespace herring::server
