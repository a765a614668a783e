#include "worker/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <string>

#include "worker/engine_bench.h"

namespace herring::worker {
namespace {

using namespace testing;

TEST(WorkerEngine, PostsTheReceivesOfWhatItDoesNotPushBeforeTheAnnounce) {
  Bench bench(2);
  std::vector<std::byte> memory(1000);
  Operation pulled = bench.operation(1, memory);
  pulled.descriptor.collective = Collective::kBroadcast;
  pulled.descriptor.root = 1;
  bench.submit(pulled);
  std::set<std::uint64_t> tags;
  std::size_t announced_chunks = 0;
  for (const Action& action : bench.actions) {
    if (const auto* post = std::get_if<PostReceiveAction>(&action)) tags.insert(post->tag.value);
    if (const auto* send = std::get_if<SendAction>(&action)) {
      const auto body = wire::decode_announce(send->body);
      ASSERT_TRUE(body.has_value());
      for (std::uint32_t c = 0; c < body->owned_count; ++c) EXPECT_TRUE(tags.contains(send->header.tag + c));
      announced_chunks += body->owned_count;
      EXPECT_EQ(send->tag, kControlTag);
    }
  }
  EXPECT_EQ(tags.size(), announced_chunks);
  EXPECT_GT(announced_chunks, 2u);
}

TEST(WorkerEngine, PushesAndReceivesChunksTogetherWhereTheLaneSaysSo) {
  Bench bench(1);
  std::vector<std::byte> memory(7 * kChunk - 10);
  bench.submit(bench.operation(1, memory));
  const SendAction announce = bench.sends(wire::MessageType::kAnnounce).at(0);
  bench.grant(announce, 0, 4, 900, 2);
  auto pushes = bench.sends(wire::MessageType::kPush);
  ASSERT_EQ(pushes.size(), 2u);
  EXPECT_EQ(pushes[1].header.chunk, 2u);
  EXPECT_EQ(pushes[1].header.tag, 902u);
  EXPECT_EQ(pushes[1].payload.data(), memory.data() + 2 * kChunk);
  EXPECT_EQ(pushes[1].payload.size(), 2 * kChunk);
  bench.sent(pushes);
  EXPECT_EQ(bench.count<PostReceiveAction>(), 2u);
  EXPECT_EQ(bench.posted.at(announce.header.tag + 2).payload.size(), 2 * kChunk);
  EXPECT_TRUE(bench.result(announce, 0));
  EXPECT_TRUE(bench.result(announce, 2));
  bench.grant(announce, 4, 3, 950, 3);
  pushes = bench.sends(wire::MessageType::kPush);
  ASSERT_EQ(pushes.size(), 1u);
  EXPECT_EQ(pushes[0].payload.size(), 3 * kChunk - 10);
  bench.sent(pushes);
  EXPECT_TRUE(bench.completed.empty());
  EXPECT_TRUE(bench.result(announce, 4));
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_TRUE(bench.completed[0].status.is_ok());
}

TEST(WorkerEngine, RefusesGrantsOfNonsensicalRuns) {
  Bench bench(1);
  std::vector<std::byte> memory(16 * kChunk);
  bench.submit(bench.operation(1, memory));
  const SendAction announce = bench.sends(wire::MessageType::kAnnounce).at(0);
  std::uint64_t refused = 0;
  for (const std::uint64_t run : std::array<std::uint64_t, 4>{0, 3, wire::kMaxRun + 1, ~0ull}) {
    bench.grant(announce, 0, 4, 900, run);
    EXPECT_TRUE(bench.sends(wire::MessageType::kPush).empty()) << run;
    EXPECT_EQ(bench.engine->stats().messages_rejected, ++refused) << run;
  }
  bench.grant(announce, 1, 1, 900);
  bench.grant(announce, 0, 4, 920, 2);  // Chunk 1 has been pushed; 2 and 3 have not.
  ASSERT_EQ(bench.sends(wire::MessageType::kPush).size(), 1u);
  EXPECT_EQ(bench.sends(wire::MessageType::kPush)[0].header.chunk, 2u);
}

/// Anybody's message can take a receive: nothing may land on a gradient that is still to be read.
TEST(WorkerEngine, PostsTheReceiveOfWhatItPushesWhenThePushIsOver) {
  Bench bench(1);
  std::vector<std::byte> memory(5 * kChunk);
  bench.submit(bench.operation(1, memory));
  const SendAction announce = bench.sends(wire::MessageType::kAnnounce).at(0);
  EXPECT_EQ(bench.count<PostReceiveAction>(), 0u);
  bench.grant(announce, 1, 3, 900);
  EXPECT_EQ(bench.count<PostReceiveAction>(), 0u);
  const auto pushes = bench.sends(wire::MessageType::kPush);
  ASSERT_EQ(pushes.size(), 3u);
  for (const SendAction& push : pushes) {
    bench.sent({push});
    ASSERT_EQ(bench.count<PostReceiveAction>(), 1u);
    const auto& post = std::get<PostReceiveAction>(bench.actions.front());
    EXPECT_EQ(post.tag.value, announce.header.tag + push.header.chunk);
    EXPECT_EQ(post.payload.data(), push.payload.data());
  }
}

TEST(WorkerEngine, PostsTheReceiveOfWhatItAnnouncesEagerlyWhenTheAnnounceIsOver) {
  Bench bench(1);
  bench.config.max_eager_bytes = 2 * kChunk;
  bench.config.eager_window = 4;
  bench.build();
  std::vector<std::byte> memory(2 * kChunk);
  bench.submit(bench.operation(1, memory));
  const SendAction announce = bench.sends(wire::MessageType::kAnnounce).at(0);
  ASSERT_EQ(announce.payload.size(), memory.size());
  EXPECT_EQ(bench.count<PostReceiveAction>(), 0u);
  bench.sent({announce});
  EXPECT_EQ(bench.count<PostReceiveAction>(), 2u);
}

/// Where the endpoint finds what was changed after its post, the Result need not wait, but comes after the post.
TEST(WorkerEngine, WithSealedSendsThePushIsPostedBeforeTheReceiveThatLandsOnIt) {
  Bench bench(1);
  bench.config.sealed_sends = true;
  bench.build();
  std::vector<std::byte> memory(3 * kChunk);
  bench.submit(bench.operation(1, memory));
  const SendAction announce = bench.sends(wire::MessageType::kAnnounce).at(0);
  bench.grant(announce, 0, 3, 900);
  std::set<std::uint64_t> pushed;
  std::uint32_t posted = 0;
  for (const Action& action : bench.actions) {
    if (const auto* send = std::get_if<SendAction>(&action)) pushed.insert(send->header.chunk);
    if (const auto* post = std::get_if<PostReceiveAction>(&action)) {
      EXPECT_TRUE(pushed.contains(static_cast<std::uint32_t>(post->tag.value - announce.header.tag)));
      ++posted;
    }
  }
  EXPECT_EQ(posted, 3u);
}

TEST(WorkerEngine, CompletesOnceWhenAllResultsAreInAndAllSendsAreDone) {
  Bench bench(1);
  bench.config.sealed_sends = true;
  bench.build();
  std::vector<std::byte> memory(3 * kChunk);
  bench.submit(bench.operation(1, memory));
  const SendAction announce = bench.sends(wire::MessageType::kAnnounce).at(0);
  bench.grant(announce, 0, 3, 900);
  const auto pushes = bench.sends(wire::MessageType::kPush);
  ASSERT_EQ(pushes.size(), 3u);
  for (std::uint32_t c = 0; c < 3; ++c) {
    EXPECT_EQ(pushes[c].tag.value, 900u + c);
    EXPECT_EQ(pushes[c].payload.data(), memory.data() + c * kChunk);
    EXPECT_TRUE(bench.result(announce, c));
  }
  EXPECT_TRUE(bench.completed.empty()) << "the transport still reads the memory";
  bench.sent(pushes);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_TRUE(bench.completed[0].status.is_ok());
  bench.sent({announce});
  EXPECT_TRUE(bench.engine->is_idle());
}

TEST(WorkerEngine, ALaneInThisProcessMayPutTheResultWhereThePushLies) {
  for (const bool is_near : {false, true}) {
    Bench bench(2);
    if (is_near) bench.config.near_lanes = {PeerId{kWorkers}};
    bench.build();
    std::vector<std::byte> memory(4 * kChunk);
    bench.submit(bench.operation(1, memory));
    const std::vector<SendAction> announces = bench.sends(wire::MessageType::kAnnounce);
    const SendAction near = *std::ranges::find(announces, PeerId{kWorkers}, &SendAction::to);
    bench.take_push(near, 2);
    for (std::uint32_t chunk = 0; chunk < 2; ++chunk) bench.result(near, chunk, true, wire::kFlagInPlace);
    EXPECT_EQ(bench.engine->stats().messages_rejected, is_near ? 0u : 2u);
    EXPECT_EQ(bench.engine->stats().bytes_received, is_near ? 2u * kChunk : 0u);
  }
}

TEST(WorkerEngine, AGrantIsAnsweredOnce) {
  Bench bench(1);
  std::vector<std::byte> memory(2 * kChunk);
  bench.submit(bench.operation(1, memory));
  const SendAction announce = bench.sends(wire::MessageType::kAnnounce).at(0);
  bench.grant(announce, 0, 1, 900);
  EXPECT_EQ(bench.sends(wire::MessageType::kPush).size(), 1u);
  bench.grant(announce, 0, 1, 950);
  EXPECT_EQ(bench.sends(wire::MessageType::kPush).size(), 0u);
  bench.grant(announce, 1, 2, 970);  // Beyond the shard.
  EXPECT_EQ(bench.sends(wire::MessageType::kPush).size(), 0u);
  EXPECT_EQ(bench.engine->stats().messages_rejected, 2u);
}

TEST(WorkerEngine, TheHomeLaneHearsOfEverythingAndItsVerdictIsAwaited) {
  // One chunk for one of eight lanes. That of a second part mostly goes elsewhere.
  int elsewhere = 0;
  for (std::uint64_t op = 1; op <= 20; ++op) {
    Bench bench(8);
    bench.config.min_shard_bytes = kChunk;
    bench.build();
    std::vector<std::byte> memory(kChunk);
    Operation operation = bench.operation(op, memory);
    bench.submit(operation);
    ASSERT_EQ(bench.sends(wire::MessageType::kAnnounce).size(), 1u) << "the first part's chunk goes to the home lane";
    bench.build();
    operation.key.part = 1;
    bench.submit(operation);
    const auto announces = bench.sends(wire::MessageType::kAnnounce);
    ASSERT_LE(announces.size(), 2u);
    if (announces.size() < 2) continue;
    ++elsewhere;
    for (const SendAction& announce : announces) {
      EXPECT_TRUE(bench.completed.empty());
      bench.take_push(announce, 1);
      EXPECT_TRUE(bench.result(announce, 0));
    }
    EXPECT_EQ(bench.completed.size(), 1u);
  }
  EXPECT_GT(elsewhere, 10);
}

TEST(WorkerEngine, WorkersStartAtDifferentLanes) {
  std::set<std::uint32_t> first;
  std::vector<std::byte> memory(64 * kChunk);
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    Bench bench(4, rank);
    bench.submit(bench.operation(1, memory));
    first.insert(bench.sends(wire::MessageType::kAnnounce).at(0).to.value);
  }
  EXPECT_EQ(first.size(), 4u);
}

TEST(WorkerEngine, SmallShardsTravelInTheAnnounceWithinTheirWindow) {
  Bench bench(1);
  bench.config.max_eager_bytes = 512;
  bench.build();
  std::vector<std::vector<std::byte>> memory(4, std::vector<std::byte>(500));
  std::vector<SendAction> announces;
  for (std::uint64_t op = 1; op <= 3; ++op) {
    bench.submit(bench.operation(op, memory[op]));
    announces.push_back(bench.sends(wire::MessageType::kAnnounce).at(0));
  }
  EXPECT_EQ(announces[0].payload.data(), memory[1].data());
  EXPECT_EQ(announces[0].payload.size(), 500u);
  EXPECT_EQ(announces[1].header.flags, wire::kFlagEager);
  EXPECT_EQ(announces[2].header.flags, 0) << "two are unfinished: the third asks first";
  bench.sent(announces);
  for (std::uint32_t c = 0; c < 4; ++c) bench.result(announces[0], c);
  EXPECT_EQ(bench.completed.size(), 1u);
  bench.submit(bench.operation(4, memory[0]));
  EXPECT_EQ(bench.sends(wire::MessageType::kAnnounce).at(0).header.flags, wire::kFlagEager);
}

TEST(WorkerEngine, AnnouncesBeyondTheCreditsWaitInOrder) {
  Bench bench(1);
  bench.config.announce_credits = 2;
  bench.build();
  std::vector<std::byte> memory(kChunk);
  for (std::uint64_t op = 1; op <= 4; ++op) {
    bench.submit(bench.operation(op, memory));
    EXPECT_EQ(bench.sends(wire::MessageType::kAnnounce).size(), op <= 2 ? 1u : 0u);
  }
  wire::Header header = bench.from(PeerId{kWorkers}, {}, wire::MessageType::kCredit);
  header.count = 1;
  bench.control(header);
  ASSERT_EQ(bench.sends(wire::MessageType::kAnnounce).size(), 1u);
  EXPECT_EQ(bench.sends(wire::MessageType::kAnnounce)[0].header.op, 3u);
  header.count = 50;  // More than were ever spent.
  bench.control(header);
  EXPECT_TRUE(bench.actions.empty());
  EXPECT_EQ(bench.engine->stats().messages_rejected, 1u);
}

TEST(WorkerEngine, AnErrorFromOneLaneIsToldToTheOthersAndWaitsForWhatIsOnItsWay) {
  Bench bench(2);
  bench.config.sealed_sends = true;
  bench.build();
  std::vector<std::byte> memory(8 * kChunk);
  bench.submit(bench.operation(1, memory));
  const auto announces = bench.sends(wire::MessageType::kAnnounce);
  ASSERT_EQ(announces.size(), 2u);
  bench.grant(announces[1], 0, 2, 900);
  const auto pushes = bench.sends(wire::MessageType::kPush);
  bench.error(announces[0], Code::kMismatch, "rank 0 said this; rank 1 said that", 0);
  const auto cancels = bench.sends(wire::MessageType::kCancel);
  ASSERT_EQ(cancels.size(), 2u);
  EXPECT_EQ(cancels[0].header.chunk, 1u) << "that lane has spoken";
  EXPECT_EQ(cancels[1].header.chunk, 0u);
  EXPECT_EQ(cancels[1].header.count, 2u) << "pushes that the lane may still have to take";
  EXPECT_EQ(cancels[1].header.tag, announces[1].header.tag);
  bench.error(announces[1], Code::kMismatch, "rank 0 said this; rank 1 said that", 1);
  EXPECT_EQ(bench.count<CancelReceiveAction>(), 0u) << "one Result is on its way";
  EXPECT_TRUE(bench.completed.empty());
  bench.result(announces[1], 1);
  EXPECT_GT(bench.count<CancelReceiveAction>(), 0u);
  EXPECT_TRUE(bench.completed.empty()) << "pushes still read the memory";
  bench.sent(pushes);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.code(), Code::kMismatch);
  EXPECT_EQ(bench.completed[0].status.message(), "rank 0 said this; rank 1 said that");
}

TEST(WorkerEngine, AfterAFailureALateGrantOrErrorIsHarmless) {
  Bench bench(2);
  std::vector<std::byte> memory(8 * kChunk);
  bench.submit(bench.operation(1, memory));
  const auto announces = bench.sends(wire::MessageType::kAnnounce);
  bench.error(announces[0], Code::kTimeout, "rank 2 is missing", 0);
  bench.grant(announces[1], 0, 4, 900);
  EXPECT_TRUE(bench.sends(wire::MessageType::kPush).empty()) << "the lane was told to expect none";
  bench.error(announces[1], Code::kTimeout, "rank 2 is missing", 0);
  ASSERT_EQ(bench.completed.size(), 1u);
  bench.error(announces[0], Code::kTimeout, "again", 0);
  bench.grant(announces[1], 0, 4, 900);
  EXPECT_TRUE(bench.actions.empty());
  EXPECT_EQ(bench.completed.size(), 1u);
  // The key can be used again at once; messages of the first time do not touch it.
  bench.submit(bench.operation(1, memory));
  bench.error(announces[0], Code::kTimeout, "again", 0);
  bench.grant(announces[1], 0, 4, 900);
  EXPECT_TRUE(bench.actions.empty());
  EXPECT_EQ(bench.completed.size(), 1u);
}

TEST(WorkerEngine, SilentLanesAreNamedAfterTheTimeOutAndTheGrace) {
  Bench bench(2);
  std::vector<std::byte> memory(8 * kChunk);
  bench.submit(bench.operation(1, memory));
  const auto announces = bench.sends(wire::MessageType::kAnnounce);
  const SendAction& good = announces[0].to == PeerId{kWorkers} ? announces[0] : announces[1];
  for (const SendAction& announce : announces) bench.take_push(announce, 4);
  for (std::uint32_t c = 0; c < 4; ++c) ASSERT_TRUE(bench.result(good, c));
  EXPECT_EQ(bench.engine->next_deadline(), bench.now + 15s);
  bench.now += 15s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.sends(wire::MessageType::kCancel).size(), 1u);
  EXPECT_TRUE(bench.completed.empty());
  bench.now = bench.engine->next_deadline();
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.count<CancelReceiveAction>(), 4u);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.code(), Code::kTimeout);
  const std::string& text = bench.completed[0].status.message();
  EXPECT_NE(text.find("lane 1 (peer 5"), std::string::npos) << text;
  EXPECT_EQ(text.find("lane 0"), std::string::npos) << text;
  // The receives were taken back before the completion was told.
  EXPECT_TRUE(std::holds_alternative<CompleteAction>(bench.actions.back()));
}

/// A message may be landing in the caller's memory.
TEST(WorkerEngine, AFailedOperationEndsWhenAllItsReceivesAreGivenBack) {
  Bench bench(1);
  bench.gives_back = false;
  std::vector<std::byte> memory(2 * kChunk), other(kChunk);
  bench.submit(bench.operation(1, memory));
  bench.take_push(bench.sends(wire::MessageType::kAnnounce).at(0), 2);
  bench.engine->on_peer_lost(bench.now, PeerId{kWorkers}, "server 0 is gone");
  bench.collect();
  std::vector<Token> cancelled;
  for (const Action& action : bench.actions) {
    if (const auto* one = std::get_if<CancelReceiveAction>(&action)) cancelled.push_back(one->token);
  }
  ASSERT_EQ(cancelled.size(), 2u);
  EXPECT_TRUE(bench.completed.empty());
  bench.engine->on_received(bench.now, cancelled[0], Status(Code::kPeerLost, "gone"), {});
  bench.engine->on_withdrawn(bench.now, cancelled[0]);
  bench.collect();
  EXPECT_TRUE(bench.completed.empty()) << "the second one may still be written to";
  bench.engine->on_withdrawn(bench.now, cancelled[1]);
  bench.collect();
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.message(), "server 0 is gone");
  EXPECT_FALSE(bench.engine->has_operations());
}

TEST(WorkerEngine, AResultThatDoesNotBelongIsCountedAndItsReceivePostedAgain) {
  Bench bench(1);
  std::vector<std::byte> memory(kChunk);
  bench.submit(bench.operation(1, memory));
  const SendAction announce = bench.sends(wire::MessageType::kAnnounce).at(0);
  bench.take_push(announce, 1);
  bench.result(announce, 0, false);
  EXPECT_EQ(bench.engine->stats().messages_rejected, 1u);
  EXPECT_TRUE(bench.completed.empty());
  EXPECT_TRUE(bench.result(announce, 0));
  EXPECT_EQ(bench.completed.size(), 1u);
}

/// Else the lane's Result meets no receive, and the lane never has the memory back that it sends from.
TEST(WorkerEngine, AnOperationThatStrangersFailStillTakesItsResult) {
  Bench bench(1);
  std::vector<std::byte> memory(kChunk);
  bench.submit(bench.operation(1, memory));
  const SendAction announce = bench.sends(wire::MessageType::kAnnounce).at(0);
  bench.take_push(announce, 1);
  for (int i = 0; i < 9; ++i) EXPECT_TRUE(bench.result(announce, 0, false));
  EXPECT_EQ(bench.sends(wire::MessageType::kCancel).size(), 1u) << "the operation has failed";
  EXPECT_TRUE(bench.completed.empty());
  bench.error(announce, Code::kCancelled, "as you say", 1);
  EXPECT_TRUE(bench.completed.empty()) << "the result is on its way";
  EXPECT_TRUE(bench.result(announce, 0));
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.code(), Code::kTransport);
}

TEST(WorkerEngine, AKeyInUseAndBadArgumentsCompleteWithAReason) {
  Bench bench(1);
  std::vector<std::byte> memory(kChunk);
  bench.submit(bench.operation(1, memory));
  bench.submit(bench.operation(1, memory));
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.code(), Code::kInvalidArgument);
  Operation wrong = bench.operation(2, memory);
  wrong.memory = std::span(memory).first(5);
  bench.submit(wrong);
  ASSERT_EQ(bench.completed.size(), 2u);
  EXPECT_NE(bench.completed[1].status.message().find("5 bytes"), std::string::npos);
  wrong = bench.operation(3, memory);
  wrong.descriptor.collective = Collective::kBroadcast;
  wrong.descriptor.root = kWorkers;
  bench.submit(wrong);
  ASSERT_EQ(bench.completed.size(), 3u);
  EXPECT_NE(bench.completed[2].status.message().find("root 4"), std::string::npos);
}

TEST(WorkerEngine, AbortingWhatWasNeverStartedTellsTheHomeLane) {
  Bench bench(3);
  std::vector<std::byte> memory(9 * kChunk);
  bench.engine->abort(bench.now, bench.operation(1, memory), Status(Code::kMismatch, "the host disagrees"));
  bench.collect();
  const auto cancels = bench.sends(wire::MessageType::kCancel);
  ASSERT_EQ(cancels.size(), 1u);
  EXPECT_EQ(cancels[0].header.tag, 0u);
  EXPECT_EQ(cancels[0].header.offset, kWorkers);
  EXPECT_TRUE(bench.completed.empty());
}

TEST(WorkerEngine, ALostLaneEndsWhatUsesItAtOnce) {
  Bench bench(1);
  std::vector<std::byte> memory(kChunk);
  bench.submit(bench.operation(1, memory));
  bench.take_push(bench.sends(wire::MessageType::kAnnounce).at(0), 1);
  bench.engine->on_peer_lost(bench.now, PeerId{kWorkers}, "server 0 is gone");
  bench.collect();
  EXPECT_EQ(bench.count<CancelReceiveAction>(), 1u);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.code(), Code::kPeerLost);
  EXPECT_EQ(bench.completed[0].status.message(), "server 0 is gone");
  bench.submit(bench.operation(2, memory));
  ASSERT_EQ(bench.completed.size(), 2u);
  EXPECT_EQ(bench.completed[1].status.message(), "server 0 is gone");
}

}  // namespace
}  // namespace herring::worker
