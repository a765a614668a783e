#include "core/roster.h"

#include "server/engine_bench.h"

/// Backup workers on the lane's side: who is in is decided once, and who comes late gets what was kept.
namespace herring::server {
namespace {

constexpr std::uint64_t kPlenty = 1 << 20;

struct BackupBench : Bench {
  explicit BackupBench(std::uint32_t workers_count, std::uint32_t backup, Duration grace = {},
                       std::uint64_t bytes = kPlenty)
      : Bench(workers_count) {
    config.backup_workers = backup;
    config.backup_grace = grace;
    config.backup_bytes = bytes;
    build();
  }

  std::uint64_t say(std::uint32_t sender, const wire::Announce& body, std::uint16_t flags, std::uint32_t shard,
                    std::span<const std::byte> rest) {
    wire::Header head = header(sender, wire::MessageType::kAnnounce);
    head.tag = next_tag;
    next_tag += 100;
    head.offset = next_sequence[sender]++;
    head.count = 1;
    head.flags = flags;
    head.shard = shard;
    const auto encoded = wire::encode(body);
    std::vector<std::byte> bytes(encoded.begin(), encoded.end());
    bytes.insert(bytes.end(), rest.begin(), rest.end());
    control(head, bytes);
    return head.tag;
  }
  std::uint64_t join(std::uint32_t sender, std::uint32_t chunks) {
    wire::Announce body = announce(sender, chunks);
    body.descriptor.part_bytes = body.shard_bytes = 0;
    body.owned_count = 0;
    return say(sender, body, wire::kFlagJoin, 0, {});
  }
  std::uint64_t take_part(std::uint32_t sender, std::uint32_t chunks, std::uint64_t roster) {
    const std::vector<std::byte> words = wire::encode_list(std::span(&roster, 1));
    return say(sender, announce(sender, chunks), wire::kFlagRoster, wire::kRosterShard, words);
  }
  /// Who was told what: bits by receiver.
  std::map<std::uint32_t, std::uint64_t> rosters() const {
    std::map<std::uint32_t, std::uint64_t> told;
    for (const SendAction& one : sends(wire::MessageType::kRoster)) told[one.to.value] = one.header.offset;
    return told;
  }
  /// Carries out copies, as the executor does.
  void copy() const {
    for (const CopyAction& action : all<CopyAction>()) {
      std::memcpy(action.to.data(), action.from.data(), action.from.size());
    }
  }
  void push_all(const std::vector<SendAction>& grants, std::byte value) {
    for (const SendAction& grant : grants) {
      for (std::uint32_t i = 0; i < grant.header.count; ++i) {
        push_filled(grant.to.value, grant.header.tag + i, grant.header.chunk + i, value);
      }
    }
  }
  void push_filled(std::uint32_t sender, std::uint64_t tag, std::uint32_t chunk, std::byte value) {
    wire::Header head = header(sender, wire::MessageType::kPush);
    head.tag = tag;
    head.shard = wire::kRosterShard;
    head.chunk = chunk;
    head.offset = std::uint64_t{chunk} * kChunk;
    head.payload_bytes = kChunk;
    const PostReceiveAction receive = posted.at(tag);
    posted.erase(tag);
    std::fill(receive.payload.begin(), receive.payload.end(), value);
    engine->on_received(now, receive.token, Status::ok(), head);
    collect();
    copy();
    for (const SendAction& result : sends(wire::MessageType::kResult)) results.push_back(result);
    sent_all();
  }

  std::vector<SendAction> results;
};

TEST(ServerRoster, IsDecidedWithTheFirstAndToldToAllAlike) {
  BackupBench bench(4, 1);
  bench.join(3, 2);
  bench.join(0, 2);
  EXPECT_TRUE(bench.rosters().empty());
  bench.join(1, 2);
  const std::map<std::uint32_t, std::uint64_t> in_time = {{0, 0b1011}, {1, 0b1011}, {3, 0b1011}};
  EXPECT_EQ(bench.rosters(), in_time);
  bench.sent_all();
  bench.now += 1s;
  const std::uint64_t tag = bench.join(2, 2);
  const std::map<std::uint32_t, std::uint64_t> late = {{2, 0b1011}};
  EXPECT_EQ(bench.rosters(), late) << "the late one learns what the others were told";
  EXPECT_EQ(bench.sends(wire::MessageType::kRoster)[0].tag.value, tag);
  EXPECT_EQ(bench.sends(wire::MessageType::kRoster)[0].header.count, 1'000'000 | wire::kWasLast);
  bench.sent_all();
  EXPECT_TRUE(bench.engine->is_idle());
  EXPECT_EQ(bench.engine->stats().dropped, 1u);
  EXPECT_EQ(bench.engine->lateness()[2].last, 1u);
}

TEST(ServerRoster, WaitsForTheGraceAndNoLonger) {
  BackupBench bench(3, 1, 5ms);
  bench.join(0, 1);
  bench.join(1, 1);
  EXPECT_TRUE(bench.rosters().empty());
  EXPECT_EQ(bench.engine->next_deadline(), bench.now + 5ms);
  bench.now += 4ms;
  bench.join(2, 1);
  EXPECT_EQ(bench.rosters().size(), 3u) << "all are there: nothing to wait for";
  EXPECT_EQ(bench.rosters()[0], 0b111u);
  bench.sent_all();
  bench.op = 2;
  bench.join(0, 1);
  bench.join(2, 1);
  bench.now += 5ms;
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.rosters()[2], 0b101u);
}

TEST(ServerRoster, TheGraceIsNotForWhoIsBehind) {
  BackupBench bench(3, 1, 5ms);
  bench.join(0, 1);
  bench.join(1, 1);
  bench.now += 5ms;
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.rosters()[0], 0b011u);
  bench.op = 2;
  bench.join(0, 1);
  bench.join(1, 1);
  EXPECT_EQ(bench.rosters()[0], 0b011u) << "it has not come to the first one yet";
  bench.op = 3;
  bench.join(2, 1);
  bench.join(1, 1);
  EXPECT_TRUE(bench.rosters().empty()) << "rank 0 is not behind, only a little late";
  for (bench.op = 1; bench.op <= 2; ++bench.op) bench.join(2, 1);
  bench.op = 4;
  bench.join(0, 1);
  bench.join(1, 1);
  EXPECT_TRUE(bench.rosters().empty()) << "it has caught up";
}

TEST(ServerRoster, SumsThoseWhoAreInAndKeepsTheResultForWhoIsLate) {
  BackupBench bench(3, 1);
  std::map<std::uint32_t, std::uint64_t> tags;
  for (const std::uint32_t sender : {2u, 0u}) tags[sender] = bench.take_part(sender, 2, 0b101);
  const auto grants = bench.sends(wire::MessageType::kGrant);
  ASSERT_EQ(grants.size(), 2u);
  EXPECT_EQ(bench.engine->stats().slots_in_use, 4u) << "none for who is not in";
  EXPECT_GE(bench.engine->stats().kept_bytes, 2u * kChunk);
  bench.sent_all();
  bench.push_all(grants, std::byte{0});
  ASSERT_EQ(bench.results.size(), 4u);
  EXPECT_EQ(bench.engine->stats().slots_in_use, 0u) << "what is kept holds no slot";
  EXPECT_FALSE(bench.engine->is_idle());
  const std::uint64_t tag = bench.take_part(1, 2, 0b101);
  EXPECT_TRUE(bench.sends(wire::MessageType::kGrant).empty()) << "its data is not wanted";
  const auto late = bench.sends(wire::MessageType::kResult);
  ASSERT_EQ(late.size(), 2u);
  for (std::uint32_t chunk = 0; chunk < 2; ++chunk) {
    EXPECT_EQ(late[chunk].tag.value, tag + chunk);
    EXPECT_EQ(late[chunk].payload.size(), kChunk);
    EXPECT_EQ(late[chunk].header.offset, chunk * kChunk);
  }
  EXPECT_GT(bench.engine->stats().kept_bytes, 0u) << "they are being sent";
  bench.sent_all();
  EXPECT_EQ(bench.engine->stats().kept_bytes, 0u);
  EXPECT_TRUE(bench.engine->is_idle());
}

TEST(ServerRoster, WhoComesWhileTheOthersAreBeingSummedGetsAllOfItOnce) {
  BackupBench bench(3, 1);
  for (const std::uint32_t sender : {0u, 1u}) bench.take_part(sender, 2, 0b011);
  const auto grants = bench.sends(wire::MessageType::kGrant);
  bench.sent_all();
  for (const SendAction& grant : grants) bench.push_filled(grant.to.value, grant.header.tag, 0, std::byte{});
  std::vector<std::uint32_t> chunks;
  bench.take_part(2, 2, 0b011);
  for (const SendAction& result : bench.sends(wire::MessageType::kResult)) chunks.push_back(result.header.chunk);
  bench.sent_all();
  bench.results.clear();
  for (const SendAction& grant : grants) bench.push_filled(grant.to.value, grant.header.tag + 1, 1, std::byte{});
  for (const SendAction& result : bench.results) {
    if (result.to == PeerId{2}) chunks.push_back(result.header.chunk);
  }
  EXPECT_EQ(chunks, (std::vector<std::uint32_t>{0, 1}));
  EXPECT_TRUE(bench.engine->is_idle());
}

TEST(ServerRoster, WhatItMayKeepIsBoundedAndWhatFindsNoRoomWaits) {
  BackupBench bench(2, 1, {}, 2 * (kChunk + 1024));
  for (bench.op = 1; bench.op <= 3; ++bench.op) bench.take_part(0, 1, 0b01);
  EXPECT_EQ(bench.engine->stats().kept_bytes, 2u * (kChunk + 1024));
  EXPECT_EQ(bench.posted.size(), 2u) << "the third has no grant";
  bench.op = 3;
  bench.take_part(1, 1, 0b01);
  EXPECT_EQ(bench.posted.size(), 3u) << "who was late has come: nothing is to be kept";
  EXPECT_EQ(bench.engine->stats().kept_peak, 2u * (kChunk + 1024));
}

TEST(ServerRoster, WhoIsOwedTooMuchIsWaitedFor) {
  BackupBench bench(2, 1, {}, 2 * (kChunk + 1024));
  for (bench.op = 1; bench.op <= 2; ++bench.op) {
    bench.join(0, 1);
    EXPECT_EQ(bench.rosters()[0], 0b01u);
  }
  bench.join(0, 1);
  EXPECT_TRUE(bench.rosters().empty());
  bench.op = 1;
  bench.join(1, 1);
  EXPECT_EQ(bench.rosters().count(0), 0u) << "it has come to the first, and will come to the third";
  bench.op = 3;
  bench.join(1, 1);
  EXPECT_EQ(bench.rosters()[0], 0b11u) << "this time it is in";
}

TEST(ServerRoster, WhoComesAfterTheTimeOutIsToldAndNothingIsKeptForItAnyMore) {
  BackupBench bench(2, 1);
  bench.take_part(0, 1, 0b01);
  bench.push_all(bench.sends(wire::MessageType::kGrant), std::byte{});
  EXPECT_GT(bench.engine->stats().kept_bytes, 0u);
  bench.now += 10s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_TRUE(bench.sends(wire::MessageType::kError).empty()) << "the other one has all";
  EXPECT_EQ(bench.engine->stats().kept_bytes, 0u);
  bench.take_part(1, 1, 0b01);
  const auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_NE(bench.text(errors[0]).find("rank 1 had not come for the result"), std::string::npos);
}

TEST(ServerRoster, ALostWorkerFailsWhatIsNotDone) {
  BackupBench bench(3, 1);
  bench.take_part(0, 1, 0b011);
  bench.take_part(1, 1, 0b011);
  bench.engine->on_peer_lost(bench.now, PeerId{2}, "rank 2 is lost");
  bench.collect();
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 2u);
}

TEST(ServerRoster, WhoDisagreesIsTold) {
  BackupBench bench(3, 1);
  bench.join(0, 2);
  wire::Announce plain = bench.announce(1, 2);
  bench.send(1, plain);
  bench.join(2, 2);
  auto errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 3u);
  EXPECT_NE(bench.text(errors[0]).find("ranks 0, 2 said all_reduce(float32[64], sum) with backup workers"),
            std::string::npos)
      << bench.text(errors[0]);
  bench.op = 2;
  bench.join(0, 2);
  bench.join(1, 2);
  bench.sent_all();
  bench.join(2, 3);
  errors = bench.sends(wire::MessageType::kError);
  ASSERT_EQ(errors.size(), 1u) << "the others have gone on";
  EXPECT_EQ(errors[0].to, PeerId{2});
  bench.op = 3;
  bench.take_part(0, 1, 0b011);
  bench.take_part(1, 1, 0b101);
  bench.now += 2s;
  bench.engine->on_tick(bench.now);
  bench.collect();
  EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 2u) << "two rosters of one operation";
}

TEST(ServerRoster, RefusesWhatCannotBe) {
  const auto refused = [](BackupBench& bench) {
    EXPECT_EQ(bench.sends(wire::MessageType::kError).size(), 1u);
    EXPECT_EQ(bench.engine->stats().messages_rejected, 1u);
  };
  BackupBench off(2, 0);
  off.join(0, 1);
  refused(off);
  BackupBench nobody(2, 1);
  nobody.take_part(0, 1, 0);
  refused(nobody);
  BackupBench stranger(2, 1);
  stranger.take_part(0, 1, 0b101);
  refused(stranger);
  BackupBench maximum(2, 1);
  wire::Announce body = maximum.announce(0, 1);
  body.descriptor.reduce = ReduceOp::kMax;
  const std::uint64_t roster = 1;
  maximum.say(0, body, wire::kFlagRoster, wire::kRosterShard, wire::encode_list(std::span(&roster, 1)));
  refused(maximum);
  BackupBench shard(2, 1);
  shard.say(0, shard.announce(0, 1), wire::kFlagRoster, 0, wire::encode_list(std::span(&roster, 1)));
  refused(shard);
  BackupBench data(2, 1);
  std::vector<std::byte> words = wire::encode_list(std::span(&roster, 1));
  words.resize(words.size() + kChunk);
  data.say(1, data.announce(1, 1), wire::kFlagRoster | wire::kFlagEager, wire::kRosterShard, words);
  refused(data);
}

TEST(Roster, CountsItsBits) {
  Roster roster(roster_words(70));
  ASSERT_EQ(roster.size(), 2u);
  EXPECT_FALSE(is_sane(roster, 70)) << "nobody";
  add_to(roster, 3);
  add_to(roster, 69);
  EXPECT_EQ(members_of(roster), (std::vector<std::uint32_t>{3, 69}));
  EXPECT_TRUE(is_sane(roster, 70));
  EXPECT_FALSE(is_sane(roster, 69)) << "69 does not exist";
  EXPECT_FALSE(is_sane(roster, 64)) << "another size";
  EXPECT_TRUE(is_sane(Roster{~std::uint64_t{0}}, 64));
}

}  // namespace
}  // namespace herring::server
