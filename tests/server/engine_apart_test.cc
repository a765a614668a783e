// A worker whose data lies in a device: its pushes and results travel apart from their headers, nobody else's do.
#include <gtest/gtest.h>

#include <vector>

#include "server/engine_bench.h"

namespace herring::server {
namespace {

struct ApartBench : Bench {
  ApartBench() : Bench(2) {}
  void say(std::uint32_t sender, std::uint16_t flags, std::span<const std::byte> eager = {}) {
    wire::Header head = header(sender, wire::MessageType::kAnnounce);
    head.tag = tag;
    head.offset = next_sequence[sender]++;
    head.count = 1;
    head.flags = flags;
    const auto encoded = wire::encode(announce(sender, 1));
    std::vector<std::byte> bytes(encoded.begin(), encoded.end());
    bytes.insert(bytes.end(), eager.begin(), eager.end());
    control(head, bytes);
    tag += 100;
  }
  std::uint64_t tag = 1000;
};

TEST(ServerApart, OnlyWhoSaidSoGetsHeadersAndDataInTwoMessages) {
  ApartBench bench;
  bench.say(0, wire::kFlagApart);
  bench.say(1, 0);
  const std::vector<PostReceiveAction> receives = bench.all<PostReceiveAction>();
  ASSERT_EQ(receives.size(), 2u);
  for (const PostReceiveAction& receive : receives) EXPECT_EQ(receive.is_apart, receive.from == PeerId{0});
  std::vector<std::uint64_t> pushes(2);
  for (const SendAction& grant : bench.sends(wire::MessageType::kGrant)) {
    EXPECT_FALSE(grant.is_apart);
    pushes[grant.to.value] = grant.header.tag;
  }
  bench.push(0, pushes[0], 0);
  bench.push(1, pushes[1], 0);
  const std::vector<SendAction> results = bench.sends(wire::MessageType::kResult);
  ASSERT_EQ(results.size(), 2u);
  for (const SendAction& result : results) EXPECT_EQ(result.is_apart, result.to == PeerId{0});
}

/// A card would be given both kinds of memory, or two messages would have one tag.
TEST(ServerApart, WhatCannotGoSoIsRefused) {
  const std::vector<std::byte> data(kChunk);
  for (const std::uint16_t other : {wire::kFlagEager, wire::kFlagOneHop, wire::kFlagJoin}) {
    ApartBench bench;
    const bool is_eager = other == wire::kFlagEager;
    bench.say(0, wire::kFlagApart | other, is_eager ? data : std::vector<std::byte>{});
    EXPECT_EQ(bench.engine->stats().messages_rejected, 1u) << other;
    EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 1u) << other;
  }
  ApartBench bench;
  bench.tag = wire::kApartTag;
  bench.say(0, wire::kFlagApart);
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 1u);
}

}  // namespace
}  // namespace herring::server
