#include "core/metrics.h"

#include <gtest/gtest.h>

#include <thread>

namespace herring {
namespace {

using Values = std::vector<std::pair<std::string, std::uint64_t>>;

TEST(Metrics, SnapshotHasEveryNameOnceInOrder) {
  Metrics metrics;
  metrics.counter("ops").add();
  metrics.counter("ops").add(2);
  metrics.gauge("slots").set(7);
  metrics.counter("bytes");
  EXPECT_EQ(metrics.snapshot(), (Values{{"bytes", 0}, {"ops", 3}, {"slots", 7}}));
}

TEST(Metrics, ReferencesStayGoodWhileOthersAreAdded) {
  Metrics metrics;
  Counter& first = metrics.counter("a");
  for (int i = 0; i < 1000; ++i) metrics.counter(std::string("b").append(std::to_string(i)));
  first.add(5);
  EXPECT_EQ(metrics.counter("a").value(), 5u);
  EXPECT_EQ(&first, &metrics.counter("a"));
}

TEST(Metrics, ANameIsOneKind) {
  Metrics metrics;
  metrics.counter("x");
  EXPECT_THROW(metrics.gauge("x"), Error);
  metrics.gauge("y");
  EXPECT_THROW(metrics.counter("y"), Error);
}

TEST(Metrics, GaugeKeepsTheHighestWhereAsked) {
  Metrics metrics;
  Gauge& peak = metrics.gauge("peak");
  for (const std::uint64_t value : {3u, 9u, 4u}) peak.raise_to(value);
  EXPECT_EQ(peak.value(), 9u);
  peak.set(1);
  EXPECT_EQ(peak.value(), 1u);
}

TEST(Metrics, NothingIsLostBetweenThreads) {
  constexpr std::uint64_t kThreads = 4;
  constexpr std::uint64_t kRounds = 20'000;
  Metrics metrics;
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&metrics, t] {
        Counter& shared = metrics.counter("shared");
        Gauge& peak = metrics.gauge("peak");
        for (std::uint64_t i = 0; i < kRounds; ++i) {
          shared.add();
          peak.raise_to(i * kThreads + t);
        }
      });
    }
    for (int i = 0; i < 100; ++i) EXPECT_LE(metrics.snapshot().size(), 2u);
  }
  EXPECT_EQ(metrics.snapshot(), (Values{{"peak", kRounds * kThreads - 1}, {"shared", kThreads * kRounds}}));
}

}  // namespace
}  // namespace herring
