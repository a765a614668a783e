// Several chunks in one message.
#include <algorithm>
#include <array>
#include <vector>

#include "server/engine_bench.h"

namespace herring::server {
namespace {

TEST(ServerRuns, ChunksThatGoQuicklyTravelTogether) {
  Bench bench(2, 8, 32);
  bench.config.max_run = 4;
  bench.config.run_time = Duration::max();
  bench.build();
  for (std::uint32_t sender = 0; sender < 2; ++sender) bench.send(sender, bench.announce(sender, 11));
  const auto grants = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(grants.size(), 2u);
  EXPECT_EQ(grants[0].header.count, 8u);
  EXPECT_EQ(wire::decode_list(grants[0].body, 1), (std::vector<std::uint64_t>{4}));
  ASSERT_EQ(bench.posted.size(), 4u);
  EXPECT_EQ(bench.posted.at(grants[0].header.tag + 4).payload.size(), 4 * kChunk);
  EXPECT_EQ(bench.engine->stats().slots_in_use, 16u);
  bench.push(0, grants[0].header.tag, 0, 4 * kChunk);
  bench.push(1, grants[1].header.tag, 0, 3 * kChunk);
  EXPECT_EQ(bench.engine->stats().messages_rejected, 1u) << "not what was granted";
  bench.push(1, grants[1].header.tag, 0, 4 * kChunk);
  const auto results = bench.sends(wire::MessageType::kResult);
  ASSERT_EQ(results.size(), 2u);
  EXPECT_EQ(results[0].header.payload_bytes, 4 * kChunk);
  // The end of the shard: three chunks, in one message as well.
  const auto last = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(last.size(), 2u);
  EXPECT_EQ(last[0].header.chunk, 8u);
  EXPECT_EQ(last[0].header.count, 3u);
  EXPECT_EQ(wire::decode_list(last[0].body, 1), (std::vector<std::uint64_t>{3}));
  EXPECT_EQ(bench.engine->stats().runs, 3u);
}

TEST(ServerRuns, ARunEndsWhereAnotherProcessGoesOn) {
  Bench bench(2, 16, 64);
  bench.config.max_run = 8;
  bench.config.run_time = Duration::max();
  bench.build();
  for (std::uint32_t sender = 0; sender < 2; ++sender) {
    wire::Announce body = bench.announce(sender, 20);
    body.contributor = 0;
    body.contributor_count = 1;
    body.owned_first = sender == 0 ? 0 : 5;
    body.owned_count = sender == 0 ? 5 : 15;
    bench.send(sender, body, {}, 2);
  }
  std::vector<std::array<std::uint32_t, 3>> granted;
  for (const SendAction& grant : bench.sends(wire::MessageType::kGrant)) {
    granted.push_back({grant.to.value, grant.header.chunk, grant.header.count});
  }
  std::ranges::sort(granted);
  EXPECT_EQ(granted, (std::vector<std::array<std::uint32_t, 3>>{{0, 0, 5}, {1, 5, 8}, {1, 13, 7}}));
}

TEST(ServerRuns, WhereSlotsAreFewChunksGoOneByOne) {
  Bench bench(3, 8, 4);
  bench.config.max_run = 8;
  bench.config.run_time = Duration::max();
  bench.build();
  for (std::uint32_t sender = 0; sender < 3; ++sender) bench.send(sender, bench.announce(sender, 20));
  const auto grants = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(grants.size(), 3u);
  EXPECT_EQ(grants[0].header.count, 1u);
  EXPECT_TRUE(grants[0].body.empty());
}

TEST(ServerRuns, ALaneThatWaitsForACoreSendsMoreTogether) {
  for (const bool waits : {false, true}) {
    Bench bench(2, 8, 32);
    bench.config.max_run = 4;
    bench.config.run_time = std::chrono::milliseconds(1);
    bench.build();
    if (waits) bench.engine->on_core_wait(0.6);
    for (std::uint32_t sender = 0; sender < 2; ++sender) bench.send(sender, bench.announce(sender, 11));
    const auto grants = bench.sends(wire::MessageType::kGrant);
    ASSERT_FALSE(grants.empty());
    if (waits) {
      EXPECT_EQ(wire::decode_list(grants[0].body, 1), (std::vector<std::uint64_t>{4}));
    } else {
      EXPECT_TRUE(grants[0].body.empty()) << "one by one: nothing was measured";
    }
  }
}

}  // namespace
}  // namespace herring::server
