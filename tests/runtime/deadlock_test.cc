// Ranks that wait for each other: without this a training script with one variable too many on a rank stands still for
// HERRING_TIMEOUT_S; and a false alarm ends a job that is only slow.
#include "runtime/deadlock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "runtime/control.h"
#include "runtime/job.h"
#include "runtime/pending.h"

namespace herring::runtime {
namespace {

using namespace testing;
using std::chrono::milliseconds;
using std::chrono::seconds;

AwaitedCall call_named(std::uint64_t name) {
  AwaitedCall call;
  call.name = name;
  call.set_text("'w" + std::to_string(name) + "'");
  return call;
}

/// Some ranks as the judge hears of them.
class Judged {
 public:
  explicit Judged(std::uint32_t ranks) : judge_(ranks), reports_(ranks) {}

  /// The rank waits for these, and has called these. `text`: what it calls what it waits for; empty: as all do.
  void waits(std::uint32_t rank, std::vector<std::uint64_t> waits_for, std::vector<std::uint64_t> has_called,
             std::string text = {}) {
    reports_[rank] = {std::move(waits_for), std::move(has_called), std::move(text)};
  }
  /// All reports come once more, with answers to the list of before.
  bool round() {
    now_ += seconds(1);
    for (std::uint32_t rank = 0; rank < reports_.size(); ++rank) {
      const Told& told = reports_[rank];
      if (told.waits_for.empty()) continue;
      WaitingReport report;
      report.list = heard_.list;
      for (const std::uint64_t name : told.waits_for) {
        AwaitedCall& call = report.calls[report.count++] = call_named(name);
        if (!told.text.empty()) call.set_text(told.text);
      }
      for (std::uint32_t i = 0; i < heard_.count; ++i) {
        const bool called = std::ranges::find(told.has_called, heard_.calls[i].name) != told.has_called.end();
        report.not_called |= std::uint64_t{called ? 0u : 1u} << i;
      }
      EXPECT_TRUE(judge_.take(rank, report, now_));
    }
    judge_.look(now_, seconds(3));
    heard_ = judge_.list();
    return !judge_.stuck().empty();
  }
  bool rounds(int count) {
    for (int i = 0; i < count; ++i) {
      if (round()) return true;
    }
    return false;
  }
  std::string text() const { return judge_.text(); }
  std::vector<std::uint32_t> stuck() const { return judge_.stuck(); }

 private:
  struct Told {
    std::vector<std::uint64_t> waits_for;
    std::vector<std::uint64_t> has_called;
    std::string text;
  };
  DeadlockJudge judge_;
  DeadlockList heard_;
  std::vector<Told> reports_;
  Instant now_{};
};

TEST(DeadlockJudge, RanksThatWaitForDifferentNamesAreNamed) {
  Judged job(4);
  for (const std::uint32_t rank : {0u, 2u}) job.waits(rank, {3}, {1, 2, 3});
  for (const std::uint32_t rank : {1u, 3u}) job.waits(rank, {4}, {1, 2, 4});
  ASSERT_TRUE(job.rounds(3));
  EXPECT_EQ(job.text(),
            "ranks wait for each other: 'w3' is waited for on ranks 0, 2 and was never called on ranks 1, 3; 'w4' is "
            "waited for on ranks 1, 3 and was never called on ranks 0, 2. Every rank has to call the same operations "
            "under the same names");
}

/// A round of small tensors is one call, and each rank is in it for a tensor of its own.
TEST(DeadlockJudge, WhereRanksHaveDifferentNamesForACallEachHasItsOwn) {
  Judged job(3);
  job.waits(0, {1}, {1}, "'a'");
  job.waits(1, {1}, {1}, "'b'");
  job.waits(2, {2}, {2});
  ASSERT_TRUE(job.rounds(3));
  EXPECT_EQ(
      job.text(),
      "ranks wait for each other: 'a' is waited for on rank 0 and was never called on rank 2; 'b' is waited for on "
      "rank 1 and was never called on rank 2; 'w2' is waited for on rank 2 and was never called on ranks 0, 1. "
      "Every rank has to call the same operations under the same names");
}

TEST(DeadlockJudge, WhoIsNotHeardMayStillCall) {
  Judged job(3);
  job.waits(0, {1}, {1});
  job.waits(2, {1}, {1});
  EXPECT_FALSE(job.rounds(10)) << "rank 1 computes; it will call 'w1'";
}

TEST(DeadlockJudge, ASlowOperationThatAllHaveCalledIsNone) {
  Judged job(3);
  for (std::uint32_t rank = 0; rank < 3; ++rank) job.waits(rank, {1}, {1});
  EXPECT_FALSE(job.rounds(10));
}

TEST(DeadlockJudge, AChainThatEndsAtARankThatMayGoOnIsNone) {
  Judged job(3);
  job.waits(0, {1}, {1, 2, 3});  // for ranks 1 and 2
  job.waits(1, {2}, {2, 3});     // for rank 2
  job.waits(2, {3}, {3});        // 'w3' is on its way
  EXPECT_FALSE(job.rounds(10));
}

TEST(DeadlockJudge, ACircleOfThreeIsFound) {
  Judged job(4);
  job.waits(0, {1}, {1});
  job.waits(1, {2}, {2});
  job.waits(2, {3}, {3});
  ASSERT_TRUE(job.rounds(3));
  EXPECT_EQ(job.stuck(), (std::vector<std::uint32_t>{0, 1, 2}));
}

TEST(DeadlockJudge, ARankWithAThreadThatMayGoOnIsNotStuck) {
  Judged job(2);
  job.waits(0, {1, 9}, {1, 9});
  job.waits(1, {2}, {2, 9});
  EXPECT_FALSE(job.rounds(10)) << "'w9' is called everywhere: rank 0's other thread goes on and may call 'w2'";
}

TEST(DeadlockJudge, WhoWaitsForAnotherCallEachTimeIsAskedAgain) {
  Judged job(2);
  job.waits(0, {1}, {1});
  for (std::uint64_t round = 0; round < 10; ++round) {
    job.waits(1, {2 + round}, {2 + round});
    EXPECT_FALSE(job.round()) << round;
  }
  EXPECT_TRUE(job.rounds(3));
}

TEST(DeadlockJudge, AnswersToAListOfBeforeCountForNothing) {
  DeadlockJudge judge(2, 7);  // Another judge has made 7.
  WaitingReport report;
  report.count = 1;
  report.not_called = ~std::uint64_t{0};
  report.list = 7;
  for (int round = 0; round < 5; ++round) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      report.calls[0] = call_named(rank + 1);
      EXPECT_TRUE(judge.take(rank, report, {}));
    }
    judge.look({}, seconds(3));
    EXPECT_TRUE(judge.stuck().empty());
  }
}

TEST(DeadlockJudge, BadReportsAreRefused) {
  DeadlockJudge judge(2);
  WaitingReport report;
  EXPECT_FALSE(judge.take(0, report, {})) << "waits for nothing";
  report.count = 1;
  EXPECT_FALSE(judge.take(2, report, {})) << "no such rank";
  report.count = WaitingReport::kMostCalls + 1;
  EXPECT_FALSE(judge.take(0, report, {}));
}

TEST(AwaitedCall, ALongNameKeepsItsBeginningAndItsEnd) {
  AwaitedCall call;
  call.set_text("'begin" + std::string(500, '.') + "end'");
  const std::string text = call.text.data();
  EXPECT_LT(text.size(), AwaitedCall::kText);
  EXPECT_TRUE(text.starts_with("'begin") && text.ends_with("end'")) << text;
}

// --- who waits -------------------------------------------------------------------------------------------------------

TEST(WaitTable, AThreadThatHasWaitedBeforeMayCallSomething) {
  const auto table = std::make_shared<WaitTable>();
  PendingWork work(std::make_shared<CallbackPool>());
  EXPECT_TRUE(table->all_wait().asks.empty()) << "nobody waits";
  std::atomic<bool> known{false};
  std::atomic<bool> over{false};
  std::thread other([&] {
    table->know_thread();
    known = true;
    while (!over) std::this_thread::yield();
  });
  while (!known) std::this_thread::yield();
  std::shared_ptr<void> mine = table->enter(work, false);
  EXPECT_TRUE(table->all_wait().asks.empty());
  over = true;
  other.join();
  EXPECT_EQ(table->all_wait().asks.size(), 1U) << "the other thread has ended";
  {
    const std::shared_ptr<void> held = table->hold();
    EXPECT_TRUE(table->all_wait().asks.empty());
  }
  mine.reset();
  EXPECT_TRUE(table->all_wait().asks.empty());
}

TEST(WaitTable, AsManyOfAPoolHaveToWaitAsEverDid) {
  const auto table = std::make_shared<WaitTable>();
  PendingWork work(std::make_shared<CallbackPool>());
  std::shared_ptr<void> first = table->enter(work, true);
  EXPECT_EQ(table->all_wait().asks.size(), 1U);
  std::shared_ptr<void> second = table->enter(work, true);
  EXPECT_EQ(table->all_wait().asks.size(), 2U);
  first.reset();
  EXPECT_TRUE(table->all_wait().asks.empty());
}

// --- jobs ------------------------------------------------------------------------------------------------------------

Request named(std::span<float> values, const std::string& name) {
  Request request = all_reduce(values);
  request.name = name;
  request.timeout = seconds(120);
  return request;
}

Status block_on(Runtime& runtime, const Request& request) {
  const auto work = runtime.submit(request);
  const auto blocked = work->block();
  EXPECT_TRUE(work->wait(in_seconds(100))) << "it never ended";
  return work->status();
}

JobShape watched(std::uint32_t workers, std::uint32_t hosts = 1) {
  JobShape shape{.workers = workers, .hosts = hosts};  // A server process would fail with the job.
  shape.config.deadlock_after_s = 0.4;
  return shape;
}

void expect_found(const JobShape& shape) {
  expect_clean(run_job(shape, [&](Runtime& runtime) {
    std::vector<float> values(100, 1);
    block_on(runtime, named(values, "same")).or_throw();
    const bool is_even = runtime.rank() % 2 == 0;
    const Status status = block_on(runtime, named(values, is_even ? "left" : "right"));
    EXPECT_EQ(status.code(), Code::kMismatch) << status.to_string();
    for (const char* word : {"'left' is waited for on rank", "and was never called on rank", "'right'"}) {
      EXPECT_NE(status.message().find(word), std::string::npos) << word << ": " << status.message();
    }
  }));
}

TEST(Deadlock, DifferentNamesEndWithinSecondsOnAllRanks) {
  expect_found(watched(2));
  expect_found(watched(5));
}

TEST(Deadlock, OverTheNetworkToo) {
  if (!has_fabric()) GTEST_SKIP() << "no libfabric";
  expect_found(watched(4, 2));
}

TEST(Deadlock, ACallWithoutANameAgainstOneWithANameIsFound) {
  expect_clean(run_job(watched(2), [&](Runtime& runtime) {
    std::vector<float> values(100, 1);
    const bool is_first = runtime.rank() == 0;
    const Status status = block_on(runtime, is_first ? all_reduce(values) : named(values, "named"));
    EXPECT_EQ(status.code(), Code::kMismatch) << status.to_string();
    EXPECT_NE(status.message().find("(call 1)"), std::string::npos) << status.message();
  }));
}

TEST(Deadlock, ARankThatIsOnlyLateIsWaitedFor) {
  expect_clean(run_job(watched(3), [&](Runtime& runtime) {
    std::vector<float> values(100, 1);
    for (int step = 0; step < 2; ++step) {
      // The late one waits for nothing: it computes.
      if (static_cast<int>(runtime.rank()) == step) std::this_thread::sleep_for(milliseconds(2500));
      block_on(runtime, named(values, "step")).or_throw();
    }
  }));
}

TEST(Deadlock, AnotherThreadThatMayCallIsWaitedFor) {
  expect_clean(run_job(watched(2), [&](Runtime& runtime) {
    std::vector<float> mine(100, 1);
    std::vector<float> others(100, 1);
    const bool is_first = runtime.rank() == 0;
    std::thread second([&] {
      block_on(runtime, named(others, "before")).or_throw();
      std::this_thread::sleep_for(milliseconds(2500));
      block_on(runtime, named(others, is_first ? "right" : "left")).or_throw();
    });
    block_on(runtime, named(mine, is_first ? "left" : "right")).or_throw();
    second.join();
  }));
}

TEST(Deadlock, NobodyLooksWhereTheSettingIsZero) {
  JobShape shape = watched(2);
  shape.config.deadlock_after_s = 0;
  expect_clean(run_job(shape, [&](Runtime& runtime) {
    std::vector<float> values(100, 1);
    Request request = named(values, runtime.rank() == 0 ? "left" : "right");
    request.timeout = seconds(3);
    EXPECT_EQ(block_on(runtime, request).code(), Code::kTimeout);
    // Who leaves first ends the other's call.
    EXPECT_TRUE(block_on(runtime, named(values, "both")).is_ok());
  }));
}

}  // namespace
}  // namespace herring::runtime
