// Two jobs whose processes look at one port with one secret: nobody may work with the other's.
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>

#include "control/membership.h"
#include "control/membership_job.h"

namespace herring::control {
namespace {

/// Job A of two workers at a port that B's processes look at as well, with the same secret.
class TwoJobs : public testing::Test {
 protected:
  static Member of_b(const Member& member) {
    Member other = member;
    other.pid += 1000;
    other.host_name = "node-b";
    return other;
  }
  static Membership::Options options(Instant now) { return {2, 0, 100ms, 300ms, 77, Job::worker(0), 120s, 300ms, now}; }
  void SetUp() override {
    job.membership = Membership(options(job.now));
    job.join(1, Job::worker(0));
  }
  void expect_both_named(const std::string& text, const std::string& one, const std::string& other) {
    for (const std::string& part : {one, other, std::string("MASTER_PORT of its own")}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
  Job job{2, 0};
};

TEST_F(TwoJobs, ASecondWorkerZeroEndsTheStartOfBoth) {
  job.join(2, of_b(Job::worker(0)));
  EXPECT_EQ(job.refusal(2).code, RefuseCode::kOtherJob);
  expect_both_named(job.refusal(2).text, "pid 100 on node)", "pid 1100 on node-b)");
  ASSERT_EQ(job.events(1).size(), 1u);
  EXPECT_EQ(job.events(1)[0].kind, HubEvent::Kind::kFailed);
  expect_both_named(job.events(1)[0].reason, "pid 100 on node)", "pid 1100 on node-b)");
  job.pass(1s, {1});
  job.join(3, Job::worker(1));
  EXPECT_EQ(job.refusal(3).code, RefuseCode::kOtherJob) << "it cannot be told whose it is";
  EXPECT_FALSE(job.membership.started());
  EXPECT_GT(job.membership.next_wakeup(), job.now);
}

TEST_F(TwoJobs, BeforeItsOwnWorkerZeroHasJoinedNoOtherIsTaken) {
  job.membership = Membership(options(job.now));
  job.join(5, of_b(Job::worker(0)));
  EXPECT_EQ(job.refusal(5).code, RefuseCode::kOtherJob);
  job.join(6, Job::worker(0));
  EXPECT_EQ(job.refusal(6).code, RefuseCode::kOtherJob);
}

TEST_F(TwoJobs, WhoWaitedForAHubIsSeenBeforeTheJobStarts) {
  job.join(2, of_b(Job::worker(1)));
  EXPECT_FALSE(job.membership.started()) << "A's worker 1 may look for the hub at this moment";
  job.now += 250ms;
  job.join(3, Job::worker(1));
  EXPECT_EQ(job.refusal(3).code, RefuseCode::kOtherJob);
  job.pass(1s, {1, 2});
  EXPECT_FALSE(job.membership.started());
}

TEST_F(TwoJobs, AJobThatStartedWithAStrangerEndsWhenItsOwnComes) {
  job.join(2, of_b(Job::worker(1)));
  job.pass(400ms, {1, 2});
  ASSERT_TRUE(job.membership.started());
  job.join(3, Job::worker(1));
  EXPECT_EQ(job.refusal(3).code, RefuseCode::kOtherJob);
  for (const ConnectionId member : {1, 2}) {
    ASSERT_EQ(job.events(member).size(), 1u) << "worker 0 hears it as well";
    EXPECT_EQ(job.events(member)[0].kind, HubEvent::Kind::kFailed);
    expect_both_named(job.events(member)[0].reason, "pid 101 on node)", "pid 1101 on node-b)");
  }
}

TEST_F(TwoJobs, ALongRunningJobGoesOn) {
  job.join(2, Job::worker(1));
  job.pass(121s, {1, 2});
  job.join(3, of_b(Job::worker(0)));
  job.join(4, of_b(Job::worker(1)));
  EXPECT_EQ(job.refusal(3).code, RefuseCode::kOtherJob);
  EXPECT_EQ(job.refusal(4).code, RefuseCode::kOtherJob);
  EXPECT_TRUE(job.events(1).empty());
  EXPECT_TRUE(job.events(2).empty());
}

TEST_F(TwoJobs, AJobOfAnotherSizeEndsNobody) {
  job.membership.join(2, Join{of_b(Job::worker(0)), 3, 0}, job.now);
  job.collect();
  EXPECT_EQ(job.refusal(2).code, RefuseCode::kOtherJob);
  EXPECT_TRUE(job.events(1).empty());
  job.join(3, Job::worker(1));
  job.pass(400ms, {1, 3});
  EXPECT_TRUE(job.membership.started());
}

/// Two Slurm jobs whose scripts have one MASTER_PORT: neither is in doubt, and none of B's is let in.
TEST_F(TwoJobs, LaunchersThatNumberTheirJobsTellThemApart) {
  const auto launched = [](Member member, const std::string& launch) {
    member.launch = launch;
    return member;
  };
  Membership::Options of_a = options(job.now);
  of_a.lead = launched(Job::worker(0), "TORCHELASTIC_RUN_ID=train\nSLURM_JOB_ID=12");
  job.membership = Membership(of_a);
  job.join(1, *of_a.lead);
  job.join(2, launched(of_b(Job::worker(1)), "SLURM_JOB_ID=13"));
  EXPECT_EQ(job.refusal(2).code, RefuseCode::kOtherJob) << "worker 1 of B has come before that of A";
  expect_both_named(job.refusal(2).text, "pid 100 on node)", "pid 1101 on node-b)");
  EXPECT_NE(job.refusal(2).text.find("SLURM_JOB_ID=12"), std::string::npos);
  EXPECT_NE(job.refusal(2).text.find("SLURM_JOB_ID=13"), std::string::npos);
  job.join(3, launched(of_b(Job::worker(0)), "TORCHELASTIC_RUN_ID=other\nSLURM_JOB_ID=12"));
  EXPECT_EQ(job.refusal(3).code, RefuseCode::kOtherJob);
  EXPECT_TRUE(job.events(1).empty());
  job.join(4, launched(Job::worker(1), "TORCHELASTIC_RUN_ID=train"));
  job.pass(400ms, {1, 4});
  EXPECT_TRUE(job.membership.started());
}

/// Workers and servers of one job may be launched by two programs, or by hand beside one.
TEST_F(TwoJobs, WhatHasNoLauncherOfTheSameKindIsTaken) {
  Membership::Options with_server = options(job.now);
  with_server.servers = 1;
  with_server.lead->launch = "SLURM_JOB_ID=12";
  job.membership = Membership(with_server);
  Member server = Job::server(0);
  server.launch = "SLURM_JOB_ID=13";
  job.membership.join(1, Join{*with_server.lead, 2, 1}, job.now);
  job.membership.join(2, Join{server, 2, 1}, job.now);
  job.membership.join(3, Join{Job::worker(1), 2, 1}, job.now);
  job.collect();
  job.pass(400ms, {1, 2, 3});
  EXPECT_TRUE(job.membership.started());
}

/// The same job, started again at the same port while the hub of its first life closes.
TEST_F(TwoJobs, AJobThatIsOverIsNoRival) {
  job.join(2, Job::worker(1));
  job.pass(400ms, {1, 2});
  job.disconnect(2);
  job.sent.clear();
  job.join(3, of_b(Job::worker(0)));
  EXPECT_EQ(job.refusal(3).code, RefuseCode::kStarted) << "it takes another port";
  job.join(4, of_b(Job::worker(1)));
  EXPECT_EQ(job.refusal(4).code, RefuseCode::kStarted) << "it waits for the next hub";
  EXPECT_TRUE(job.events(1).empty());
}

}  // namespace
}  // namespace herring::control
