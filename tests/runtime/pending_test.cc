// Callbacks and waits of a pending operation: a lost wake-up here is a training job that stands still.
#include "runtime/pending.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

namespace herring::runtime {
namespace {

Instant soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

TEST(PendingWork, TheFirstCompletionWins) {
  PendingWork work(std::make_shared<CallbackPool>());
  EXPECT_FALSE(work.wait(std::chrono::steady_clock::now()));
  work.complete(Status(Code::kTimeout, "first"));
  work.complete(Status::ok());
  EXPECT_TRUE(work.wait(soon()));
  EXPECT_EQ(work.status().message(), "first");
}

TEST(PendingWork, WaitsInOtherThreadsEnd) {
  PendingWork work(std::make_shared<CallbackPool>());
  std::atomic<int> woken{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) waiters.emplace_back([&] { woken += work.wait(soon()) ? 1 : 0; });
  work.complete(Status::ok());
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(woken, 4);
}

// Who completes a Work holds a reference to it: the one that waits may let go as soon as it is done.
std::shared_ptr<PendingWork> make_work(const std::shared_ptr<CallbackPool>& callbacks) {
  return std::make_shared<PendingWork>(callbacks);
}

TEST(PendingWork, ACallbackMayWaitForAnOperationWhoseCallbackComesLater) {
  // torch's PowerSGD hook does this: with a single callback thread it would wait for ever.
  const auto callbacks = std::make_shared<CallbackPool>();
  const auto outer = make_work(callbacks);
  const auto inner = make_work(callbacks);
  const auto inner_seen = make_work(callbacks);
  const auto done = make_work(callbacks);
  outer->on_done([=](const Status&) {
    inner->complete(Status::ok());
    done->complete(inner_seen->wait(soon()) ? Status::ok() : Status(Code::kTimeout, "the inner callback never ran"));
  });
  inner->on_done([=](const Status&) { inner_seen->complete(Status::ok()); });
  outer->complete(Status::ok());
  ASSERT_TRUE(done->wait(soon()));
  EXPECT_TRUE(done->status().is_ok()) << done->status().to_string();
}

TEST(PendingWork, ACallbackAddedAfterwardsRunsToo) {
  const auto callbacks = std::make_shared<CallbackPool>();
  const auto work = make_work(callbacks);
  work->complete(Status(Code::kMismatch, "text"));
  const auto seen = make_work(callbacks);
  work->on_done([seen](const Status& status) { seen->complete(status); });
  ASSERT_TRUE(seen->wait(soon()));
  EXPECT_EQ(seen->status().code(), Code::kMismatch);
}

TEST(CallbackPool, TheLastReferenceMayGoInsideACallback) {
  const auto reached = make_work(std::make_shared<CallbackPool>());
  auto pool = std::make_shared<CallbackPool>();
  CallbackPool* raw = pool.get();
  raw->run([pool = std::move(pool), reached]() mutable {
    pool.reset();
    reached->complete(Status::ok());
  });
  EXPECT_TRUE(reached->wait(soon()));
}

TEST(CallbackPool, ClosingWaitsForWhatRunsAndIsQueued) {
  CallbackPool pool(1);
  std::atomic<int> ended{0};
  for (int i = 0; i < 3; ++i) {
    pool.run([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++ended;
    });
  }
  EXPECT_TRUE(pool.close(soon()));
  EXPECT_EQ(ended, 3);
}

TEST(CallbackPool, WhatAClosedPoolRunsIsDoneAtOnce) {
  CallbackPool pool;
  EXPECT_TRUE(pool.close(soon()));
  bool ran = false;
  pool.run([&] { ran = true; });
  EXPECT_TRUE(ran);
}

TEST(CallbackPool, ClosingInsideACallbackDoesNotWaitForItself) {
  const auto done = make_work(std::make_shared<CallbackPool>());
  CallbackPool pool;
  pool.run([&] { done->complete(pool.close(soon()) ? Status::ok() : Status(Code::kTimeout, "waited for itself")); });
  ASSERT_TRUE(done->wait(soon()));
  EXPECT_TRUE(done->status().is_ok()) << done->status().to_string();
}

TEST(CallbackPool, ClosingGivesUpAtTheDeadline) {
  CallbackPool pool;
  const auto released = make_work(std::make_shared<CallbackPool>());
  pool.run([=] { released->wait(soon()); });
  EXPECT_FALSE(pool.close(std::chrono::steady_clock::now() + std::chrono::milliseconds(20)));
  released->complete(Status::ok());
}

/// Completes what it is asked to drive.
class FakeDriver final : public Driver {
 public:
  void drive(const Work& work, Instant) override {
    ++calls;
    if (on_drive) on_drive();
    if (&work == owned.get()) owned->complete(Status::ok());
  }
  std::shared_ptr<PendingWork> owned;
  std::function<void()> on_drive;
  int calls = 0;
};

TEST(DriverSeat, AThreadThatWaitsDrivesWhereTheSeatIsFree) {
  FakeDriver driver;
  const auto seat = std::make_shared<DriverSeat>(&driver);
  driver.owned = std::make_shared<PendingWork>(std::make_shared<CallbackPool>(), seat);
  EXPECT_TRUE(driver.owned->wait(soon()));
  EXPECT_EQ(driver.calls, 1);
}

TEST(DriverSeat, WhereItIsTakenTheOneThatWaitsUnparksTheProgressThread) {
  FakeDriver driver;
  const auto seat = std::make_shared<DriverSeat>(&driver);
  const auto work = std::make_shared<PendingWork>(std::make_shared<CallbackPool>(), seat);
  const auto taken = seat->take();
  std::thread progress([&] {
    seat->park(std::chrono::minutes(5));
    work->complete(Status::ok());
  });
  EXPECT_TRUE(work->wait(soon()));
  progress.join();
  EXPECT_EQ(driver.calls, 0);
}

TEST(DriverSeat, AProgressThreadThatIsAwakeLeavesItToWhoWaits) {
  FakeDriver driver;
  const auto seat = std::make_shared<DriverSeat>(&driver);
  driver.owned = std::make_shared<PendingWork>(std::make_shared<CallbackPool>(), seat);
  std::atomic<bool> is_taken{false};
  std::atomic<bool> is_over{false};
  std::thread progress([&] {
    while (!is_over.load()) {
      {
        const auto taken = seat->take();
        is_taken.store(true);
        while (!seat->is_wanted() && !is_over.load()) std::this_thread::yield();
      }
      seat->park(std::chrono::milliseconds(1));
    }
  });
  while (!is_taken.load()) std::this_thread::yield();
  // One attempt may be too short on a busy machine; who waits tries again.
  while (!driver.owned->wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(5))) {
  }
  is_over.store(true);
  progress.join();
  EXPECT_EQ(driver.calls, 1);
}

// The progress thread of a job with a network stays away while others drive, and comes back soon after the last.
TEST(DriverSeat, TellsWhetherThreadsThatWaitHaveDrivenOfLate) {
  FakeDriver driver;
  const auto seat = std::make_shared<DriverSeat>(&driver);
  EXPECT_FALSE(seat->is_visited(std::chrono::nanoseconds(1)));
  driver.owned = std::make_shared<PendingWork>(std::make_shared<CallbackPool>(), seat);
  driver.on_drive = [&] { EXPECT_TRUE(seat->is_visited(Duration::zero())); };
  EXPECT_TRUE(driver.owned->wait(soon()));
  EXPECT_EQ(driver.calls, 1);
  EXPECT_TRUE(seat->is_visited(std::chrono::hours(1)));
  EXPECT_FALSE(seat->is_visited(Duration::zero()));
}

TEST(DriverSeat, ParkingTellsWhetherItWasUnparked) {
  FakeDriver driver;
  DriverSeat seat(&driver);
  EXPECT_FALSE(seat.park(Duration::zero()));
  seat.unpark();
  EXPECT_TRUE(seat.park(std::chrono::minutes(5)));
  EXPECT_FALSE(seat.park(Duration::zero()));
}

TEST(DriverSeat, AfterTheDriverHasGoneWaitingIsOnlyWaiting) {
  FakeDriver driver;
  const auto seat = std::make_shared<DriverSeat>(&driver);
  const auto work = std::make_shared<PendingWork>(std::make_shared<CallbackPool>(), seat);
  seat->close();
  EXPECT_FALSE(work->wait(std::chrono::steady_clock::now()));
  EXPECT_EQ(driver.calls, 0);
}

}  // namespace
}  // namespace herring::runtime
