#include "control/membership.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "control/membership_job.h"

namespace herring::control {
namespace {

/// Worker 0's process holds the hub. Its user's script may end it as soon as it hears of a loss, and with it the hub:
/// who has not been told by then would blame worker 0.
TEST(Membership, WorkerZeroHearsOfALossAfterAllOthers) {
  Job job(4, 1);
  job.join_all();
  for (const ConnectionId id : {1u, 3u, 4u, 5u}) job.exchange(id, "round", "x");
  job.sent.clear();
  job.disconnect(2);
  for (const FrameType type : {FrameType::kEvent, FrameType::kExchangeFailed}) {
    std::vector<ConnectionId> told;
    for (const auto& [id, frame] : job.sent) {
      if (frame.type == type) told.push_back(id);
    }
    EXPECT_EQ(told.size(), 4u);
    EXPECT_EQ(told.back(), 1u);
  }
}

TEST(Membership, StartsWhenTheLastHasJoinedWhateverTheOrder) {
  Job job(2, 1);
  job.join(10, Job::server(0));
  job.join(11, Job::worker(1));
  EXPECT_FALSE(job.membership.started());
  EXPECT_TRUE(job.frames(10, FrameType::kRoster).empty());
  job.join(12, Job::worker(0));
  EXPECT_TRUE(job.membership.started());
  for (const ConnectionId id : {10, 11, 12}) {
    const auto rosters = job.frames(id, FrameType::kRoster);
    ASSERT_EQ(rosters.size(), 1u);
    const auto roster = decode_roster(rosters[0].body);
    ASSERT_TRUE(roster);
    EXPECT_EQ(roster->job_id, 77u);
    ASSERT_EQ(roster->members.size(), 3u);
    EXPECT_EQ(roster->members[0].pid, 100u);
    EXPECT_EQ(roster->members[2].pid, 200u);
  }
}

TEST(Membership, NamesWhoIsMissing) {
  Job job(6, 2);
  job.join(1, Job::worker(0));
  job.join(2, Job::worker(5));
  job.join(3, Job::server(1));
  EXPECT_EQ(job.missing(1, ""), "waiting for workers 1-4 and server 0; 3 of 8 are here");
  job.membership.note_failed_handshake();
  EXPECT_NE(job.missing(1, "").find("HERRING_SECRET"), std::string::npos);
}

// Without it those who are there wait for the join's whole time-out, two minutes, for a process that is dead.
TEST(Membership, WhoDiesBeforeTheStartAndDoesNotComeBackEndsTheStart) {
  Job job(3, 0);
  job.join(1, Job::worker(0));
  job.join(2, Job::worker(1));
  job.pass(50ms, {1, 2});
  job.disconnect(2);
  job.pass(200ms, {1});
  EXPECT_TRUE(job.events(1).empty()) << "another process may still take its place";
  job.pass(200ms, {1});
  const auto events = job.events(1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, HubEvent::Kind::kLost);
  EXPECT_NE(events[0].reason.find("worker 1 (pid 101 on node) is lost: connection closed"), std::string::npos)
      << events[0].reason;
  EXPECT_NE(events[0].reason.find("last heard from 0.1 s before"), std::string::npos) << events[0].reason;
  job.join(3, Job::worker(2));
  EXPECT_EQ(job.refusal(3).code, RefuseCode::kLost);
  job.pass(1s, {1});
  EXPECT_EQ(job.events(1).size(), 1u) << "said once";
}

TEST(Membership, WhoComesBackInTimeBeforeTheStartEndsNothing) {
  Job job(3, 0);
  job.join(1, Job::worker(0));
  job.join(2, Job::worker(1));
  job.disconnect(2);
  job.pass(100ms, {1});
  job.join(3, Job::worker(1));
  job.pass(1s, {1, 3});
  job.join(4, Job::worker(2));
  EXPECT_TRUE(job.membership.started());
  EXPECT_TRUE(job.events(1).empty());
}

TEST(Membership, WhoIsSilentBeforeTheStartEndsIt) {
  Job job(3, 0);
  job.join(1, Job::worker(0));
  job.join(2, Job::worker(1));
  job.pass(500ms, {1});
  const auto events = job.events(1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_NE(events[0].reason.find("worker 1 (pid 101 on node) is lost: silent for 0.3 s"), std::string::npos)
      << events[0].reason;
}

// Everybody's time is up at about the same moment: those who gave up a little earlier are not whom the job lacks.
TEST(Membership, WhoGaveUpWaitingIsNotNamedAsMissing) {
  Job job(3, 0);
  job.join(1, Job::worker(0));
  job.join(2, Job::worker(1));
  job.receive(2, FrameType::kLeave);
  EXPECT_EQ(job.missing(1, ""), "waiting for worker 2; 2 of 3 are here");
}

TEST(Membership, ManyMissingRanksStayReadable) {
  std::vector<bool> here(200, false);
  for (std::size_t i = 0; i < here.size(); i += 2) here[i] = true;
  const std::string text = waiting_text(here, 200, "are here");
  EXPECT_EQ(text, "waiting for workers 1, 3, 5, 7, 9, 11, 13, 15 and 92 more; 100 of 200 are here");
}

TEST(Membership, RefusesWithBothValues) {
  Job job(2, 0);
  job.join(1, Job::worker(0));
  job.membership.join(2, Join{Job::worker(1), 4, 3}, job.now);
  job.collect();
  EXPECT_EQ(job.refusal(2).code, RefuseCode::kSizes);
  EXPECT_NE(job.refusal(2).text.find("4 workers and 3 servers"), std::string::npos) << job.refusal(2).text;
  EXPECT_NE(job.refusal(2).text.find("2 workers and 0 servers"), std::string::npos) << job.refusal(2).text;

  Member twin = Job::worker(0);
  twin.pid = 555;
  job.join(3, twin);
  EXPECT_EQ(job.refusal(3).code, RefuseCode::kRankTaken);
  EXPECT_NE(job.refusal(3).text.find("pid 555"), std::string::npos);
  EXPECT_NE(job.refusal(3).text.find("pid 100"), std::string::npos);

  job.join(4, Job::worker(9));
  EXPECT_EQ(job.refusal(4).code, RefuseCode::kRankRange);
  job.join(5, Job::server(0));
  EXPECT_EQ(job.refusal(5).code, RefuseCode::kRankRange);
  EXPECT_EQ(job.closed, (std::vector<ConnectionId>{2, 3, 4, 5}));

  job.join(6, Job::worker(1));
  EXPECT_TRUE(job.membership.started());
  job.join(7, Job::worker(1));
  EXPECT_EQ(job.refusal(7).code, RefuseCode::kStarted);
  EXPECT_EQ(job.membership.counters().refused, 5u);
}

TEST(Membership, AProcessThatDiesWhileJoiningMayComeBack) {
  Job job(2, 0);
  job.join(1, Job::worker(0));
  job.disconnect(1);
  EXPECT_EQ(job.membership.connected(), 0u);
  job.join(2, Job::worker(1));
  EXPECT_FALSE(job.membership.started());
  job.join(3, Job::worker(0));
  EXPECT_TRUE(job.membership.started());
  EXPECT_TRUE(job.events(2).empty());
}

/// Else the hub's thread takes a core for itself as long as the job lives.
TEST(Membership, AfterAReturnBeforeTheStartNothingIsDueInThePast) {
  Job job(2, 0);
  job.join(1, Job::worker(1));
  job.disconnect(1);
  job.join(2, Job::worker(1));
  job.join(3, Job::worker(0));
  ASSERT_TRUE(job.membership.started());
  job.pass(1s, {2, 3});
  job.tick();
  EXPECT_GT(job.membership.next_wakeup(), job.now);
}

// What a peer sends is shown to people: in errors, and by tools that list members.
TEST(HubProtocol, TextsOfPeersSteerNoTerminal) {
  const std::string rude = "\x1B[2J caf\xC3\xA9 \xFF";
  const std::string shown = "?[2J caf\xC3\xA9 ?";
  const auto join = decode_join(encode(Join{{Role::kWorker, 1, 7, "id", rude}, 2, 0}));
  ASSERT_TRUE(join);
  EXPECT_EQ(join->member.host_name, shown);
  EXPECT_EQ(decode_event(encode(Event{HubEvent::Kind::kFailed, 0, rude}))->reason, shown);
  EXPECT_EQ(decode_refuse(encode(Refuse{RefuseCode::kSizes, rude}))->text, shown);
  EXPECT_EQ(decode_text(encode_text(rude)), shown);
  const Member member{Role::kWorker, 0, 7, "id", rude};
  EXPECT_EQ(decode_roster(encode_roster(1, std::span(&member, 1)).front())->hosts.front().name, shown);
}

TEST(Membership, EverySurvivorSeesTheSameEventsInTheSameOrder) {
  Job job(5, 0);
  job.join_all();
  job.receive(3, FrameType::kFail, encode_text("out of memory"));
  job.disconnect(2);
  job.receive(4, FrameType::kLeave);
  job.disconnect(3);  // Failed before: no second event.
  const auto one = job.events(1);
  const auto five = job.events(5);
  ASSERT_EQ(one.size(), 3u);
  EXPECT_EQ(one[0].kind, HubEvent::Kind::kFailed);
  EXPECT_EQ(one[0].index, 2u);
  EXPECT_EQ(one[0].reason, "out of memory");
  EXPECT_EQ(one[1].kind, HubEvent::Kind::kLost);
  EXPECT_EQ(one[1].index, 1u);
  EXPECT_EQ(one[2].kind, HubEvent::Kind::kLeft);
  EXPECT_EQ(one[2].index, 3u);
  ASSERT_EQ(five.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(five[i].index, one[i].index);
}

TEST(Membership, WhoLeavesAGroupStaysInTheJobAndTheOthersHearHowFarItCame) {
  Job job(3, 0);
  job.join_all();
  job.receive(2, FrameType::kLeaveGroup, encode(LeaveGroup{{GroupId{7}, 2}, 41}));
  for (const ConnectionId other : {1, 3}) {
    const auto events = job.events(other);
    ASSERT_EQ(events.size(), 1u) << other;
    EXPECT_EQ(events[0].kind, HubEvent::Kind::kGroupLeft);
    EXPECT_EQ(events[0].index, 1u);
    EXPECT_EQ(events[0].group, (UsedGroup{GroupId{7}, 2}));
    EXPECT_EQ(events[0].calls, 41u);
  }
  EXPECT_TRUE(job.events(2).empty());
  EXPECT_FALSE(decode_leave_group(encode(LeaveGroup{{GroupId{0}, 0}, 1})));
}

TEST(Membership, WhoAbortsAGroupStaysInTheJobAndTheOthersHear) {
  Job job(3, 1);
  job.join_all();
  job.receive(2, FrameType::kAbortGroup, encode(AbortGroup{{GroupId{7}, 2}, "enough"}));
  for (const ConnectionId other : {1, 3, 4}) {
    const auto events = job.events(other);
    ASSERT_EQ(events.size(), 1u) << other;
    EXPECT_EQ(events[0].kind, HubEvent::Kind::kGroupAborted);
    EXPECT_EQ(events[0].index, 1u);
    EXPECT_EQ(events[0].reason, "enough");
    EXPECT_EQ(events[0].group, (UsedGroup{GroupId{7}, 2}));
  }
  EXPECT_TRUE(job.events(2).empty());
  EXPECT_FALSE(decode_abort_group(encode(AbortGroup{{GroupId{0}, 0}, "all"})))
      << "the whole job has another way to end";
  job.receive(2, FrameType::kLeave);
  EXPECT_EQ(job.events(1).back().kind, HubEvent::Kind::kLeft) << "its place in the job was not touched";
}

// It has done all that it will do: who still waits for it need not wait until it is gone.
TEST(Membership, WhoWaitsToSayGoodbyeIsAnnouncedToThoseWhoDoNot) {
  Job job(4, 0);
  job.join_all();
  job.receive(2, FrameType::kExchange, encode(Exchange{std::string(Membership::kGoodbyeRound), {}}));
  job.receive(3, FrameType::kExchange, encode(Exchange{std::string(Membership::kGoodbyeRound), {}}));
  EXPECT_TRUE(job.events(1).empty()) << "at the end of a job all come at about the same time";
  job.now += Membership::kGoodbyePatience;
  job.tick();
  for (const ConnectionId other : {1, 4}) {
    const auto events = job.events(other);
    ASSERT_EQ(events.size(), 2u) << other;
    EXPECT_EQ(events[0].kind, HubEvent::Kind::kFinished);
    EXPECT_EQ(events[0].index, 1u);
    EXPECT_EQ(events[1].index, 2u);
  }
  EXPECT_TRUE(job.events(2).empty());
  EXPECT_TRUE(job.events(3).empty());
  job.receive(2, FrameType::kLeave);
  EXPECT_EQ(job.events(1).back().kind, HubEvent::Kind::kLeft);
}

TEST(Membership, ASilentMemberIsLostAndAnAnsweringOneIsNot) {
  Job job(3, 0);
  job.join_all();
  job.pass(2s, {1, 2, 3});
  EXPECT_TRUE(job.events(1).empty());
  const Instant silent_from = job.now;
  job.pass(250ms, {1, 3});
  EXPECT_TRUE(job.events(1).empty());
  job.pass(150ms, {1, 3});
  const auto events = job.events(1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].index, 1u);
  EXPECT_EQ(events[0].reason, "silent for 0.3 s");
  EXPECT_LE(job.now - silent_from, 400ms);
  EXPECT_EQ(job.closed, std::vector<ConnectionId>{2});
  EXPECT_EQ(job.frames(2, FrameType::kClosing).size(), 1u);
}

// A member that is being sent much answers a ping only after all of that.
TEST(Membership, WhoTakesWhatItIsSentIsAliveThoughItAnswersNothing) {
  Job job(2, 0);
  job.join_all();
  for (int i = 0; i < 20; ++i) {
    job.pass(100ms, {1});
    job.membership.alive(2, job.now);
  }
  EXPECT_TRUE(job.events(1).empty());
  job.pass(400ms, {1});
  ASSERT_EQ(job.events(1).size(), 1u);
  EXPECT_NE(job.events(1)[0].reason.find("silent for"), std::string::npos);
}

TEST(Membership, AStalledHubBlamesNobody) {
  Job job(2, 0);
  job.join_all();
  job.pass(500ms, {1, 2});
  job.now += 1h;  // The hub's process was stopped.
  job.tick();
  EXPECT_TRUE(job.events(1).empty());
  job.pass(350ms, {1});  // Now it counts again.
  ASSERT_EQ(job.events(1).size(), 1u);
  EXPECT_EQ(job.events(1)[0].index, 1u);
}

TEST(Membership, PingsEachMemberOncePerHeartbeat) {
  Job job(4, 0);
  job.join_all();
  job.pass(1s, {1, 2, 3, 4});
  for (const ConnectionId id : {1, 2, 3, 4}) EXPECT_EQ(job.frames(id, FrameType::kPing).size(), 10u);
}

TEST(Membership, GathersBlobsInIndexOrder) {
  Job job(2, 1);
  job.join_all();
  job.exchange(3, "a", "server");
  job.exchange(2, "a", "");
  EXPECT_EQ(job.missing(2, "a"), "waiting for worker 0; 2 of 3 have brought theirs");
  job.exchange(1, "b", "x");  // Another name does not disturb it.
  job.exchange(1, "a", "zero");
  for (const ConnectionId id : {1, 2, 3}) {
    const auto frames = job.frames(id, FrameType::kGathered);
    ASSERT_EQ(frames.size(), 1u);
    const auto gathered = decode_gathered(frames[0].body);
    ASSERT_TRUE(gathered);
    EXPECT_EQ(gathered->name, "a");
    ASSERT_EQ(gathered->blobs.size(), 3u);
    EXPECT_EQ(gathered->blobs[0].size(), 4u);
    EXPECT_EQ(gathered->blobs[1].size(), 0u);
    EXPECT_EQ(gathered->blobs[2].size(), 6u);
  }
  // The name is free again.
  for (const ConnectionId id : {1, 2, 3}) job.exchange(id, "a", "second");
  EXPECT_EQ(job.membership.counters().exchanges, 2u);
}

TEST(Membership, ALostMemberFailsTheRoundsThatNeedIt) {
  Job job(3, 0);
  job.join_all();
  job.exchange(1, "needs-2", "x");
  job.exchange(2, "has-2", "x");
  job.exchange(1, "has-2", "x");
  job.disconnect(2);
  ASSERT_EQ(job.frames(1, FrameType::kExchangeFailed).size(), 1u);
  const auto failed = decode_exchange_failed(job.frames(1, FrameType::kExchangeFailed)[0].body);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->name, "needs-2");
  EXPECT_EQ(failed->index, 1u);
  EXPECT_EQ(failed->text, "worker 1 (pid 101 on node) is lost: connection closed; last heard from 0.0 s before");
  EXPECT_TRUE(job.frames(3, FrameType::kExchangeFailed).empty()) << "worker 2 does not wait for it";
  job.exchange(3, "has-2", "x");  // All three have brought theirs: it completes for those who are here.
  EXPECT_EQ(job.frames(1, FrameType::kGathered).size(), 1u);
  EXPECT_EQ(job.frames(3, FrameType::kGathered).size(), 1u);
  job.exchange(3, "needs-2", "x");  // Late: told at once.
  EXPECT_EQ(job.frames(3, FrameType::kExchangeFailed).size(), 1u);
}

TEST(Membership, NobodyWaitsForTheGoodbyeOfAServerThatIsGone) {
  Job job(2, 2);
  job.join_all();
  job.exchange(1, "goodbye", "a");
  job.disconnect(3);  // Server 0.
  EXPECT_TRUE(job.frames(1, FrameType::kExchangeFailed).empty());
  job.exchange(4, "goodbye", "d");
  EXPECT_TRUE(job.frames(1, FrameType::kGathered).empty()) << "worker 1 is still there";
  job.exchange(2, "goodbye", "b");
  EXPECT_EQ(job.frames(1, FrameType::kGathered).size(), 1u);
  EXPECT_EQ(job.frames(4, FrameType::kGathered).size(), 1u);
  // A round that begins after the loss, and ends with one.
  job.exchange(1, "goodbye", "a");
  job.exchange(2, "goodbye", "b");
  job.disconnect(4);
  EXPECT_EQ(job.frames(1, FrameType::kGathered).size(), 2u);
  EXPECT_TRUE(job.frames(1, FrameType::kExchangeFailed).empty());
}

// At the end of a job of 10,000 the hub would write 50 million events, which nobody waits for.
TEST(Membership, WhenAllHaveSaidGoodbyeServersAloneHearWhoLeaves) {
  Job job(3, 1);
  job.join_all();
  for (const ConnectionId id : {1u, 2u, 3u, 4u}) job.exchange(id, "goodbye", "a");
  job.receive(2, FrameType::kLeave);
  EXPECT_TRUE(job.events(1).empty());
  EXPECT_TRUE(job.events(3).empty());
  ASSERT_EQ(job.events(4).size(), 1u) << "it goes when all workers have left";
  EXPECT_EQ(job.events(4)[0].index, 1u);
  job.receive(1, FrameType::kLeave);
  ASSERT_EQ(job.events(3).size(), 1u) << "the end of worker 0's process is no loss";
  EXPECT_EQ(job.events(3)[0].index, 0u);
}

TEST(Membership, WhoIsLostAfterTheGoodbyeIsStillTold) {
  Job job(3, 0);
  job.join_all();
  for (const ConnectionId id : {1u, 2u, 3u}) job.exchange(id, "goodbye", "a");
  job.disconnect(2);
  EXPECT_EQ(job.events(3).size(), 1u);
}

TEST(Membership, InALargeJobWhoWaitsToSayGoodbyeIsAnnouncedLater) {
  Job job(2000, 0);
  job.join_all();
  job.exchange(1, "goodbye", "a");
  job.now += 1s;
  job.tick();
  EXPECT_TRUE(job.events(2).empty()) << "so many come one after the other";
  job.now += 1s;
  job.tick();
  EXPECT_EQ(job.events(2).size(), 1u);
}

TEST(Membership, AMemberThatBreaksTheProtocolIsDropped) {
  Job job(3, 0);
  job.join_all();
  job.exchange(1, "a", "x");
  job.exchange(1, "a", "again");
  job.receive(2, FrameType::kWelcome);
  job.receive(2, FrameType::kPing);  // Gone already: ignored.
  EXPECT_EQ(job.closed, (std::vector<ConnectionId>{1, 2}));
  EXPECT_EQ(job.membership.counters().protocol_errors, 2u);
  ASSERT_EQ(job.events(3).size(), 2u);
  EXPECT_NE(job.events(3)[0].reason.find("second blob"), std::string::npos);
}

std::vector<std::byte> unreachable(std::vector<std::uint32_t> indices, std::uint32_t of, std::uint32_t answering = 1) {
  return encode(Unreachable{7500ms, of, answering, std::move(indices)});
}

TEST(Membership, AServerThatAWorkerCannotReachIsLostForAllAndBothEndsAreNamed) {
  Job job(3, 2);
  job.join_all();
  job.receive(2, FrameType::kUnreachable, unreachable({3}, 2));
  for (const ConnectionId id : {1, 2, 3, 5}) {
    const std::vector<Event> events = job.events(id);
    ASSERT_EQ(events.size(), 1u) << id;
    EXPECT_EQ(events[0].kind, HubEvent::Kind::kLost);
    EXPECT_EQ(events[0].index, 3u);
    EXPECT_NE(events[0].reason.find("worker 1 (pid 101 on node) cannot reach it"), std::string::npos)
        << events[0].reason;
    EXPECT_NE(events[0].reason.find("7.5 s"), std::string::npos) << events[0].reason;
  }
  ASSERT_EQ(job.frames(4, FrameType::kClosing).size(), 1u) << "the server is told why it counts as lost";
  EXPECT_FALSE(job.membership.is_member(4));
  // Others find the same a little later, and one of them another server: it goes too, whoever is left.
  job.sent.clear();
  job.receive(1, FrameType::kUnreachable, unreachable({3}, 2));
  EXPECT_TRUE(job.events(1).empty());
  job.receive(3, FrameType::kUnreachable, unreachable({4}, 1));
  ASSERT_EQ(job.events(1).size(), 1u);
  EXPECT_EQ(job.events(1)[0].index, 4u);
}

TEST(Membership, AWorkerThatReachesNoneOfSeveralServersIsTheOneToGo) {
  Job job(2, 2);
  job.join_all();
  job.receive(2, FrameType::kUnreachable, unreachable({2}, 2, 0));
  ASSERT_EQ(job.events(1).size(), 1u);
  EXPECT_EQ(job.events(1)[0].index, 1u);
  EXPECT_NE(job.events(1)[0].reason.find("it cannot reach server 0"), std::string::npos) << job.events(1)[0].reason;
  ASSERT_EQ(job.frames(2, FrameType::kClosing).size(), 1u);
  // A report that was on its way when its sender was judged changes nothing.
  job.sent.clear();
  job.receive(2, FrameType::kUnreachable, unreachable({2}, 2));
  EXPECT_TRUE(job.sent.empty());
}

TEST(Membership, AnotherWorkerThatIsNotReachedIsNamedWithWhoSaysSo) {
  Job job(3, 0);
  job.join_all();
  job.receive(2, FrameType::kUnreachable, unreachable({0}, 2));
  ASSERT_EQ(job.events(3).size(), 1u);
  EXPECT_EQ(job.events(3)[0].index, 0u);
  EXPECT_NE(job.events(3)[0].reason.find("worker 1"), std::string::npos);
  // Worker 0's process may end when it hears: everybody else hears before.
  EXPECT_EQ(job.sent.back().first, 1u);
}

TEST(Membership, ReportsAboutNobodyBreakTheProtocol) {
  for (const auto& body : {unreachable({9}, 9), unreachable({1}, 2), encode_text("nonsense"), unreachable({0, 2}, 1)}) {
    Job job(3, 0);
    job.join_all();
    job.receive(2, FrameType::kUnreachable, body);
    EXPECT_EQ(job.membership.counters().protocol_errors, 1u);
    ASSERT_EQ(job.events(1).size(), 1u);
    EXPECT_EQ(job.events(1)[0].index, 1u);
  }
}

TEST(Membership, ClosingSaysWhy) {
  Job finished(2, 0);
  finished.join_all();
  finished.receive(1, FrameType::kLeave);
  finished.membership.close();
  finished.collect();
  ASSERT_EQ(finished.frames(2, FrameType::kClosing).size(), 1u);
  EXPECT_EQ(decode_text(finished.frames(2, FrameType::kClosing)[0].body), "worker 0 has finished");
  EXPECT_EQ(finished.membership.connected(), 0u);

  Job joining(2, 0);
  joining.join(1, Job::worker(1));
  joining.membership.close();
  joining.join(2, Job::worker(0));
  EXPECT_EQ(joining.refusal(2).code, RefuseCode::kClosing);
}

TEST(Membership, HeartbeatsOfThousandsStayLinear) {
  Job job(3000, 0);
  job.join_all();
  job.pass(100ms, {});
  EXPECT_EQ(job.sent.size(), 3000u);
  job.sent.clear();
  job.disconnect(1);
  EXPECT_EQ(job.sent.size(), 2999u);
}

}  // namespace
}  // namespace herring::control
