#include "core/bounded_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "core/clock.h"

namespace herring {
namespace {

TEST(BoundedQueue, IsFirstInFirstOut) {
  BoundedQueue<int> queue(3);
  for (int i = 1; i <= 3; ++i) EXPECT_TRUE(queue.push(int{i}).is_ok());
  EXPECT_EQ(queue.size(), 3u);
  for (int i = 1; i <= 3; ++i) EXPECT_EQ(queue.try_pop(), i);
  EXPECT_EQ(queue.try_pop(), std::nullopt);
}

TEST(BoundedQueue, FullIsToldAndCountedAndLeavesTheItem) {
  BoundedQueue<std::unique_ptr<int>> queue(1);
  EXPECT_TRUE(queue.push(std::make_unique<int>(1)).is_ok());
  auto second = std::make_unique<int>(2);
  EXPECT_TRUE(queue.push(std::move(second)).is_again());
  ASSERT_NE(second, nullptr) << "the producer could not try again";
  EXPECT_EQ(queue.stats().rejected, 1u);
  EXPECT_EQ(**queue.try_pop(), 1);
  EXPECT_TRUE(queue.push(std::move(second)).is_ok());
  EXPECT_EQ(queue.stats().pushed, 2u);
  EXPECT_EQ(queue.stats().peak, 1u);
  EXPECT_EQ(queue.capacity(), 1u);
}

TEST(BoundedQueue, NoRoomAtAllIsRefused) { EXPECT_THROW(BoundedQueue<int>(0), Error); }

TEST(BoundedQueue, PopGivesUpAtTheDeadline) {
  BoundedQueue<int> queue(1);
  const Instant deadline = deadline_after(0.01);
  EXPECT_EQ(queue.pop(deadline), std::nullopt);
  EXPECT_GE(std::chrono::steady_clock::now(), deadline);
  EXPECT_EQ(queue.pop(deadline - std::chrono::seconds(100)), std::nullopt);
  EXPECT_TRUE(queue.push(4).is_ok());
  EXPECT_EQ(queue.pop(deadline - std::chrono::seconds(100)), 4) << "what is there needs no waiting";
}

TEST(BoundedQueue, CloseEndsWaitingAndKeepsWhatIsIn) {
  BoundedQueue<int> queue(4);
  EXPECT_TRUE(queue.push(1).is_ok());
  queue.close();
  queue.close();
  EXPECT_TRUE(queue.is_closed());
  EXPECT_EQ(queue.push(2).code(), Code::kShutdown);
  EXPECT_EQ(queue.pop(Instant::max()), 1);
  EXPECT_EQ(queue.pop(Instant::max()), std::nullopt);

  BoundedQueue<int> empty(1);
  std::optional<int> popped = 0;
  std::jthread waiter([&] { popped = empty.pop(Instant::max()); });
  empty.close();
  waiter.join();
  EXPECT_EQ(popped, std::nullopt);
}

TEST(BoundedQueue, ManyThreadsLoseAndDoubleNothing) {
  constexpr int kProducers = 3;
  constexpr int kConsumers = 2;
  constexpr int kItems = 3000;
  BoundedQueue<int> queue(16);
  std::atomic<std::int64_t> sum = 0;
  std::atomic<int> taken = 0;
  {
    std::vector<std::jthread> consumers;
    for (int c = 0; c < kConsumers; ++c) {
      consumers.emplace_back([&] {
        while (const auto item = queue.pop(deadline_after(60))) {
          sum += *item;
          ++taken;
        }
      });
    }
    {
      std::vector<std::jthread> producers;
      for (int p = 0; p < kProducers; ++p) {
        producers.emplace_back([&queue, p] {
          for (int i = 0; i < kItems; ++i) {
            while (queue.push(p * kItems + i).is_again()) std::this_thread::yield();
          }
        });
      }
    }
    queue.close();
  }
  constexpr std::int64_t kTotal = kProducers * kItems;
  EXPECT_EQ(taken, kTotal);
  EXPECT_EQ(sum, kTotal * (kTotal - 1) / 2);
  EXPECT_EQ(queue.stats().pushed, static_cast<std::uint64_t>(kTotal));
  EXPECT_LE(queue.stats().peak, 16u);
}

}  // namespace
}  // namespace herring
