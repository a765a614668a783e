#include "control/hub.h"

#include <dirent.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <future>

#include "control/hub_test_support.h"

namespace herring::control {
namespace {

using namespace test;

TEST(Hub, MembersJoinInAnyOrderAndKnowEachOther) {
  Hub hub(hub_options(3, 2));
  ASSERT_NE(hub.port(), 0);
  const auto members = join_all(hub.port(), 3, 2);
  for (const auto& member : members) {
    ASSERT_TRUE(member);
    EXPECT_EQ(member->job_id(), 4711u);
    ASSERT_EQ(member->workers().size(), 3u);
    ASSERT_EQ(member->servers().size(), 2u);
    EXPECT_EQ(member->workers()[2].rank, 2u);
    EXPECT_EQ(member->servers()[1].role, Role::kServer);
    EXPECT_EQ(member->servers()[1].host_identity, "this-host");
    EXPECT_EQ(member->workers()[0].pid, static_cast<std::uint32_t>(::getpid()));
    EXPECT_EQ(member->workers()[2].nodes, 0b100u);
    EXPECT_EQ(member->servers()[1].nodes, 0b10u);
  }
  EXPECT_TRUE(eventually([&] { return hub.counters().joined == 5; }));
}

TEST(Hub, AServerThatWasNotToldTheNumberOfWorkersLearnsIt) {
  Hub hub(hub_options(3, 2));
  std::vector<std::unique_ptr<HubClient>> members(5);
  in_parallel(5, [&](std::size_t i) {
    const auto role = i < 3 ? Role::kWorker : Role::kServer;
    const auto rank = static_cast<std::uint32_t>(i < 3 ? i : i - 3);
    members[i] = std::make_unique<HubClient>(member_options(hub.port(), role, rank, i == 4 ? 0 : 3, 2), in(20s));
  });
  for (const auto& member : members) {
    ASSERT_TRUE(member);
    ASSERT_EQ(member->workers().size(), 3u);
    ASSERT_EQ(member->servers().size(), 2u);
    EXPECT_EQ(member->servers()[1].rank, 1u);
  }
}

TEST(Hub, AWorkerHasToKnowTheNumberOfWorkers) {
  Hub hub(hub_options(2));
  const Status unknown = thrown_by([&] { HubClient(member_options(hub.port(), Role::kWorker, 1, 0), in(10s)); });
  EXPECT_EQ(unknown.code(), Code::kInvalidArgument);
}

TEST(Hub, TheHubMayComeLast) {
  const std::uint16_t port = free_port();
  std::promise<void> begun;
  auto joining = std::async(std::launch::async, [&] {
    begun.set_value();
    HubClient client(member_options(port, Role::kWorker, 0, 1), in(20s));
    return client.job_id();
  });
  begun.get_future().wait();
  EXPECT_EQ(joining.wait_for(100ms), std::future_status::timeout) << "there is no hub yet";
  auto options = hub_options(1);
  options.ports = {port};
  Hub hub(options);
  EXPECT_EQ(joining.get(), 4711u);
}

TEST(Hub, SixtyFourMembersJoinAndGather) {
  Hub hub(hub_options(60, 4));
  const auto members = join_all(hub.port(), 60, 4);
  in_parallel(64, [&](std::size_t i) {
    const auto blobs = members[i]->exchange("addresses", bytes_of("address of " + std::to_string(i)), in(20s));
    ASSERT_EQ(blobs.size(), 64u);
    for (std::size_t k = 0; k < 64; ++k) EXPECT_EQ(blobs[k], bytes_of("address of " + std::to_string(k)));
  });
  in_parallel(64, [&](std::size_t i) { members[i]->leave(); });
}

TEST(Hub, TheDeadlineNamesWhoIsMissing) {
  Hub hub(hub_options(3, 1));
  auto second = std::async(std::launch::async, [&] {
    return thrown_by([&] { HubClient(member_options(hub.port(), Role::kWorker, 2, 3, 1), in(600ms)); });
  });
  const Status status = thrown_by([&] { HubClient(member_options(hub.port(), Role::kWorker, 0, 3, 1), in(600ms)); });
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_NE(status.message().find("waiting for worker"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("server 0"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("of 4 are here"), std::string::npos) << status.message();
  EXPECT_EQ(second.get().code(), Code::kTimeout);
}

TEST(Hub, NoHubSaysWhereItLooked) {
  auto options = member_options(free_port(), Role::kWorker, 1, 2);
  options.ports.push_back(free_port());
  const Status status = thrown_by([&] { HubClient(options, in(200ms)); });
  EXPECT_EQ(status.code(), Code::kTimeout);
  for (const std::uint16_t port : options.ports) {
    EXPECT_NE(status.message().find(std::to_string(port) + ": connection refused"), std::string::npos)
        << status.message();
  }
  EXPECT_NE(status.message().find("127.0.0.1"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("Check that worker 0 runs"), std::string::npos) << status.message();
}

TEST(Hub, NoTimeLeftToLookIsSaidToo) {
  const Status status = thrown_by([&] { HubClient(member_options(free_port(), Role::kWorker, 1, 2), in(-1s)); });
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_NE(status.message().find("had no time left to look for the hub"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("HERRING_JOIN_TIMEOUT_S"), std::string::npos) << status.message();
}

TEST(Hub, RefusesOtherSizesAndTakenRanks) {
  Hub hub(hub_options(2));
  const Status sizes = thrown_by([&] { HubClient(member_options(hub.port(), Role::kWorker, 1, 4), in(10s)); });
  EXPECT_EQ(sizes.code(), Code::kMismatch);
  EXPECT_NE(sizes.message().find("4 workers"), std::string::npos) << sizes.message();
  EXPECT_NE(sizes.message().find("2 workers"), std::string::npos) << sizes.message();

  std::unique_ptr<HubClient> first;
  std::thread joining(
      [&] { first = std::make_unique<HubClient>(member_options(hub.port(), Role::kWorker, 1, 2), in(20s)); });
  ASSERT_TRUE(eventually([&] { return hub.counters().joined == 1; }));
  const Status taken = thrown_by([&] { HubClient(member_options(hub.port(), Role::kWorker, 1, 2), in(10s)); });
  EXPECT_EQ(taken.code(), Code::kMismatch);
  EXPECT_NE(taken.message().find("this rank is taken by worker 1"), std::string::npos) << taken.message();
  HubClient zero(member_options(hub.port(), Role::kWorker, 0, 2), in(20s));
  joining.join();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->workers().size(), 2u);

  const Status late = thrown_by([&] { HubClient(member_options(hub.port(), Role::kWorker, 1, 2), in(300ms)); });
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_NE(late.message().find("already started"), std::string::npos) << late.message();
}

TEST(Hub, AnotherSecretIsSaidClearly) {
  Hub hub(hub_options(2));
  auto options = member_options(hub.port(), Role::kWorker, 1, 2);
  options.secret = "wrong";
  const Status status = thrown_by([&] { HubClient(options, in(300ms)); });
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("the secret differs"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("HERRING_SECRET"), std::string::npos) << status.message();
  EXPECT_EQ(status.message().find("wrong"), std::string::npos) << "the secret itself is never shown";
  EXPECT_TRUE(eventually([&] { return hub.counters().failed_handshakes > 0; }));
  EXPECT_EQ(hub.counters().joined, 0u);

  // Those who wait are told that somebody failed in the handshake.
  const Status missing = thrown_by([&] { HubClient(member_options(hub.port(), Role::kWorker, 0, 2), in(200ms)); });
  EXPECT_NE(missing.message().find("HERRING_SECRET may differ there. Check that these processes"), std::string::npos)
      << missing.message();
}

TEST(Hub, TriesTheNextPortWhereAnotherProgramAnswers) {
  std::uint16_t mute = 0;
  const auto mute_service = control::listen_on("127.0.0.1", {}, mute);  // Accepts, says nothing.
  std::uint16_t chatty = 0;
  const auto chatty_service = control::listen_on("127.0.0.1", {}, chatty);
  auto foreign_options = hub_options(1);
  foreign_options.secret = "another job";
  Hub foreign(foreign_options);
  Hub hub(hub_options(1));
  std::thread talker([&] {
    if (!control::wait_for(chatty_service.get(), 1, in(20s))) return;
    const control::UniqueFd peer(::accept(chatty_service.get(), nullptr, nullptr));
    const std::string_view greeting = "SSH-2.0-OpenSSH_9.2\r\n";
    EXPECT_EQ(::write(peer.get(), greeting.data(), greeting.size()), static_cast<ssize_t>(greeting.size()));
    char byte = 0;
    while (::read(peer.get(), &byte, 1) > 0) continue;
  });
  auto options = member_options(hub.port(), Role::kWorker, 0, 1);
  options.ports = {chatty, mute, foreign.port(), hub.port()};
  const HubClient client(options, in(20s));
  EXPECT_EQ(client.job_id(), 4711u);
  talker.join();
}

TEST(Hub, AProcessThatDiedWhileJoiningMayBeRestarted) {
  auto options = hub_options(2);
  options.ports = {free_port()};
  Child doomed([port = options.ports[0]] { HubClient(member_options(port, Role::kWorker, 1, 2), in(60s)); });
  Hub hub(options);
  ASSERT_TRUE(eventually([&] { return hub.counters().joined == 1; }));
  doomed.signal(SIGKILL);
  doomed.wait();
  ASSERT_TRUE(eventually([&] { return hub.counters().lost == 1; }));
  const auto members = join_all(hub.port(), 2);
  EXPECT_EQ(members[0]->workers()[1].pid, static_cast<std::uint32_t>(::getpid()));
}

// Else those who joined wait for the whole join time-out, two minutes, for a process that is dead.
TEST(Hub, AProcessThatDiedWhileJoiningAndIsNotRestartedEndsTheStart) {
  auto options = hub_options(3);
  options.ports = {free_port()};
  options.dead_after = kSanitized ? 1500ms : 500ms;
  Child doomed([port = options.ports[0]] { HubClient(member_options(port, Role::kWorker, 1, 3), in(60s)); });
  Hub hub(options);
  ASSERT_TRUE(eventually([&] { return hub.counters().joined == 1; }));
  doomed.signal(SIGKILL);
  doomed.wait();
  const Status status = thrown_by([&] { HubClient(member_options(hub.port(), Role::kWorker, 0, 3), in(60s)); });
  EXPECT_EQ(status.code(), Code::kPeerLost) << status.message();
  EXPECT_NE(status.message().find("worker 1 (pid "), std::string::npos) << status.message();
  EXPECT_NE(status.message().find(" is lost: connection "), std::string::npos) << status.message();
  const Status later = thrown_by([&] { HubClient(member_options(hub.port(), Role::kWorker, 2, 3), in(60s)); });
  EXPECT_EQ(later.code(), Code::kPeerLost) << "who comes too late hears it as well: " << later.message();
}

TEST(Hub, AHubThatDiedBeforeTheStartAndIsNotRestartedEndsIt) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    const std::uint16_t port = free_port();
    int pipes[2];
    ASSERT_EQ(::pipe(pipes), 0);
    Child process([port, pipes] {
      auto options = hub_options(2);
      options.ports = {port};
      options.dead_after = kSanitized ? 1500ms : 500ms;
      Hub hub(options);
      if (!eventually([&] { return hub.counters().joined == 1; }, 60s) || ::write(pipes[1], "1", 1) != 1) return;
      wait_to_be_killed();
    });
    ::close(pipes[1]);
    Status status;
    std::thread member([&status, port] {
      status = thrown_by([port] { HubClient(member_options(port, Role::kWorker, 1, 2), in(60s)); });
    });
    char joined = 0;
    EXPECT_EQ(::read(pipes[0], &joined, 1), 1);
    ::close(pipes[0]);
    process.signal(signal);
    member.join();
    EXPECT_EQ(status.code(), Code::kPeerLost) << status.message();
    EXPECT_NE(status.message().find("worker 0, which runs the job's hub, is lost"), std::string::npos)
        << status.message();
  }
}

TEST(Hub, PortsAreTakenInOrder) {
  auto options = hub_options(1);
  options.ports = {free_port()};
  Hub first(options);
  EXPECT_EQ(first.port(), options.ports[0]);
  const Status status = thrown_by([&] { Hub second(options); });
  EXPECT_EQ(status.code(), Code::kTransport);
  EXPECT_NE(status.message().find(std::to_string(first.port())), std::string::npos) << status.message();
  options.ports.push_back(0);
  Hub third(options);
  EXPECT_NE(third.port(), first.port());
}

// What a user would lose: two jobs by hand at one MASTER_PORT, whose members go to either hub.
TEST(Hub, WorkerZeroFindsTheHubOfAnotherJobAtAnyOfItsPorts) {
  auto options = hub_options(2);
  options.ports = {free_port(), free_port(), free_port()};
  options.lead = Member{Role::kWorker, 0, 4242, "this-host", "node"};
  auto other = options;
  other.lead->pid = 4343;
  for (const std::size_t place : {0, 2}) {
    auto first_options = options;
    first_options.ports = {options.ports[place]};
    const Hub first(first_options);
    const Status status = thrown_by([&] { const Hub second(other); });
    EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
    for (const std::string& part : {std::to_string(options.ports[place]), std::string("pid 4242"),
                                    std::string("pid 4343"), std::string("MASTER_PORT of its own")}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
  }
  auto foreign = options;
  foreign.secret = "another job";
  const Hub stranger(foreign);
  const Hub hub(other);
  EXPECT_EQ(hub.port(), options.ports[1]) << "a hub with another secret is as any other program";
}

TEST(Hub, WorkerZeroGoesPastTheHubOfAJobThatIsOver) {
  auto options = hub_options(2);
  options.ports = {free_port(), free_port()};
  options.lead = Member{Role::kWorker, 0, 4242, "this-host", "node"};
  const Hub ending(options);
  auto members = join_all_as(options, 4242);
  members[1].reset();
  ASSERT_EQ(next_event(*members[0]).kind, HubEvent::Kind::kLeft);
  auto again = options;
  again.lead->pid = 4343;
  const Hub hub(again);
  EXPECT_EQ(hub.port(), options.ports[1]);
}

// It is known at the first try. Waiting for the join time-out, two minutes, helps nobody.
TEST(Hub, AnotherSecretAtOneOfSeveralPortsIsSaidInSeconds) {
  auto options = hub_options(2);
  options.ports = {free_port()};
  options.master_port = 29500;
  const Hub hub(options);
  auto member = member_options(hub.port(), Role::kWorker, 1, 2);
  member.ports = {hub.port(), free_port(), free_port()};
  member.secret = "wrong";
  member.master_port = 29500;
  const Instant begun = Clock::now();
  const Status status = thrown_by([&] { HubClient(member, in(30s)); });
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("the secret differs"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("HERRING_SECRET"), std::string::npos) << status.message();
  EXPECT_LT(Clock::now() - begun, 6s);

  // The hub of a job with another MASTER_PORT may sit there, and ours come at the next port.
  member.master_port = 29501;
  EXPECT_GE(seconds_until_thrown([&] { HubClient(member, in(3s)); }), 2.9);
}

TEST(Hub, BadOptionsAreNamed) {
  auto options = hub_options(0);
  EXPECT_EQ(thrown_by([&] { Hub hub(options); }).code(), Code::kInvalidArgument);
  options = hub_options(1);
  options.dead_after = options.heartbeat;
  EXPECT_EQ(thrown_by([&] { Hub hub(options); }).code(), Code::kInvalidArgument);
  auto member = member_options(1, Role::kServer, 0, 1, 0);
  EXPECT_EQ(thrown_by([&] { HubClient(member, in(1s)); }).code(), Code::kInvalidArgument);
  member = member_options(0, Role::kWorker, 0, 1);
  EXPECT_EQ(thrown_by([&] { HubClient(member, in(1s)); }).code(), Code::kInvalidArgument);
}

TEST(HubExchange, ManyNamesFromManyThreads) {
  Hub hub(hub_options(2, 1));
  const auto members = join_all(hub.port(), 2, 1);
  in_parallel(12, [&](std::size_t i) {
    const std::size_t member = i % 3;
    const std::string name = "name " + std::to_string(i / 3);
    for (int round = 0; round < 5; ++round) {  // The same name again is a new round.
      const std::string own = name + "/" + std::to_string(round) + "/" + std::to_string(member);
      const auto blobs = members[member]->exchange(name, bytes_of(own), in(20s));
      ASSERT_EQ(blobs.size(), 3u);
      for (std::size_t k = 0; k < 3; ++k) {
        EXPECT_EQ(blobs[k], bytes_of(name + "/" + std::to_string(round) + "/" + std::to_string(k)));
      }
    }
  });
  EXPECT_TRUE(eventually([&] { return hub.counters().exchanges == 20; }));
}

TEST(HubExchange, BlobsOfAMebibyteAndOfNothing) {
  constexpr std::size_t kMembers = 4;
  Hub hub(hub_options(kMembers));
  const auto members = join_all(hub.port(), kMembers);
  in_parallel(kMembers, [&](std::size_t i) {
    const std::vector<std::byte> blob(i == 1 ? 0 : control::kMaxBlob, static_cast<std::byte>(i + 1));
    const auto blobs = members[i]->exchange(std::string(255, 'n'), blob, in(30s));
    ASSERT_EQ(blobs.size(), kMembers);
    for (std::size_t k = 0; k < kMembers; ++k) {
      ASSERT_EQ(blobs[k].size(), k == 1 ? 0 : control::kMaxBlob);
      EXPECT_TRUE(std::all_of(blobs[k].begin(), blobs[k].end(), [&](auto b) { return b == std::byte(k + 1); }));
    }
  });
  const std::vector<std::byte> too_big(control::kMaxBlob + 1);
  EXPECT_EQ(thrown_by([&] { members[0]->exchange("x", too_big, in(1s)); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(thrown_by([&] { members[0]->exchange("", {}, in(1s)); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(thrown_by([&] { members[0]->exchange(std::string(256, 'n'), {}, in(1s)); }).code(), Code::kInvalidArgument);
}

TEST(HubExchange, ATimeoutNamesWhoHasNotCome) {
  Hub hub(hub_options(3));
  const auto members = join_all(hub.port(), 3);
  auto other =
      std::async(std::launch::async, [&] { return thrown_by([&] { members[2]->exchange("plan", {}, in(10s)); }); });
  const Status status = thrown_by([&] { members[0]->exchange("plan", {}, in(300ms)); });
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_NE(status.message().find("\"plan\""), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("waiting for worker 1"), std::string::npos) << status.message();
  // This member gave up on the name; the round itself goes on for the others.
  EXPECT_EQ(thrown_by([&] { members[0]->exchange("plan", {}, in(1s)); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(members[1]->exchange("plan", {}, in(10s)).size(), 3u);
  EXPECT_TRUE(other.get().is_ok());
}

TEST(HubExchange, FailsForAllWhenOneIsGone) {
  Hub hub(hub_options(3));
  auto members = join_all(hub.port(), 3);
  auto waiting =
      std::async(std::launch::async, [&] { return thrown_by([&] { members[0]->exchange("a", {}, in(20s)); }); });
  members[1]->leave();
  const Status early = waiting.get();
  EXPECT_EQ(early.code(), Code::kPeerLost);
  EXPECT_NE(early.message().find("worker 1"), std::string::npos) << early.message();
  EXPECT_NE(early.message().find("has left"), std::string::npos) << early.message();
  const Status late = thrown_by([&] { members[2]->exchange("b", {}, in(20s)); });
  EXPECT_EQ(late.code(), Code::kPeerLost);
  EXPECT_EQ(thrown_by([&] { members[1]->exchange("c", {}, in(20s)); }).code(), Code::kShutdown);
}

TEST(HubEvents, LeavingAndFailingReachAllInOneOrder) {
  Hub hub(hub_options(4));
  auto members = join_all(hub.port(), 4);
  members[3]->report_failure("cannot allocate");
  EXPECT_EQ(next_event(*members[0]).kind, HubEvent::Kind::kFailed);
  EXPECT_EQ(next_event(*members[2]).kind, HubEvent::Kind::kFailed);
  members[2]->leave();
  members[2]->leave();  // Idempotent.
  const HubEvent left = next_event(*members[0]);
  EXPECT_EQ(left.kind, HubEvent::Kind::kLeft);
  EXPECT_EQ(left.member.rank, 2u);
  const HubEvent failed = next_event(*members[1]);
  EXPECT_EQ(failed.kind, HubEvent::Kind::kFailed);
  EXPECT_EQ(failed.member.rank, 3u);
  EXPECT_EQ(failed.reason, "cannot allocate");
  EXPECT_EQ(next_event(*members[1]).member.rank, 2u);
  const HubEvent own = next_event(*members[3]);
  EXPECT_EQ(own.kind, HubEvent::Kind::kFailed) << "another thread of it may not know";
  EXPECT_EQ(own.member.rank, 3u);
  EXPECT_EQ(own.reason, "cannot allocate");
  EXPECT_EQ(next_event(*members[3]).member.rank, 2u) << "a failed member still hears of the others";
  members[1]->leave();
  EXPECT_EQ(next_event(*members[0]).member.rank, 1u);
  HubEvent none;
  EXPECT_FALSE(members[2]->next_event(none)) << "one that left hears nothing";
  EXPECT_FALSE(members[0]->next_event(none));
}

TEST(HubEvents, AHubThatGoesSaysWhy) {
  auto hub = std::make_unique<Hub>(hub_options(3));
  auto members = join_all(hub->port(), 3);
  members[0]->leave();
  EXPECT_EQ(next_event(*members[1]).kind, HubEvent::Kind::kLeft);
  hub.reset();
  const HubEvent event = next_event(*members[1]);
  EXPECT_EQ(event.kind, HubEvent::Kind::kHubLost);
  EXPECT_EQ(event.reason, "worker 0 has finished");
  const Status status = thrown_by([&] { members[1]->exchange("x", {}, in(5s)); });
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_NE(status.message().find("worker 0 has finished"), std::string::npos) << status.message();
  EXPECT_EQ(to_string(event.member), "worker 0 (pid " + std::to_string(::getpid()) + " on node)");
}

TEST(HubEvents, AnOrderlyEndWaitsForNobodyAndNobodySeesALoss) {
  auto hub = std::make_unique<Hub>(hub_options(3));
  auto members = join_all(hub->port(), 3);
  in_parallel(3, [&](std::size_t i) { members[i]->leave(); });
  const Instant begin = Clock::now();
  EXPECT_EQ(hub->counters().lost, 0u);
  hub.reset();
  EXPECT_LT(Clock::now() - begin, 900ms) << "all had left: there is nothing to wait for";
  for (auto& member : members) {
    HubEvent event;
    while (member->next_event(event)) EXPECT_EQ(event.kind, HubEvent::Kind::kLeft) << event.reason;
  }
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  if (directory == nullptr) return 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

TEST(Hub, FiftyLivesInOneProcessLeakNoDescriptor) {
  const auto live = [] {
    Hub hub(hub_options(2));
    auto members = join_all(hub.port(), 2);
    in_parallel(2, [&](std::size_t i) {
      EXPECT_EQ(members[i]->exchange("x", {}, in(20s)).size(), 2u);
      members[i].reset();
    });
  };
  live();
  const std::size_t before = open_descriptors();
  for (int i = 0; i < 50; ++i) live();
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace herring::control
