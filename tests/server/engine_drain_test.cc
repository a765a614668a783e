#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <vector>

#include "server/engine_bench.h"

/// What a failed operation still holds, and until when.
namespace herring::server {
namespace {

using namespace std::chrono_literals;

TEST(ServerEngine, AFailedOperationKeepsItsReceivesUntilTheWorkersSayWhatIsOnItsWay) {
  Bench bench(2);
  const std::uint64_t tags[2] = {bench.send(0, bench.announce(0, 2)), bench.send(1, bench.announce(1, 2))};
  std::map<std::uint32_t, std::uint64_t> push_tags;
  for (const SendAction& grant : bench.sends(wire::MessageType::kGrant)) push_tags[grant.to.value] = grant.header.tag;
  bench.cancel(1, tags[1], 0, 1, "rank 1 stops");
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 2u);
  EXPECT_TRUE(bench.all<CancelReceiveAction>().empty()) << "one push of rank 1 is on its way";
  bench.push(1, push_tags[1], 0);
  EXPECT_EQ(bench.all<CancelReceiveAction>().size(), 1u) << "it was the only one";
  EXPECT_FALSE(bench.engine->is_idle());
  wire::Header head = bench.header(0, wire::MessageType::kCancel);
  head.tag = tags[0];
  head.chunk = 1;
  bench.control(head, {});
  EXPECT_EQ(bench.all<CancelReceiveAction>().size(), 2u);
  EXPECT_EQ(bench.engine->stats().slots_in_use, 0u);
}

TEST(ServerEngine, AWorkerThatDoesNotAnswerAnErrorLosesItsReceivesAfterAGrace) {
  Bench bench(2);
  bench.send(0, bench.announce(0, 1));
  bench.send(1, bench.announce(1, 1));
  bench.now += 10s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.engine->stats().slots_in_use, 2u);
  bench.now = bench.engine->next_deadline();
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.all<CancelReceiveAction>().size(), 2u);
  EXPECT_EQ(bench.engine->stats().slots_in_use, 0u);
}

/// A message may be landing in it: nobody else gets that memory before the transport has let go of it.
TEST(ServerEngine, AWithdrawnReceiveKeepsItsSlotUntilItIsGivenBack) {
  Bench bench(2);
  bench.gives_back = false;
  bench.send(0, bench.announce(0, 1));
  bench.send(1, bench.announce(1, 1));
  std::vector<PostReceiveAction> first = bench.all<PostReceiveAction>();
  bench.now += 10s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  bench.now = bench.engine->next_deadline();
  bench.engine->on_tick(bench.now);
  bench.collect();
  const auto cancelled = bench.all<CancelReceiveAction>();
  ASSERT_EQ(cancelled.size(), 2u);
  EXPECT_EQ(bench.engine->stats().slots_in_use, 2u);
  // Others go on meanwhile, elsewhere.
  bench.op = 2;
  bench.send(0, bench.announce(0, 1));
  bench.send(1, bench.announce(1, 1));
  const auto second = bench.all<PostReceiveAction>();
  ASSERT_FALSE(second.empty());
  for (const auto& a : first) {
    for (const auto& b : second) EXPECT_NE(a.payload.data(), b.payload.data());
  }
  // What comes before it is given back counts for nothing.
  bench.engine->on_received(bench.now, cancelled[0].token, Status::ok(), {});
  bench.collect();
  EXPECT_TRUE(bench.actions.empty());
  for (const auto& one : cancelled) bench.engine->on_withdrawn(bench.now, one.token);
  bench.collect();
  EXPECT_EQ(bench.engine->stats().slots_in_use, second.size());
  EXPECT_EQ(bench.engine->stats().messages_rejected, 0u);
}

}  // namespace
}  // namespace herring::server
