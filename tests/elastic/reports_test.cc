#include "elastic/reports.h"

#include <gtest/gtest.h>

#include <vector>

namespace herring::elastic {
namespace {

using namespace std::chrono_literals;

constexpr Instant kStart{100s};

/// How often a worker reports that has something new every `every` for a second.
std::size_t reports_in_a_second(std::uint32_t workers, Duration every) {
  Reports reports;
  std::size_t told = 0;
  std::size_t operations = 0;
  for (Instant now = kStart; now < kStart + 1s; now += every) {
    reports.add({0, operations++});
    if (now < reports.due(workers)) continue;
    EXPECT_FALSE(reports.take(now).empty());
    ++told;
  }
  return told;
}

// The launcher's core would hear of each operation of each worker by itself: 40,000 messages a second with 2,048.
TEST(ElasticReports, ManyOperationsAreToldTogether) {
  EXPECT_EQ(reports_in_a_second(2, 1ms), 20U);
  EXPECT_EQ(reports_in_a_second(2048, 1ms), 5U) << "no more often than they are answered";
  EXPECT_EQ(reports_in_a_second(2048, 50ms), 4U);
  EXPECT_EQ(report_pause(2048), settled_pause(2048));
}

TEST(ElasticReports, AfterAPauseTheFirstIsToldAtOnce) {
  Reports reports;
  EXPECT_EQ(reports.due(2048), Instant::max());
  reports.add({0, 1});
  EXPECT_LE(reports.due(2048), kStart);
  EXPECT_EQ(reports.take(kStart), (std::vector<OperationId>{{0, 1}}));
  EXPECT_EQ(reports.due(2048), Instant::max()) << "nothing to tell wakes nobody";
  reports.add({0, 2});
  reports.add({3, 3});
  EXPECT_EQ(reports.due(2048), kStart + report_pause(2048));
  EXPECT_EQ(reports.take(kStart + 1s), (std::vector<OperationId>{{0, 2}, {3, 3}}));
}

// Somebody asks while there is nothing to tell: what comes next still goes at once.
TEST(ElasticReports, ToTellNothingDelaysNothing) {
  Reports reports;
  EXPECT_TRUE(reports.take(kStart).empty());
  reports.add({0, 1});
  EXPECT_LE(reports.due(2), kStart);
}

}  // namespace
}  // namespace herring::elastic
