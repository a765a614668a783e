#include <gtest/gtest.h>

#include <atomic>
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
  void is_well() {
    values_.assign(values_.size(), 1);
    finish(call());
    EXPECT_EQ(values_.front(), 3.0F);
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
      if (round % 3 == 0) member.is_well();
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
    in_aborted.is_well();
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

}  // namespace
}  // namespace herring::elastic
