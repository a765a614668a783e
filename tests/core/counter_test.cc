#include "core/counter.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace herring {
namespace {

TEST(Counter, NothingIsLostBetweenThreads) {
  constexpr std::uint64_t kThreads = 4;
  constexpr std::uint64_t kRounds = 20'000;
  Counter counter;
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&counter] {
        for (std::uint64_t i = 0; i < kRounds; ++i) counter.add();
      });
    }
  }
  counter.add(5);
  EXPECT_EQ(counter.value(), kThreads * kRounds + 5);
}

}  // namespace
}  // namespace herring
