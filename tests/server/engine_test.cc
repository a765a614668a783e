#include "server/engine_bench.h"

namespace herring::server {
namespace {

TEST(ServerEngine, DataThatCameWithAnAnnounceIsSummedWhereItLies) {
  Bench bench(2);
  const std::vector<std::byte> data(kChunk, std::byte{1});
  bench.send(0, bench.announce(0, 1), data);
  bench.send(1, bench.announce(1, 1), data);
  ASSERT_EQ(bench.bodies.size(), 2u);
  const std::vector<ReduceAction> sums = bench.all<ReduceAction>();
  ASSERT_EQ(sums.size(), 1u);
  for (const auto& input : sums[0].inputs) {
    EXPECT_TRUE(std::ranges::any_of(
        bench.bodies, [&](const auto& body) { return input.data() == body.second.data() + wire::kAnnounceBytes; }));
  }
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 2u);
  bench.sent_all();
  EXPECT_TRUE(bench.bodies.empty()) << "kept until the results are sent, and no longer";
  bench.send(0, bench.announce(0, 1));
  EXPECT_TRUE(bench.bodies.empty()) << "nothing is kept of what came without data";
}

TEST(ServerEngine, NeedsASlotForEachWorker) {
  EXPECT_THROW(Bench(4, 4, 3), Error);
  EXPECT_NO_THROW(Bench(4, 4, 4));
}

TEST(ServerEngine, PostsTheReceivesBeforeTheGrantAndGrantsSeveralChunksAtOnce) {
  Bench bench(2);
  bench.send(0, bench.announce(0, 3));
  EXPECT_TRUE(bench.actions.empty()) << "the other one is still missing";
  bench.send(1, bench.announce(1, 3));
  EXPECT_EQ(bench.all<PostReceiveAction>().size(), 6u);
  const auto grants = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(grants.size(), 2u) << "one message for each worker, not for each chunk";
  std::size_t posts_seen = 0;
  for (const Action& action : bench.actions) {
    if (std::holds_alternative<PostReceiveAction>(action)) ++posts_seen;
    if (std::holds_alternative<SendAction>(action)) {
      EXPECT_EQ(posts_seen, 6u);
    }
  }
  for (const SendAction& grant : grants) {
    EXPECT_EQ(grant.header.count, 3u);
    for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(bench.posted.contains(grant.header.tag + i));
  }
}

TEST(ServerEngine, ReducesInContributorOrderAndSendsToEverybodyAtOnce) {
  Bench bench(3);
  std::map<std::uint32_t, std::uint64_t> result_tags;
  for (const std::uint32_t sender : {2u, 0u, 1u}) result_tags[sender] = bench.send(sender, bench.announce(sender, 1));
  std::map<std::uint32_t, std::uint64_t> push_tags;
  std::map<std::uint32_t, const std::byte*> slots;
  for (const SendAction& grant : bench.sends(wire::MessageType::kGrant)) {
    push_tags[grant.to.value] = grant.header.tag;
    slots[grant.to.value] = bench.posted.at(grant.header.tag).payload.data();
  }
  bench.push(1, push_tags[1], 0);
  bench.push(2, push_tags[2], 0);
  EXPECT_TRUE(bench.actions.empty());
  EXPECT_EQ(bench.engine->stats().slots_in_use, 3u);
  bench.push(0, push_tags[0], 0);
  const auto reductions = bench.all<ReduceAction>();
  ASSERT_EQ(reductions.size(), 1u);
  ASSERT_EQ(reductions[0].inputs.size(), 3u);
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_EQ(reductions[0].inputs[i].data(), slots[i]) << "contributor " << i;
  ASSERT_EQ(reductions[0].outputs.size(), 1u);
  EXPECT_EQ(reductions[0].outputs[0].data(), slots[0]);
  const auto results = bench.sends(wire::MessageType::kResult);
  ASSERT_EQ(results.size(), 3u);
  for (const SendAction& result : results) EXPECT_EQ(result.tag.value, result_tags[result.to.value]);
  EXPECT_TRUE(std::holds_alternative<ReduceAction>(bench.actions.front()));
  EXPECT_EQ(bench.engine->stats().slots_in_use, 1u) << "the result's slot is still being read";
  bench.sent_all();
  EXPECT_EQ(bench.engine->stats().slots_in_use, 0u);
  EXPECT_EQ(bench.engine->stats().bytes_received, 3u * kChunk);
  EXPECT_EQ(bench.engine->stats().bytes_sent, 3u * kChunk);
}

TEST(ServerEngine, KeepsToTheWindowAndGrantsAgainWhenHalfOfItIsFree) {
  Bench bench(1, 4, 16);
  bench.send(0, bench.announce(0, 12));
  auto grants = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(grants.size(), 1u);
  EXPECT_EQ(grants[0].header.count, 4u);
  const std::uint64_t tag = grants[0].header.tag;
  bench.push(0, tag, 0);
  EXPECT_TRUE(bench.sends(wire::MessageType::kGrant).empty()) << "not a grant for each chunk";
  bench.push(0, tag + 1, 1);
  grants = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(grants.size(), 1u);
  EXPECT_EQ(grants[0].header.chunk, 4u);
  EXPECT_EQ(grants[0].header.count, 2u);
  EXPECT_EQ(grants[0].header.tag, tag + 4);
}

TEST(ServerEngine, AChunkTakesAllItsSlotsOrNone) {
  Bench bench(3, 4, 4);  // One chunk of three pushers fits, and one slot is left.
  for (std::uint32_t sender = 0; sender < 3; ++sender) bench.send(sender, bench.announce(sender, 2));
  EXPECT_EQ(bench.posted.size(), 3u);
  EXPECT_EQ(bench.engine->stats().slots_in_use, 3u);
  const auto grants = bench.sends(wire::MessageType::kGrant);
  for (const SendAction& grant : grants) bench.push(grant.to.value, grant.header.tag, 0);
  // Two of the three slots are free with the reduction, which makes three with the one left over.
  EXPECT_EQ(bench.sends(wire::MessageType::kGrant).size(), 3u);
  EXPECT_EQ(bench.engine->stats().slots_peak, 4u);
}

TEST(ServerEngine, TheNextOperationStartsWhileTheFirstIsStillInFlight) {
  Bench bench(2);
  for (std::uint32_t sender = 0; sender < 2; ++sender) bench.send(sender, bench.announce(sender, 2));
  bench.op = 2;
  bench.send(0, bench.announce(0, 2));
  bench.send(1, bench.announce(1, 2));
  const auto grants = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(grants.size(), 2u);
  EXPECT_EQ(grants[0].header.op, 2u);
}

TEST(ServerEngine, AGroupWhoseWorkerIsSlowKeepsNoOtherGroupWaiting) {
  Bench bench(4, 1);
  const auto submit = [&bench](std::uint32_t group, std::uint64_t op, std::uint32_t first) {
    bench.group = group;
    bench.op = op;
    for (std::uint32_t i = 0; i < 2; ++i) {
      wire::Announce body = bench.announce(first + i, 1);
      body.contributor = i;
      body.contributor_count = 2;
      bench.send(first + i, body);
    }
  };
  for (std::uint64_t op = 1; op <= 40; ++op) submit(1, op, 0);  // Nobody pushes: the first is granted, 39 wait.
  submit(2, 1, 2);
  const auto grants = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(grants.size(), 2u) << "the second group waits for the first";
  EXPECT_EQ(grants[0].header.group, 2u);
}

TEST(ServerEngine, EagerDataNeedsNeitherSlotNorGrant) {
  Bench bench(2);
  const std::vector<std::byte> data(2 * kChunk, std::byte{1});
  bench.send(0, bench.announce(0, 2), data);
  bench.send(1, bench.announce(1, 2), data);
  EXPECT_TRUE(bench.all<PostReceiveAction>().empty());
  EXPECT_EQ(bench.all<ReduceAction>().size(), 2u);
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 4u);
  EXPECT_EQ(bench.engine->stats().slots_peak, 0u);
  EXPECT_EQ(bench.engine->stats().bytes_received, 4u * kChunk);
  bench.sent_all();
  EXPECT_TRUE(bench.engine->is_idle());
}

TEST(ServerEngine, ABroadcastAsksOnePusherAndTellsItWithoutThePayload) {
  Bench bench(3);
  for (std::uint32_t sender = 0; sender < 3; ++sender) {
    wire::Announce body = bench.announce(sender, 1);
    body.descriptor.collective = Collective::kBroadcast;
    body.descriptor.root = body.pusher = 1;
    bench.send(sender, body);
  }
  const auto grants = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(grants.size(), 1u);
  EXPECT_EQ(grants[0].to, PeerId{1});
  bench.push(1, grants[0].header.tag, 0);
  EXPECT_TRUE(bench.all<ReduceAction>().empty());
  for (const SendAction& result : bench.sends(wire::MessageType::kResult)) {
    EXPECT_EQ(result.payload.size(), result.to == PeerId{1} ? 0u : kChunk);
    EXPECT_EQ(result.header.flags, result.to == PeerId{1} ? wire::kFlagNoPayload : 0);
  }
}

TEST(ServerEngine, ABarrierAnswersWhenTheLastOneComes) {
  Bench bench(3);
  for (std::uint32_t sender = 0; sender < 3; ++sender) {
    EXPECT_TRUE(bench.sends(wire::MessageType::kResult).empty());
    wire::Announce body = bench.announce(sender, 0);
    body.descriptor.collective = Collective::kBarrier;
    bench.send(sender, body);
  }
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 3u);
}

TEST(ServerEngine, APushThatDoesNotBelongIsCountedAndItsReceivePostedAgain) {
  Bench bench(1);
  bench.send(0, bench.announce(0, 1));
  const std::uint64_t tag = bench.sends(wire::MessageType::kGrant)[0].header.tag;
  bench.push(0, tag, 0, kChunk - 1);
  EXPECT_EQ(bench.engine->stats().messages_rejected, 1u);
  ASSERT_TRUE(bench.posted.contains(tag));
  EXPECT_TRUE(bench.sends(wire::MessageType::kResult).empty());
  bench.push(0, tag, 0);
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 1u);
}

TEST(ServerEngine, AReceiveThatNeverWorksEndsTheOperationInsteadOfLoopingForEver) {
  Bench bench(1);
  bench.send(0, bench.announce(0, 1));
  const std::uint64_t tag = bench.sends(wire::MessageType::kGrant)[0].header.tag;
  for (int i = 0; i < 20 && bench.posted.contains(tag); ++i) {
    const PostReceiveAction receive = bench.posted.at(tag);
    bench.posted.clear();
    bench.engine->on_received(bench.now, receive.token, Status(Code::kTransport, "fi_trecv: broken"), {});
    bench.collect();
  }
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_NE(Bench::text(errors[0]).find("fi_trecv: broken"), std::string::npos);
}

TEST(ServerEngine, AMismatchNamesEachRankAndGroupsThoseWhoAgree) {
  Bench bench(4);
  wire::Announce other = bench.announce(2, 5);
  bench.send(0, bench.announce(0, 3));
  bench.send(1, bench.announce(1, 3));
  bench.send(2, other);
  EXPECT_TRUE(bench.actions.empty()) << "rank 3 is about to say its part";
  bench.send(3, bench.announce(3, 3));
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 4u);
  for (const SendAction& error : errors) {
    EXPECT_EQ(static_cast<Code>(error.body[0]), Code::kMismatch);
    EXPECT_EQ(
        Bench::text(error),
        "ranks 0, 1, 3 said all_reduce(float32[96], sum); rank 2 said all_reduce(float32[160], sum) (operation 1; "
        "every rank must make the same calls)");
  }
}

TEST(ServerEngine, AMismatchOfSettingsSaysTheNumbers) {
  Bench bench(2);
  wire::Announce other = bench.announce(1, 3);
  other.chunk_bytes = kChunk / 2;
  other.owned_count = 6;
  bench.send(0, bench.announce(0, 3));
  bench.send(1, other);
  const std::string text = Bench::text(bench.sends(wire::MessageType::kError).at(0));
  EXPECT_NE(text.find("in chunks of 128"), std::string::npos) << text;
  EXPECT_NE(text.find("in chunks of 64"), std::string::npos) << text;
}

TEST(ServerEngine, AMismatchDoesNotWaitLongForTheLastAndTellsItLater) {
  Bench bench(3);
  bench.send(0, bench.announce(0, 3));
  bench.send(1, bench.announce(1, 2));
  ASSERT_EQ(bench.engine->next_deadline(), bench.now + bench.config.mismatch_grace);
  bench.now = bench.engine->next_deadline();
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 2u);
  bench.send(2, bench.announce(2, 2));
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(errors[0].to, PeerId{2});
  EXPECT_EQ(static_cast<Code>(errors[0].body[0]), Code::kMismatch);
}

TEST(ServerEngine, AMismatchOfManyStaysWithinOneKilobyte) {
  Bench bench(64, 1);
  for (std::uint32_t sender = 0; sender < 64; ++sender) bench.send(sender, bench.announce(sender, sender + 1));
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 64u);
  EXPECT_LE(Bench::text(errors[0]).size(), 1024u);
  EXPECT_NE(Bench::text(errors[0]).find("rank 5 said all_reduce(float32[192], sum)"), std::string::npos);
}

TEST(ServerEngine, ASecondProcessInOnesPlaceIsRefusedAlone) {
  Bench bench(3);
  for (std::uint32_t sender = 0; sender < 2; ++sender) {
    wire::Announce body = bench.announce(sender, 1);
    body.contributor_count = 2;
    bench.send(sender, body);
    if (sender == 0) {
      wire::Announce impostor = bench.announce(2, 1);
      impostor.contributor_count = 2;
      impostor.contributor = 0;
      bench.send(2, impostor);
      const auto errors = bench.sends(wire::MessageType::kError);
      ASSERT_EQ(errors.size(), 1u);
      EXPECT_EQ(errors[0].to, PeerId{2});
      EXPECT_EQ(static_cast<Code>(errors[0].body[0]), Code::kProtocol);
    }
  }
  EXPECT_EQ(bench.sends(wire::MessageType::kGrant).size(), 2u) << "the others go on";
}

TEST(ServerEngine, CoOwnersMustNotOverlap) {
  Bench bench(3);
  const auto half = [&](std::uint32_t sender, std::uint32_t first, std::uint32_t count) {
    wire::Announce body = bench.announce(sender, 4);
    body.contributor = 0;
    body.contributor_count = 1;
    body.owned_first = first;
    body.owned_count = count;
    return body;
  };
  bench.send(0, half(0, 0, 2), {}, 2);
  bench.send(1, half(1, 1, 3), {}, 2);
  ASSERT_EQ(bench.sends(wire::MessageType::kError).size(), 1u);
  EXPECT_EQ(bench.sends(wire::MessageType::kError)[0].to, PeerId{1});
  bench.send(2, half(2, 2, 2), {}, 2);
  EXPECT_EQ(bench.sends(wire::MessageType::kGrant).size(), 2u);
}

TEST(ServerEngine, ACopyOfAnAnnounceIsDropped) {
  Bench bench(2);
  bench.send(0, bench.announce(0, 1));
  --bench.next_sequence[0];
  bench.send(0, bench.announce(0, 1));
  EXPECT_EQ(bench.engine->stats().messages_rejected, 1u);
  EXPECT_TRUE(bench.actions.empty());
  bench.send(1, bench.announce(1, 1));
  EXPECT_EQ(bench.sends(wire::MessageType::kGrant).size(), 2u);
}

TEST(ServerEngine, OperatorsThatDoNotFitTheTypeAreRefusedByName) {
  Bench bench(1);
  wire::Announce body = bench.announce(0, 1);
  body.descriptor.reduce = ReduceOp::kBxor;
  bench.send(0, body);
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_NE(Bench::text(errors[0]).find("bxor"), std::string::npos) << Bench::text(errors[0]);
}

TEST(ServerEngine, StrangersAreCountedAndNotAnswered) {
  Bench bench(2);
  wire::Header head = bench.header(0, wire::MessageType::kAnnounce);
  head.job_id = 8;
  bench.control(head, {});
  head = bench.header(0, wire::MessageType::kAnnounce);
  head.epoch = 1;
  bench.control(head, {});
  head = bench.header(2, wire::MessageType::kAnnounce);
  bench.control(head, {});
  head = bench.header(0, wire::MessageType::kGrant);
  bench.control(head, {});
  EXPECT_EQ(bench.engine->stats().messages_rejected, 4u);
  EXPECT_TRUE(bench.actions.empty());
  EXPECT_TRUE(bench.engine->is_idle());
}

TEST(ServerEngine, ATimeOutNamesWhoIsMissingAndWhoCame) {
  Bench bench(4);
  bench.send(0, bench.announce(0, 3));
  bench.send(1, bench.announce(1, 3));
  bench.send(3, bench.announce(3, 3));
  bench.now += 10s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 3u);
  EXPECT_EQ(
      Bench::text(errors[0]),
      "after 10 s rank 2 had not called all_reduce(float32[96], sum), operation 1; ranks 0, 1, 3 had. Look at what "
      "the missing ones were doing");
}

TEST(ServerEngine, ATimeOutOfSmallTensorsNamesRanksAsWell) {
  Bench bench(3);
  bench.group = kFirstFusedGroup;
  bench.send(0, bench.announce(0, 1));
  bench.send(2, bench.announce(2, 1));
  bench.now += 10s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 2u);
  EXPECT_EQ(Bench::text(errors[0]).find("after 10 s rank 1 had not called "), 0u) << Bench::text(errors[0]);
}

TEST(ServerEngine, ATimeOutNamesWhoseDataDidNotCome) {
  Bench bench(2);
  bench.send(0, bench.announce(0, 1));
  bench.send(1, bench.announce(1, 1));
  const auto grants = bench.sends(wire::MessageType::kGrant);
  bench.push(0, grants[0].header.tag, 0);
  bench.now += 10s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_NE(Bench::text(bench.sends(wire::MessageType::kError).at(0)).find("the data of rank 1 had not arrived"),
            std::string::npos);
}

TEST(ServerEngine, ACancelThatOvertakesItsAnnounceWaitsForIt) {
  Bench bench(2);
  bench.cancel(0, 5000, 0, 0, "changed my mind");
  EXPECT_TRUE(bench.actions.empty());
  bench.next_tag = 5000;
  bench.send(0, bench.announce(0, 1));
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(Bench::text(errors[0]), "changed my mind");
  bench.send(1, bench.announce(1, 1));
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 1u) << "the other one hears the same";
}

TEST(ServerEngine, CreditsComeInBatches) {
  Bench bench(1);
  bench.config.announce_credits = 8;
  bench.build();
  std::uint32_t credited = 0;
  std::uint32_t messages = 0;
  for (std::uint64_t i = 0; i < 16; ++i) {
    bench.op = i + 1;
    bench.send(0, bench.announce(0, 1));
    for (const SendAction& credit : bench.sends(wire::MessageType::kCredit)) {
      ++messages;
      credited += credit.header.count;
    }
    bench.sent_all();
  }
  EXPECT_EQ(messages, 4u);
  EXPECT_EQ(credited, 16u);
}

/// A worker that ignores its credits must not be able to make a lane remember more for it.
TEST(ServerEngine, AnnouncesBeyondTheCreditsAreDroppedAndTheirWorkerIsNamed) {
  Bench bench(2);
  bench.config.announce_credits = 4;
  bench.build();
  for (bench.op = 1; bench.op <= 100; ++bench.op) bench.send(1, bench.announce(1, 1));
  // Two Credits' worth of room came back with the first; it is still on its way, so no more follow.
  EXPECT_EQ(bench.engine->stats().over_credit, 100u - 6);
  EXPECT_EQ(bench.engine->stats().over_credit_by, PeerId{1});
  EXPECT_EQ(bench.engine->stats().messages_rejected, 100u - 6);
  // Nor by leaving gaps, or by giving up what it has not announced.
  wire::Header far = bench.header(1, wire::MessageType::kCancel);
  far.tag = 5;
  for (std::uint64_t number = 6; number < 2000; ++number) {
    far.offset = number;
    bench.control(far, std::vector<std::byte>(1000, std::byte{2}));
  }
  EXPECT_EQ(bench.engine->stats().over_credit, 94u + 1994);
  // Another worker is not concerned.
  bench.op = 1;
  bench.send(0, bench.announce(0, 1));
  EXPECT_EQ(bench.sends(wire::MessageType::kGrant).size(), 2u);
}

TEST(ServerEngine, CreditsGoOnWhenTheLastOnesAreSent) {
  Bench bench(2);
  bench.config.announce_credits = 4;
  bench.build();
  std::uint64_t credits = 4;
  for (bench.op = 1; bench.op <= 100; ++bench.op) {
    ASSERT_GT(credits, 0u);
    --credits;
    bench.send(1, bench.announce(1, 1));
    for (const SendAction& credit : bench.sends(wire::MessageType::kCredit)) credits += credit.header.count;
    bench.sent_all();
    for (const SendAction& credit : bench.sends(wire::MessageType::kCredit)) credits += credit.header.count;
  }
  EXPECT_EQ(bench.engine->stats().messages_rejected, 0u);
}

/// What waits for an earlier operation of its name takes memory like any other eager announce.
TEST(ServerEngine, EagerDataThatWaitsForAnEarlierOperationCountsAsUnfinished) {
  Bench bench(4);
  bench.config.eager_window = 2;
  bench.build();
  const std::vector<std::byte> data(kChunk);
  std::vector<std::size_t> errors;
  for (bench.op = 1; bench.op <= 3; ++bench.op) {
    // Contributors 0 and 1 are two processes each, which own a chunk each; only those of the first chunk push.
    const auto owner = [&](std::uint32_t worker) {
      wire::Announce announce = bench.announce(worker, 2);
      announce.contributor = worker / 2;
      announce.contributor_count = 2;
      announce.owned_first = worker % 2;
      announce.owned_count = 1;
      return announce;
    };
    for (std::uint32_t worker = 0; worker < 4; ++worker) bench.send(worker, owner(worker), {}, 2);
    std::map<std::uint32_t, std::uint64_t> push_tags;
    for (const SendAction& grant : bench.sends(wire::MessageType::kGrant)) push_tags[grant.to.value] = grant.header.tag;
    bench.push(0, push_tags.at(0), 0);
    bench.push(2, push_tags.at(2), 0);
    // Rank 0 has all that it waits for, and is the first to come to the next operation of the name.
    bench.send(0, owner(0), data, 2);
    errors.push_back(bench.sends(wire::MessageType::kError).size());
  }
  EXPECT_EQ(errors, (std::vector<std::size_t>{0, 0, 1}));
}

TEST(ServerEngine, OneMoreOperationThanTheLimitIsAnErrorToThatWorker) {
  Bench bench(2);
  bench.config.max_ops_per_worker = 3;
  bench.build();
  for (std::uint64_t i = 0; i < 3; ++i) {
    bench.op = i + 1;
    bench.send(0, bench.announce(0, 1));
    EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
  }
  bench.op = 4;
  bench.send(0, bench.announce(0, 1));
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 1u);
}

/// A worker that has all its Results of an operation may go on to the next one of that name, and give it up, while the
/// others still wait for theirs: what happens to the next one is no news about this one, and the other way round.
TEST(ServerEngine, GivingUpTheNextOperationOfANameLeavesTheOneThatIsUnderWay) {
  Bench bench(4);
  // Contributors 0 and 1 are two processes each, which own a chunk each.
  const auto owner = [&](std::uint32_t worker) {
    wire::Announce announce = bench.announce(worker, 2);
    announce.contributor = worker / 2;
    announce.contributor_count = 2;
    announce.first_rank = worker / 2 * 2;
    announce.rank_count = 2;
    announce.owned_first = worker % 2;
    announce.owned_count = 1;
    return announce;
  };
  std::vector<std::uint64_t> tags;
  for (std::uint32_t worker = 0; worker < 4; ++worker) tags.push_back(bench.send(worker, owner(worker), {}, 2));
  std::map<std::uint32_t, std::uint64_t> push_tags;
  for (const SendAction& grant : bench.sends(wire::MessageType::kGrant)) push_tags[grant.to.value] = grant.header.tag;
  bench.push(0, push_tags.at(0), 0);
  bench.push(2, push_tags.at(2), 0);
  EXPECT_EQ(bench.sends(wire::MessageType::kResult).size(), 2u);
  // Worker 0 gives up the next operation of the key, which it has not announced.
  wire::Header next = bench.header(0, wire::MessageType::kCancel);
  next.offset = 2;
  next.count = 2;
  const std::byte reason[] = {static_cast<std::byte>(Code::kCancelled), std::byte{'n'}};
  bench.control(next, reason);
  EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
  // The present one is still known: who gives it up fails it for those who wait.
  bench.cancel(1, tags[1], 0, 0, "enough");
  std::map<std::uint32_t, std::uint64_t> errors;
  for (const SendAction& error : bench.sends(wire::MessageType::kError)) errors[error.to.value] = error.header.tag;
  EXPECT_EQ(errors, (std::map<std::uint32_t, std::uint64_t>{{0, tags[0]}, {1, tags[1]}, {2, tags[2]}, {3, tags[3]}}));
}

TEST(ServerEngine, RemembersABoundedNumberOfFailuresForABoundedTime) {
  Bench bench(2);
  bench.config.max_tombstones = 3;
  bench.build();
  std::vector<std::uint64_t> tags;
  for (std::uint64_t i = 1; i <= 5; ++i) {
    bench.op = i;
    const std::uint64_t tag = bench.send(0, bench.announce(0, 1));
    bench.cancel(0, tag, i - 1, 0, "stop");
  }
  bench.op = 1;  // Forgotten: waits like any other.
  bench.send(1, bench.announce(1, 1));
  EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
  bench.op = 5;  // Remembered.
  bench.send(1, bench.announce(1, 1));
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 1u);
  bench.now += bench.config.max_tombstone;
  bench.engine->on_tick(bench.now);
  bench.collect();
  bench.op = 4;
  bench.send(1, bench.announce(1, 1));
  EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
}

TEST(ServerEngine, ALostWorkerFailsWhatWaitsForItAndItsMessagesAreIgnored) {
  Bench bench(2);
  bench.send(0, bench.announce(0, 1));
  bench.engine->on_peer_lost(bench.now, PeerId{1}, "worker 1 closed its connection");
  bench.collect();
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(static_cast<Code>(errors[0].body[0]), Code::kPeerLost);
  EXPECT_EQ(Bench::text(errors[0]), "worker 1 closed its connection");
  bench.send(1, bench.announce(1, 1));
  EXPECT_TRUE(bench.actions.empty());
  EXPECT_EQ(bench.engine->stats().messages_rejected, 1u);
}

TEST(ServerEngine, AWorkerThatLeftWithoutJoiningFailsWhatWaitsForItAndLaterToo) {
  Bench bench(2);
  bench.send(0, bench.announce(0, 1));
  bench.engine->on_peer_left(bench.now, PeerId{1}, "worker 1 has left the job");
  bench.collect();
  auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(static_cast<Code>(errors[0].body[0]), Code::kPeerLost);
  EXPECT_EQ(Bench::text(errors[0]), "worker 1 has left the job");
  bench.op = 2;
  bench.send(0, bench.announce(0, 1));  // It had not heard yet.
  errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(Bench::text(errors[0]), "worker 1 has left the job");
}

}  // namespace
}  // namespace herring::server
