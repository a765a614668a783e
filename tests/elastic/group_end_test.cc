#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "elastic/elastic_job.h"

/// Groups of an elastic job that somebody gives up or leaves. What a user would lose: minutes until a time-out, and
/// with it the whole job, where a job that is not elastic says in milliseconds what happened.
namespace herring::elastic {
namespace {

using namespace testing;
using namespace std::chrono_literals;
using runtime::Request;
using runtime::Work;

const std::vector<std::uint32_t> kAll{0, 1, 2};

class Member {
 public:
  Member(ElasticRuntime& runtime, GroupId group) : runtime_(runtime), group_(group) {}
  std::shared_ptr<Work> call() {
    Request request = all_reduce(values_);
    request.group = group_;
    return runtime_.submit(request);
  }
  void is_well(float ranks = 3) {
    values_.assign(values_.size(), 1);
    finish(call());
    EXPECT_EQ(values_.front(), ranks);
  }
  /// And has been so on every rank: an abort ends what some rank does not know the end of.
  void is_well_everywhere(float ranks = 3) {
    is_well(ranks);
    Member(runtime_, GroupId{0}).is_well(static_cast<float>(runtime_.size()));
  }
  void is_refused(Code code, const std::string& why) {
    const auto work = call();
    ASSERT_TRUE(work->wait(in_seconds(5))) << "rank " << runtime_.rank() << " hears nothing";
    EXPECT_EQ(work->status().code(), code) << work->status().message();
    EXPECT_NE(work->status().message().find(why), std::string::npos) << work->status().message();
  }
  void go() {
    runtime_.leave_group(group_);
    runtime_.remove_group(group_);
  }

 private:
  ElasticRuntime& runtime_;
  const GroupId group_;
  std::vector<float> values_ = std::vector<float>(10, 1);
};

TEST(ElasticGroups, AnAbortByWhoIsGoneAtOnceIsHeard) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  ElasticJob job({.workers = 3, .is_elastic = true});
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    for (std::uint32_t round = 1; round <= 30; ++round) {
      const GroupId group{round};
      runtime.add_group(group, kAll);
      Member member(runtime, group);
      if (round % 3 == 0) member.is_well_everywhere();
      if (runtime.rank() == 0) {
        const auto pending = round % 2 == 0 ? member.call() : nullptr;
        runtime.abort_group(group, "enough");
        member.go();
      } else {
        if (round % 2 == 0) {
          ASSERT_TRUE(member.call()->wait(in_seconds(5)));
        }
        for (int call = 0; call < 2; ++call) member.is_refused(Code::kCancelled, "enough");
        member.go();
      }
      Member(runtime, GroupId{0}).is_well();
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_EQ(job.rendezvous().generation(), 1u) << "nobody was lost";
}

TEST(ElasticGroups, WhoLeavesIsKnownToThoseWhoGoOn) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  ElasticJob job({.workers = 3, .is_elastic = true});
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    for (std::uint32_t round = 1; round <= 30; ++round) {
      const GroupId group{round};
      runtime.add_group(group, kAll);
      Member member(runtime, group);
      for (std::uint32_t call = 0; call < round % 3; ++call) member.is_well();
      if (runtime.rank() != 0) {
        for (int call = 0; call < 2; ++call) member.is_refused(Code::kPeerLost, "has left the group");
      }
      member.go();
      Member(runtime, GroupId{0}).is_well();
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_EQ(job.rendezvous().generation(), 1u) << "nobody was lost";
}

/// Who goes on hears it again where the job was put together anew meanwhile.
TEST(ElasticGroups, WhoHadLeftIsKnownAfterALossToo) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  ElasticJob job({.workers = 3, .is_elastic = true});
  std::atomic<bool> may_die{false};
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    const GroupId left{1};
    const GroupId aborted{2};
    for (const GroupId group : {left, aborted}) runtime.add_group(group, kAll);
    Member in_left(runtime, left);
    Member in_aborted(runtime, aborted);
    in_left.is_well();
    in_aborted.is_well_everywhere();
    if (runtime.rank() == 0) {
      runtime.abort_group(aborted, "enough");
      in_left.go();
      in_aborted.go();
      may_die = true;
    }
    ASSERT_TRUE(eventually([&] { return may_die.load(); }));
    if (runtime.rank() == 1) return runtime.abort("the test");
    ASSERT_TRUE(eventually([&] { return runtime.size() == 2; }));
    if (runtime.rank() != 0) {
      for (int call = 0; call < 2; ++call) {
        in_left.is_refused(Code::kPeerLost, "has left the group");
        in_aborted.is_refused(Code::kCancelled, "enough");
      }
    }
    std::vector<float> values(10, 1);
    finish(runtime.submit(all_reduce(values)));
    EXPECT_EQ(values.front(), 2.0F);
  });
  EXPECT_EQ(errors[0] + errors[2], "");
}

/// Two ranks on each of two hosts: groups inside one, across both, and of all in another order. While large operations
/// of all of them run, one group is aborted, one is left, and then a worker is gone.
void end_groups_while_all_work(std::uint32_t servers) {
  ElasticJob job({.workers = 4, .servers = servers, .is_elastic = true, .hosts = 2});
  const std::vector<std::vector<std::uint32_t>> members{{0, 1, 2, 3}, {2, 3}, {0, 2}, {3, 0, 2}};
  const GroupId inside{1};
  const GroupId across{2};
  const GroupId mixed{3};
  std::array<float, 4> sums{};
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    const std::uint32_t rank = runtime.rank();
    EXPECT_EQ(runtime.local_size(), 2u);
    std::vector<std::vector<float>> values(members.size(), std::vector<float>(300'000, 1));
    const auto is_in = [&](std::size_t g) {
      return std::find(members[g].begin(), members[g].end(), rank) != members[g].end();
    };
    for (std::uint32_t g = 1; g < members.size(); ++g) {
      if (is_in(g)) runtime.add_group(GroupId{g}, members[g]);
    }
    Member(runtime, GroupId{0}).is_well(4);
    std::vector<std::shared_ptr<Work>> works(members.size());
    for (std::uint32_t g = 0; g < members.size(); ++g) {
      if (!is_in(g)) continue;
      Request request = all_reduce(values[g]);
      request.group = GroupId{g};
      works[g] = runtime.submit(request);
    }
    if (rank == 2) runtime.abort_group(inside, "enough");
    if (rank == 0) Member(runtime, across).go();
    if (rank == 1) {
      finish(works[0]);
      return runtime.abort("the test");
    }
    finish(works[0]);
    sums[rank] = values[0].front();
    EXPECT_EQ(values[0], std::vector<float>(values[0].size(), sums[rank])) << "rank " << rank;
    finish(works[3]);
    EXPECT_EQ(values[3], std::vector<float>(values[3].size(), 3)) << "rank " << rank;
    ASSERT_TRUE(eventually([&] { return runtime.size() == 3; }));
    if (rank == 3) Member(runtime, inside).is_refused(Code::kCancelled, "enough");
    if (rank == 2) Member(runtime, across).is_refused(Code::kPeerLost, "has left the group");
    Member(runtime, mixed).is_well(3);
    Member(runtime, GroupId{0}).is_well(3);
  });
  EXPECT_EQ(errors[0] + errors[2] + errors[3], "");
  // Rank 1 may have taken with it that it had the sum with its own part.
  EXPECT_TRUE(sums[0] == 4 || sums[0] == 3) << sums[0];
  EXPECT_EQ(sums[2], sums[0]);
  EXPECT_EQ(sums[3], sums[0]);
}

/// Who leaves while an operation runs tells the others at its end that it has it: nobody keeps it at the end of the
/// job.
TEST(ElasticGroups, WhoLeavesDuringAnOperationDoesNotHoldUpTheEnd) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  const GroupId pair{1};
  ElasticJob job({.workers = 2, .is_elastic = true});
  std::array<double, 2> seconds{};
  const auto errors = job.run([&](ElasticRuntime& runtime) {
    const std::uint32_t rank = runtime.rank();
    runtime.add_group(pair, std::vector<std::uint32_t>{0, 1});
    std::vector<float> values(300'000, 1);
    Request request = all_reduce(values);
    request.group = pair;
    const auto work = runtime.submit(request);
    if (rank == 0) Member(runtime, pair).go();
    work->wait(in_seconds(30));
    const Instant before = std::chrono::steady_clock::now();
    runtime.shutdown();
    seconds[rank] = std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
  });
  EXPECT_EQ(errors[0] + errors[1], "");
  EXPECT_LT(seconds[0] + seconds[1], 9.0) << "it waited until it was told that the other will say no more";
}

TEST(ElasticGroups, OverHostsEachEndsAlone) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  end_groups_while_all_work(0);
}

TEST(ElasticGroups, OverHostsEachEndsAloneThroughServers) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  end_groups_while_all_work(2);
}

}  // namespace
}  // namespace herring::elastic
