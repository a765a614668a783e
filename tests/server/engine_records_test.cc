#include <gtest/gtest.h>

#include "server/engine_bench.h"

/// What a worker can make a lane remember, whatever it does.
namespace herring::server {
namespace {

constexpr std::uint64_t kLimit = 200'000;

Bench limited(std::uint32_t workers) {
  Bench bench(workers);
  bench.config.record_bytes = kLimit;
  bench.config.max_ops_per_worker = 1 << 20;
  bench.build();
  return bench;
}

/// Announces of rank 0 alone, one operation after the other, until one is refused; how many were taken.
std::uint64_t flood(Bench& bench, std::uint64_t first) {
  for (std::uint64_t op = first;; ++op) {
    bench.op = op;
    bench.send(0, bench.announce(0, 1));
    const auto errors = bench.sends(wire::MessageType::kError);
    if (!errors.empty()) {
      EXPECT_NE(Bench::text(errors[0]).find("wait for some before starting more"), std::string::npos)
          << Bench::text(errors[0]);
      EXPECT_NE(Bench::text(errors[0]).find("rank 0"), std::string::npos);
      return op - first;
    }
    EXPECT_LE(bench.engine->stats().record_bytes, kLimit);
  }
}

TEST(ServerRecords, AWorkerThatFloodsALaneIsRefusedAndTheOthersGoOn) {
  Bench bench = limited(4);
  EXPECT_GT(flood(bench, 1), 20u);
  // Everybody else has a share: an operation of ranks 1 to 3.
  bench.group = 5;
  bench.op = 1'000'000;
  for (std::uint32_t contributor = 0; contributor < 3; ++contributor) {
    wire::Announce announce = bench.announce(contributor + 1, 1);
    announce.contributor = contributor;
    announce.contributor_count = 3;
    bench.send(contributor + 1, announce);
    EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty());
  }
  EXPECT_EQ(bench.sends(wire::MessageType::kGrant).size(), 3u);
  EXPECT_LE(bench.engine->stats().record_peak, record_bound(kLimit));
}

TEST(ServerRecords, FailuresAreForgottenBeforeWorkIsRefused) {
  Bench bench = limited(2);
  const std::uint64_t taken = flood(bench, 1);
  bench.now += std::chrono::seconds(10);
  bench.engine->on_tick(bench.now);  // All of them failed: nobody else came.
  bench.collect();
  EXPECT_EQ(bench.engine->stats().ops_failed, taken);
  EXPECT_GT(bench.engine->stats().record_bytes, kLimit / 2) << "they are remembered for who comes late";
  EXPECT_EQ(flood(bench, 1'000'000), taken) << "as many as before";
  bench.now += std::chrono::hours(1);
  for (int i = 0; i < 3; ++i) {
    bench.engine->on_tick(bench.now += std::chrono::hours(1));
    bench.collect();
  }
  EXPECT_EQ(bench.engine->stats().record_bytes, 0u);
}

/// Cancels of what was never announced are records, too.
TEST(ServerRecords, CancelsOfWhatNobodyAnnouncedAreLimited) {
  Bench bench = limited(2);
  for (std::uint64_t op = 1; op < 2000; ++op) {
    bench.op = op;
    wire::Header head = bench.header(0, wire::MessageType::kCancel);
    head.chunk = 0;
    head.offset = 2;
    head.count = 1;
    bench.control(head, std::vector<std::byte>(1, static_cast<std::byte>(Code::kCancelled)));
    ASSERT_LE(bench.engine->stats().record_bytes, kLimit);
  }
  EXPECT_GT(bench.engine->stats().ops_failed, 100u);
}

}  // namespace
}  // namespace herring::server
