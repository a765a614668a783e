// Who pushes what where: a pure function that all processes of a job compute alike.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "worker/engine_bench.h"

namespace herring::worker {
namespace {

using namespace testing;

/// Without memory: only its shape matters here.
Operation shape(std::uint64_t bytes, std::uint32_t owners) {
  Operation operation;
  operation.key = {GroupId{0}, 9, 0};
  operation.descriptor.op_bytes = operation.descriptor.part_bytes = bytes;
  operation.owner_count = owners;
  return operation;
}

TEST(WorkerEngine, OwnedRangesCoverEveryByteOnce) {
  Bench bench(3);
  for (const std::uint64_t bytes : {0ull, 1ull, 127ull, 128ull, 5'000ull, 100'001ull}) {
    for (const std::uint32_t owners : {1u, 2u, 3u, 8u}) {
      std::vector<int> covered(bytes);
      const auto ranges = owned_ranges(bench.config, shape(bytes, owners));
      for (std::uint32_t owner = 0; owner < owners; ++owner) {
        for (const ByteRange& range : ranges[owner]) {
          for (std::uint64_t b = 0; b < range.bytes; ++b) ++covered.at(range.offset + b);
        }
      }
      EXPECT_TRUE(std::all_of(covered.begin(), covered.end(), [](int n) { return n == 1; }))
          << bytes << " bytes, " << owners << " owners";
    }
  }
}

TEST(WorkerEngine, OwnersOnARailHaveTheShardsOfItsLanes) {
  Bench bench(4);
  bench.config.lane_rails = {0, 0, 1, 1};
  bench.config.rails = 2;
  for (const std::uint32_t owners : {1u, 2u, 3u, 4u}) {
    std::vector<std::vector<std::uint32_t>> owners_of_byte(40'960);
    const auto ranges = owned_ranges(bench.config, shape(40'960, owners));
    for (std::uint32_t owner = 0; owner < owners; ++owner) {
      for (const ByteRange& range : ranges[owner]) {
        for (std::uint64_t b = 0; b < range.bytes; ++b) owners_of_byte.at(range.offset + b).push_back(owner);
      }
    }
    for (std::uint64_t b = 0; b < owners_of_byte.size(); ++b) {
      ASSERT_EQ(owners_of_byte[b].size(), 1u) << "byte " << b << ", " << owners << " owners";
      // Lanes 0 and 1 have the first half.
      ASSERT_EQ(owners_of_byte[b].front() % 2, owners > 1 && b >= 20'480 ? 1u : 0u) << "byte " << b;
    }
  }
}

TEST(WorkerEngine, AnOperationOfOneRailHasNothingForTheOthers) {
  Bench bench(4);
  bench.config.lane_rails = {0, 1, 0, 1};
  bench.config.rails = 2;
  bench.config.announce_credits = 0;
  bench.build();
  std::vector<std::byte> memory(20'000);
  for (std::uint64_t number = 0; number < 20; ++number) {
    Operation operation = bench.operation(number, memory);
    operation.rails = 0b10;
    bench.submit(operation);
    std::set<PeerId> lanes;
    std::uint64_t bytes = 0;
    for (const SendAction& announce : bench.sends(wire::MessageType::kAnnounce)) {
      lanes.insert(announce.to);
      bytes += wire::decode_announce(announce.body)->shard_bytes;
    }
    EXPECT_EQ(lanes, (std::set{bench.config.lanes[1], bench.config.lanes[3]}));
    EXPECT_EQ(bytes, memory.size());
  }
  Operation operation = bench.operation(20, memory);
  operation.rails = 0b100;
  bench.submit(operation);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed.front().status.code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace herring::worker
