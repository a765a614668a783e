#include "elastic/rendezvous.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace herring::elastic {
namespace {

using namespace std::chrono_literals;
using Kind = MessageKind;

/// A rendezvous and what it has said on each connection; connections are numbered by the test.
class RendezvousTest : public testing::Test {
 protected:
  void begin(std::uint32_t workers, std::uint32_t servers, bool is_elastic, std::uint32_t min_workers = 1) {
    Rendezvous::Options options;
    options.workers = workers;
    options.servers = servers;
    options.min_workers = min_workers;
    rendezvous_.emplace(options);
    for (std::uint32_t rank = 0; rank < workers; ++rank) enter(1 + rank, control::Role::kWorker, rank, is_elastic);
    for (std::uint32_t rank = 0; rank < servers; ++rank) enter(100 + rank, control::Role::kServer, rank, false);
  }

  void enter(ConnectionId connection, control::Role role, std::uint32_t rank, bool is_elastic,
             std::uint32_t workers = 0) {
    Message message;
    message.kind = Kind::kEnter;
    message.role = role;
    message.rank = rank;
    message.is_elastic = is_elastic;
    message.workers = workers;
    message.pid = 100 + static_cast<std::uint32_t>(connection);
    message.host = "node";
    say(connection, message);
  }

  void say(ConnectionId connection, Kind kind, std::uint64_t generation, bool at_boundary = false) {
    Message message;
    message.kind = kind;
    message.generation = generation;
    message.at_boundary = at_boundary;
    say(connection, message);
  }

  void say(ConnectionId connection, const Message& message) {
    rendezvous_->receive(connection, message, now_);
    carry_out();
  }

  void lose(ConnectionId connection) {
    rendezvous_->disconnected(connection, "connection closed", now_);
    carry_out();
  }

  void pass(Duration time) {
    for (const Instant end = now_ + time; now_ < end;) {
      now_ += 500ms;
      for (const ConnectionId connection : answering_) rendezvous_->heard(connection, now_);
      rendezvous_->tick(now_);
      carry_out();
    }
  }

  void carry_out() {
    for (std::vector<Rendezvous::Action> actions; !(actions = rendezvous_->take_actions()).empty();) {
      for (const auto& action : actions) {
        if (action.kind == Rendezvous::Action::Kind::kOpenHub) open_hub(action.generation);
        if (action.kind == Rendezvous::Action::Kind::kCloseHubs) closed_below_ = action.generation;
        if (action.kind == Rendezvous::Action::Kind::kSend) said_[action.connection].push_back(action.message);
      }
    }
  }

  void open_hub(std::uint64_t generation) {
    if (hubs_fail_) {
      ++failed_hubs_;
      return rendezvous_->hub_failed(generation, "too many open files", now_);
    }
    rendezvous_->hub_opened(generation, 4000, now_);
  }

  /// The latest message on that connection.
  const Message& last(ConnectionId connection) { return said_[connection].back(); }

  std::optional<Rendezvous> rendezvous_;
  std::map<ConnectionId, std::vector<Message>> said_;
  std::vector<ConnectionId> answering_;
  std::uint64_t closed_below_ = 0;
  bool hubs_fail_ = false;
  int failed_hubs_ = 0;
  Instant now_{};
};

TEST_F(RendezvousTest, SurvivorsKeepTheirOrderAndServersStay) {
  begin(3, 1, true);
  EXPECT_EQ(last(2).kind, Kind::kGo);
  EXPECT_EQ(last(2).rank, 1U);
  lose(1);
  EXPECT_EQ(last(2).kind, Kind::kBreak);
  EXPECT_EQ(last(100).kind, Kind::kBreak);
  say(3, Kind::kReady, 1);
  say(2, Kind::kReady, 1);
  EXPECT_EQ(last(2).kind, Kind::kBreak) << "a server is still in the old generation";
  say(100, Kind::kReady, 1);
  EXPECT_EQ(last(2).kind, Kind::kGo);
  EXPECT_EQ(last(2).rank, 0U);
  EXPECT_EQ(last(3).rank, 1U);
  EXPECT_EQ(last(3).workers, 2U);
  EXPECT_EQ(last(3).servers, 1U);
}

TEST_F(RendezvousTest, ASilentWorkerIsLost) {
  begin(2, 0, true);
  answering_ = {1};
  pass(4s);
  EXPECT_EQ(last(1).kind, Kind::kGo);
  pass(2s);
  EXPECT_EQ(last(1).kind, Kind::kBreak);
  EXPECT_EQ(last(2).kind, Kind::kEnd) << "who was only stopped has to know that it is out";
}

// With thousands of workers the answers to their reports would take the launcher's core.
TEST_F(RendezvousTest, OperationsThatAreSettledSoonAfterEachOtherAreToldTogether) {
  begin(50, 0, true);
  const auto settled_of = [this](ConnectionId connection) {
    std::vector<std::size_t> sizes;
    for (const Message& message : said_[connection]) {
      if (message.kind == Kind::kSettled) sizes.push_back(message.operations.size());
    }
    return sizes;
  };
  for (std::uint64_t key = 0; key < 10; ++key) {
    for (ConnectionId connection = 1; connection <= 50; ++connection) {
      Message message;
      message.kind = Kind::kCompleted;
      message.generation = rendezvous_->generation();
      message.operations = {{0, key}};
      message.counts = {50};
      say(connection, message);
    }
  }
  EXPECT_EQ(settled_of(1), (std::vector<std::size_t>{1})) << "the first at once";
  EXPECT_GT(rendezvous_->next_wakeup(), now_);
  EXPECT_LT(rendezvous_->next_wakeup(), now_ + 100ms);
  now_ = rendezvous_->next_wakeup();
  rendezvous_->tick(now_);
  carry_out();
  EXPECT_EQ(settled_of(1), (std::vector<std::size_t>{1, 9}));
  EXPECT_EQ(settled_of(50), (std::vector<std::size_t>{1, 9}));
}

// The launcher's core would be busy with nothing for as long as the missing workers do not come.
TEST_F(RendezvousTest, AfterTheTimeToStartWithWhoIsThereItWaitsWithoutSpinning) {
  Rendezvous::Options options;
  options.workers = 3;
  options.min_workers = 3;
  options.start_within = 10s;
  rendezvous_.emplace(options);
  enter(1, control::Role::kWorker, 0, true);
  answering_ = {1};
  pass(11s);
  EXPECT_GT(rendezvous_->next_wakeup(), now_);
  enter(2, control::Role::kWorker, 1, true);
  enter(3, control::Role::kWorker, 2, true);
  EXPECT_EQ(rendezvous_->generation(), 1u);
}

TEST_F(RendezvousTest, WithTooFewTheJobEnds) {
  begin(3, 0, true, 3);
  lose(2);
  say(1, Kind::kReady, 1);
  say(3, Kind::kReady, 1);
  EXPECT_EQ(last(1).kind, Kind::kEnd);
  EXPECT_FALSE(last(1).is_elastic);
  EXPECT_NE(last(1).text.find("at least 3"), std::string::npos) << last(1).text;
  EXPECT_TRUE(rendezvous_->has_ended());
  EXPECT_FALSE(rendezvous_->ended_well());
}

TEST_F(RendezvousTest, AJobThatIsNotElasticTakesInNobodyAndBreaksNothing) {
  begin(2, 0, false);
  enter(9, control::Role::kWorker, 0, true);
  EXPECT_EQ(last(9).kind, Kind::kEnd);
  lose(2);
  EXPECT_EQ(last(1).kind, Kind::kGo) << "its own hub tells it";
}

TEST_F(RendezvousTest, AServerComesInWhileTrainingGoesOn) {
  begin(2, 2, false);
  lose(100);
  EXPECT_EQ(last(1).kind, Kind::kGo) << "failover is the workers' own";
  enter(102, control::Role::kServer, 0, false);
  EXPECT_EQ(last(1).kind, Kind::kGo);
  EXPECT_TRUE(last(1).is_planned);
  EXPECT_EQ(last(1).servers, 2U);
  say(1, Kind::kBuilt, 2);
  EXPECT_TRUE(last(1).is_planned) << "not before all are connected";
  say(2, Kind::kBuilt, 2);
  EXPECT_EQ(last(1).kind, Kind::kSwitch);
  EXPECT_EQ(last(102).kind, Kind::kSwitch);
  EXPECT_EQ(rendezvous_->generation(), 2U);
}

TEST_F(RendezvousTest, AServerThatDiesOnItsWayInCostsNothing) {
  begin(2, 2, false);
  lose(100);
  enter(102, control::Role::kServer, 0, false);
  say(1, Kind::kBuilt, 2);
  lose(102);
  EXPECT_EQ(last(1).kind, Kind::kBreak);
  EXPECT_TRUE(last(1).is_planned) << "the present generation goes on";
  EXPECT_EQ(rendezvous_->generation(), 1U);
  answering_ = {1, 2, 101, 103};
  enter(103, control::Role::kServer, 0, false);
  pass(3s);
  EXPECT_EQ(last(1).kind, Kind::kGo) << "the next one is tried a little later";
  EXPECT_EQ(last(1).generation, 3U);
}

// What a user would lose: a healthy job, because a server came while the launcher had no descriptor left.
TEST_F(RendezvousTest, APlannedSwitchWithoutAHubIsTriedAgainAndTheJobGoesOn) {
  begin(2, 2, false);
  answering_ = {1, 2, 101, 102};
  lose(100);
  hubs_fail_ = true;
  enter(102, control::Role::kServer, 0, false);
  pass(10s);
  EXPECT_GT(failed_hubs_, 1);
  EXPECT_LT(failed_hubs_, 10) << "it pauses in between";
  EXPECT_FALSE(rendezvous_->has_ended());
  EXPECT_EQ(rendezvous_->generation(), 1U);
  hubs_fail_ = false;
  pass(3s);
  EXPECT_EQ(last(1).kind, Kind::kGo);
  EXPECT_TRUE(last(1).is_planned);
  say(1, Kind::kBuilt, last(1).generation);
  say(2, Kind::kBuilt, last(2).generation);
  EXPECT_EQ(last(1).kind, Kind::kSwitch);
}

TEST_F(RendezvousTest, AGenerationWithoutAHubIsFormedAgain) {
  hubs_fail_ = true;
  begin(3, 1, true);
  answering_ = {1, 2, 3, 100};
  pass(3s);
  EXPECT_NE(last(1).kind, Kind::kGo);
  EXPECT_GT(failed_hubs_, 2);
  hubs_fail_ = false;
  pass(1s);
  ASSERT_EQ(last(1).kind, Kind::kGo);
  EXPECT_EQ(last(1).workers, 3U);

  hubs_fail_ = true;
  lose(3);
  const std::uint64_t broken = rendezvous_->generation();
  for (const ConnectionId member : {1, 2, 100}) say(member, Kind::kReady, broken);
  pass(5s);
  EXPECT_FALSE(rendezvous_->has_ended()) << "that is no generation that broke in vain";
  lose(2);
  pass(2s);
  hubs_fail_ = false;
  pass(1s);
  ASSERT_EQ(last(1).kind, Kind::kGo);
  EXPECT_EQ(last(1).workers, 1U);
  EXPECT_EQ(last(100).kind, Kind::kGo);
}

TEST_F(RendezvousTest, WhereNoHubCanBeOpenedForAMinuteTheJobEnds) {
  hubs_fail_ = true;
  begin(2, 0, true);
  answering_ = {1, 2};
  pass(70s);
  ASSERT_TRUE(rendezvous_->has_ended());
  EXPECT_EQ(last(1).kind, Kind::kEnd);
  EXPECT_NE(last(1).text.find("no hub could be opened: too many open files"), std::string::npos) << last(1).text;
}

TEST_F(RendezvousTest, AGenerationThatWasPlannedLastsAsLongAsAnyOther) {
  begin(2, 2, false);
  lose(100);
  enter(102, control::Role::kServer, 0, false);
  say(1, Kind::kBuilt, 2);
  say(2, Kind::kBuilt, 2);
  ASSERT_EQ(last(1).kind, Kind::kSwitch);
  answering_ = {1, 2, 101, 102};
  pass(300s);
  EXPECT_EQ(last(1).kind, Kind::kSwitch) << last(1).text;
  EXPECT_FALSE(rendezvous_->has_ended());
}

TEST_F(RendezvousTest, ASecondServerIsTakenInWhenTheFirstSwitchIsOver) {
  begin(2, 2, false);
  answering_ = {1, 2, 101, 102, 103};
  lose(100);
  enter(102, control::Role::kServer, 0, false);
  say(1, Kind::kBuilt, 2);
  say(2, Kind::kBuilt, 2);
  enter(103, control::Role::kServer, 0, false);
  say(1, Kind::kSwitched, 2);
  pass(10s);
  EXPECT_EQ(last(1).kind, Kind::kSwitch) << "worker 1 still has something under way in the first generation";
  EXPECT_EQ(closed_below_, 1U) << "which needs its hub";
  say(2, Kind::kSwitched, 2);
  EXPECT_EQ(closed_below_, 2U);
  EXPECT_EQ(last(1).kind, Kind::kGo);
  EXPECT_EQ(last(1).servers, 3U);
}

TEST_F(RendezvousTest, WhoLeavesBeforeItHasComeToAGenerationIsNotWaitedFor) {
  begin(3, 0, true);
  lose(3);
  say(1, Kind::kReady, 1);
  say(2, Kind::kReady, 1);
  ASSERT_EQ(last(2).kind, Kind::kGo);
  say(1, Kind::kLeave, 1);
  EXPECT_EQ(last(2).kind, Kind::kBreak);
  say(2, Kind::kReady, 2);
  EXPECT_EQ(last(2).kind, Kind::kGo);
  EXPECT_EQ(last(2).workers, 1U);
}

TEST_F(RendezvousTest, ServersHearWhoWasLostAndNotWhoEndedBecauseOfIt) {
  begin(3, 1, false);
  lose(2);
  lose(1);
  lose(3);
  EXPECT_EQ(last(100).kind, Kind::kEnd);
  EXPECT_NE(last(100).text.find("no worker is left: worker 1 "), std::string::npos) << last(100).text;
}

TEST_F(RendezvousTest, WhoAsksHearsWhoIsMissing) {
  Rendezvous::Options options;
  options.workers = 4;
  options.servers = 2;
  rendezvous_.emplace(options);
  enter(1, control::Role::kWorker, 0, false);
  enter(2, control::Role::kWorker, 2, false);
  enter(3, control::Role::kWorker, 2, false);  // It stands for the first that nobody wished for.
  enter(100, control::Role::kServer, 1, false);
  say(1, Kind::kQuery, 0);
  EXPECT_EQ(last(1).kind, Kind::kMissing);
  EXPECT_EQ(last(1).text, "waiting for worker 3 and server 0; 4 of 6 are here");
  EXPECT_EQ(last(1).generation, 0U);
}

/// Two jobs at one HERRING_RENDEZVOUS: none begins with the other's workers.
TEST_F(RendezvousTest, ASecondProcessForOnePlaceEndsTheStartOfBoth) {
  Rendezvous::Options options;
  options.workers = 2;
  rendezvous_.emplace(options);
  enter(1, control::Role::kWorker, 0, true, 2);
  enter(2, control::Role::kWorker, 0, true, 2);
  for (const ConnectionId connection : {1, 2}) {
    ASSERT_EQ(last(connection).kind, Kind::kEnd);
    EXPECT_FALSE(last(connection).is_elastic);
    for (const char* part :
         {"worker 0 (pid 102 on node)", "worker 0 (pid 101 on node)", "HERRING_RENDEZVOUS of its own"}) {
      EXPECT_NE(last(connection).text.find(part), std::string::npos) << last(connection).text;
    }
  }
  enter(3, control::Role::kWorker, 1, true, 2);
  EXPECT_EQ(last(3).kind, Kind::kEnd) << "it cannot be told whose it is";
}

TEST_F(RendezvousTest, WhoTakesTheDeadOnesPlaceIsNoRival) {
  Rendezvous::Options options;
  options.workers = 2;
  rendezvous_.emplace(options);
  enter(1, control::Role::kWorker, 0, true, 2);
  lose(1);
  enter(2, control::Role::kWorker, 0, true, 2);
  enter(3, control::Role::kWorker, 1, true, 2);
  EXPECT_EQ(last(2).kind, Kind::kGo);
  enter(4, control::Role::kWorker, 1, true, 2);
  EXPECT_EQ(last(3).kind, Kind::kNewcomers) << "an elastic job that has begun grows";
}

TEST_F(RendezvousTest, AJobWhosePlacesAreTakenRefusesAnothersWorkers) {
  for (const Duration age : {Duration(1s), Duration(200s)}) {
    SCOPED_TRACE(age / 1s);
    said_.clear();
    Rendezvous::Options options;
    options.workers = 2;
    rendezvous_.emplace(options);
    for (std::uint32_t rank = 0; rank < 2; ++rank) enter(1 + rank, control::Role::kWorker, rank, false, 2);
    ASSERT_EQ(last(1).kind, Kind::kGo);
    answering_ = {1, 2};
    pass(age);
    enter(9, control::Role::kWorker, 1, false, 2);
    ASSERT_EQ(last(9).kind, Kind::kEnd);
    EXPECT_NE(last(9).text.find("worker 1 (pid 109 on node) and worker 1 (pid 102 on node)"), std::string::npos)
        << last(9).text;
    // A young job may have been joined by the other's processes; an old one goes on.
    EXPECT_EQ(rendezvous_->has_ended(), age < 100s);
  }
}

TEST_F(RendezvousTest, GenerationsThatBreakWithoutALossEndTheJob) {
  begin(2, 0, true);
  for (std::uint64_t generation = 1; generation <= 4; ++generation) {
    ASSERT_EQ(last(1).kind, Kind::kGo) << generation;
    say(1, Kind::kBroken, generation);
    say(1, Kind::kReady, generation);
    say(2, Kind::kReady, generation);
  }
  EXPECT_EQ(last(2).kind, Kind::kEnd);
  EXPECT_NE(last(2).text.find("no process was lost"), std::string::npos) << last(2).text;
}

}  // namespace
}  // namespace herring::elastic
