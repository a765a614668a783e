#include "wire/header.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace herring::wire {
namespace {

/// Every field its own value, so that two that are swapped show.
Header sample_header() {
  Header header;
  header.type = MessageType::kAnnounce;
  header.flags = kFlagReady | kFlagRoster;
  header.job_id = 0x0102030405060708;
  header.epoch = 0x11121314;
  header.sender = 0x21222324;
  header.op = 0x3132333435363738;
  header.group = 0x41424344;
  header.part = 0x51525354;
  header.tag = 0x6162636465666768;
  header.offset = 0x7172737475767778;
  header.chunk = 0x81828384;
  header.count = 0x91929394;
  header.payload_bytes = 0xA1A2A3A4;
  header.shard = 0xC1C2C3C4;
  return header;
}

/// Puts a right checksum on changed bytes: what an attacker, not line noise, would send.
std::vector<std::byte> resealed(HeaderBytes bytes) {
  const std::uint32_t crc = crc32c(std::span(bytes).first(76));
  for (std::size_t i = 0; i < 4; ++i) bytes[76 + i] = static_cast<std::byte>(crc >> (8 * i));
  return {bytes.begin(), bytes.end()};
}

void expect_same(const Header& a, const Header& b) {
  EXPECT_EQ(a.type, b.type);
  EXPECT_EQ(a.flags, b.flags);
  EXPECT_EQ(a.job_id, b.job_id);
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.sender, b.sender);
  EXPECT_EQ(a.key(), b.key());
  EXPECT_EQ(a.tag, b.tag);
  EXPECT_EQ(a.offset, b.offset);
  EXPECT_EQ(a.chunk, b.chunk);
  EXPECT_EQ(a.count, b.count);
  EXPECT_EQ(a.payload_bytes, b.payload_bytes);
  EXPECT_EQ(a.reserved, b.reserved);
}

TEST(Header, HasTheLayoutOfTheSpecification) {
  // Another implementation, written from docs/wire.md, must be able to talk to this one: these bytes are the contract.
  const HeaderBytes bytes = encode(sample_header());
  std::string hex;
  for (const std::byte b : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    hex += kDigits[std::to_integer<std::size_t>(b >> 4)];
    hex += kDigits[std::to_integer<std::size_t>(b & std::byte{15})];
  }
  EXPECT_EQ(hex.substr(0, 152),
            "48524e470101100208070605040302011413121124232221383736353433323144434241545352516867666564636261"
            "78777675747372718483828194939291a4a3a2a100000000c4c3c2c1");
  EXPECT_EQ(crc32c(std::span(bytes).first(76)),
            std::to_integer<std::uint32_t>(bytes[76]) | std::to_integer<std::uint32_t>(bytes[77]) << 8 |
                std::to_integer<std::uint32_t>(bytes[78]) << 16 | std::to_integer<std::uint32_t>(bytes[79]) << 24);
}

TEST(Header, RoundTrips) {
  const HeaderBytes bytes = encode(sample_header());
  const auto decoded = decode(bytes);
  ASSERT_TRUE(decoded);
  expect_same(*decoded, sample_header());
  for (std::uint8_t type = 1; type <= 21; ++type) {
    Header header;
    header.type = static_cast<MessageType>(type);
    const auto again = decode(encode(header));
    ASSERT_TRUE(again) << int{type};
    EXPECT_EQ(again->type, header.type);
  }
}

TEST(Header, EncodeFillsInMagicAndVersion) {
  Header header = sample_header();
  header.magic = 1;
  header.version = 99;
  header.header_crc32c = 6;
  EXPECT_EQ(encode(header), encode(sample_header()));
}

TEST(Header, EverySingleAndDoubleBitFlipIsRejected) {
  // A flipped bit in an offset would sum gradients into the wrong place without any error.
  const HeaderBytes good = encode(sample_header());
  for (std::size_t first = 0; first < 8 * kHeaderBytes; ++first) {
    HeaderBytes one = good;
    one[first / 8] ^= static_cast<std::byte>(1 << first % 8);
    ASSERT_FALSE(decode(one)) << "bit " << first;
    for (std::size_t second = first + 1; second < 8 * kHeaderBytes; ++second) {
      HeaderBytes two = one;
      two[second / 8] ^= static_cast<std::byte>(1 << second % 8);
      ASSERT_FALSE(decode(two)) << "bits " << first << " and " << second;
    }
  }
}

TEST(Header, EveryShorterMessageIsRejected) {
  const HeaderBytes good = encode(sample_header());
  for (std::size_t size = 0; size < kHeaderBytes; ++size) EXPECT_FALSE(decode(std::span(good).first(size))) << size;
}

TEST(Header, RightlySealedButNotOursIsRejected) {
  const HeaderBytes good = encode(sample_header());
  ASSERT_TRUE(decode(resealed(good)));
  const auto with = [&](std::size_t at, unsigned value) {
    HeaderBytes bytes = good;
    bytes[at] = static_cast<std::byte>(value);
    return decode(resealed(bytes));
  };
  for (unsigned value = 0; value < 256; ++value) {
    EXPECT_EQ(with(4, value).has_value(), value == kVersion) << "version " << value;
    EXPECT_EQ(with(5, value).has_value(), value == 1) << "type " << value << ", with an Announce's flags";
    EXPECT_EQ(with(6, value).has_value(), (value & ~0x31u) == 0) << "flags " << value;
    EXPECT_EQ(with(7, value).has_value(), (value & ~0x1Bu) == 0) << "flags high " << value;
    for (std::size_t at = 68; at < 72; ++at) {
      EXPECT_EQ(with(at, value).has_value(), value == 0) << "reserved byte " << at;
    }
    for (std::size_t at = 0; at < 4; ++at) {
      EXPECT_EQ(with(at, value).has_value(), good[at] == static_cast<std::byte>(value)) << "magic " << at;
    }
  }
}

/// Bits that mean nothing yet may mean something in a later version: who sends them must not be misunderstood.
TEST(Header, AFlagIsAcceptedOnlyWhereItMeansSomething) {
  const auto flags_of = [](unsigned type) -> unsigned {
    switch (static_cast<MessageType>(type)) {
      case MessageType::kAnnounce:
        return kFlagEager | kFlagReady | kFlagHeld | kFlagJoin | kFlagRoster | kFlagOneHop | kFlagApart;
      case MessageType::kGrant:
        return kFlagPull;
      case MessageType::kResult:
        return kFlagNoPayload | kFlagInPlace;
      case MessageType::kEnvelope:
        return kFlagEager;
      case MessageType::kClose:
      case MessageType::kWithdraw:
        return kFlagAnswer;
      case MessageType::kReceipt:
        return kFlagUrgent;
      default:
        return 0;
    }
  };
  for (unsigned type = 1; type <= 19; ++type) {
    for (unsigned bit = 0; bit < 16; ++bit) {
      Header header = sample_header();
      header.type = static_cast<MessageType>(type);
      header.flags = static_cast<std::uint16_t>(1u << bit);
      EXPECT_EQ(decode(encode(header)).has_value(), (flags_of(type) >> bit & 1) != 0)
          << "type " << type << " bit " << bit;
    }
  }
}

TEST(Header, AShardWhereNoneBelongsIsRejected) {
  for (unsigned type = 1; type <= 20; ++type) {
    Header header = sample_header();
    header.flags = 0;
    header.shard = 0;
    HeaderBytes bytes = encode(header);
    bytes[5] = static_cast<std::byte>(type);
    EXPECT_EQ(decode(resealed(bytes)).has_value(), type <= 21) << "type " << type;
    bytes[74] = std::byte{1};
    EXPECT_EQ(decode(resealed(bytes)).has_value(), type <= 6 || type == 15) << "type " << type;
  }
}

TEST(TagList, RoundTripsAndRefusesWhatIsNoList) {
  const std::vector<std::uint64_t> numbers = {1, 0, ~std::uint64_t{0}, 0x0102030405060708};
  const std::vector<std::byte> body = encode_list(numbers);
  ASSERT_EQ(body.size(), 32u);
  EXPECT_EQ(body[24], std::byte{8});
  EXPECT_EQ(decode_list(body, 4), numbers);
  EXPECT_FALSE(decode_list(body, 3));
  EXPECT_FALSE(decode_list({}, 3));
  EXPECT_FALSE(decode_list(std::span(body).first(31), 8));
}

TEST(Header, RandomBytesAreRejected) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20'000; ++round) {
    HeaderBytes bytes;
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    ASSERT_FALSE(decode(bytes)) << round;
  }
}

Announce sample_announce() {
  Announce announce;
  OpDescriptor& descriptor = announce.descriptor;
  descriptor.collective = Collective::kAllReduce;
  descriptor.dtype = DataType::kFloat32;
  descriptor.reduce = ReduceOp::kAverage;
  descriptor.dims = 2;
  descriptor.root = 3;
  descriptor.op_bytes = 4 << 20;
  descriptor.part_bytes = 1 << 20;
  descriptor.shape = {1024, 1024};
  announce.contributor = 2;
  announce.contributor_count = 4;
  announce.first_rank = 16;
  announce.rank_count = 8;
  announce.pusher = 1;
  announce.average_over = 32;
  announce.shard_offset = 256 << 10;
  announce.shard_bytes = (256 << 10) - 64;
  announce.chunk_bytes = 64 << 10;
  announce.owned_first = 1;
  announce.owned_count = 3;
  announce.timeout_ms = 600'000;
  return announce;
}

std::optional<Announce> through_the_wire(const Announce& announce) { return decode_announce(encode(announce)); }

TEST(Announce, RoundTrips) {
  EXPECT_EQ(through_the_wire(sample_announce()), sample_announce());
  for (std::uint8_t dims = 0; dims <= kMaxDims; ++dims) {
    Announce announce = sample_announce();
    announce.descriptor.dims = dims;
    announce.descriptor.shape = {};
    for (std::size_t i = 0; i < dims; ++i) announce.descriptor.shape[i] = ~std::uint64_t{0} - i;
    EXPECT_EQ(through_the_wire(announce), announce);
  }
}

TEST(RankSpan, HoldsTheRanksOfAHostHoweverTheyArePlaced) {
  const std::vector<std::vector<std::uint32_t>> placed = {
      {5}, {4, 5, 6, 7}, {0, 64, 128, 192, 256, 320, 384}, {1, 3}, {0, 1, 5}, {7, 70}, {2, 4, 10, 128}};
  for (const std::vector<std::uint32_t>& ranks : placed) {
    std::vector<std::uint32_t> reversed(ranks.rbegin(), ranks.rend());
    const auto span = span_of(reversed);
    ASSERT_TRUE(span);
    EXPECT_EQ(ranks_of(*span), ranks);
    Announce announce = sample_announce();
    announce.first_rank = span->first;
    announce.rank_count = span->count;
    announce.rank_stride = span->stride;
    announce.rank_mask = span->mask;
    EXPECT_EQ(through_the_wire(announce), announce);
  }
  EXPECT_FALSE(span_of(std::vector<std::uint32_t>{0, 1, 64})) << "too far for the mask";
}

TEST(Announce, MayBeFollowedByEagerData) {
  const auto bytes = encode(sample_announce());
  std::vector<std::byte> body(bytes.begin(), bytes.end());
  body.resize(body.size() + 100, std::byte{0xEE});
  EXPECT_EQ(decode_announce(body), sample_announce());
  for (std::size_t size = 0; size < kAnnounceBytes; ++size) {
    EXPECT_FALSE(decode_announce(std::span(bytes).first(size))) << size;
  }
}

TEST(Announce, UnusedShapeEntriesNeverReachTheWire) {
  Announce announce = sample_announce();
  announce.descriptor.shape[5] = 77;
  EXPECT_EQ(through_the_wire(announce), sample_announce());
  auto bytes = encode(sample_announce());
  bytes[24 + 5 * 8] = std::byte{1};
  EXPECT_FALSE(decode_announce(bytes));
}

TEST(Announce, ReservedBytesMustBeZero) {
  for (std::size_t at = 148; at < 152; ++at) {
    auto bytes = encode(sample_announce());
    bytes[at] = std::byte{1};
    EXPECT_FALSE(decode_announce(bytes)) << at;
  }
}

struct Change {
  std::string_view name;
  std::function<void(Announce&)> apply;
};

constexpr std::uint32_t kMax32 = ~std::uint32_t{0};
constexpr std::uint64_t kMax64 = ~std::uint64_t{0};

TEST(Announce, HostileValuesAreRejected) {
  const Change changes[] = {
      {"collective 0", [](Announce& a) { a.descriptor.collective = static_cast<Collective>(0); }},
      {"collective 5", [](Announce& a) { a.descriptor.collective = static_cast<Collective>(5); }},
      {"dtype 0", [](Announce& a) { a.descriptor.dtype = static_cast<DataType>(0); }},
      {"dtype 11", [](Announce& a) { a.descriptor.dtype = static_cast<DataType>(11); }},
      {"reduce 0", [](Announce& a) { a.descriptor.reduce = static_cast<ReduceOp>(0); }},
      {"reduce 9", [](Announce& a) { a.descriptor.reduce = static_cast<ReduceOp>(9); }},
      {"dims 9", [](Announce& a) { a.descriptor.dims = 9; }},
      {"part larger than op", [](Announce& a) { a.descriptor.op_bytes = a.descriptor.part_bytes - 4; }},
      {"part not whole elements", [](Announce& a) { a.descriptor.part_bytes += 2; }},
      {"op not whole elements", [](Announce& a) { a.descriptor.op_bytes += 2; }},
      {"barrier with data", [](Announce& a) { a.descriptor.collective = Collective::kBarrier; }},
      {"contributor = count", [](Announce& a) { a.contributor = a.contributor_count; }},
      {"no contributors", [](Announce& a) { a.contributor = a.contributor_count = 0; }},
      {"no ranks", [](Announce& a) { a.rank_count = 0; }},
      {"ranks wrap", [](Announce& a) { a.first_rank = kMax32, a.rank_count = 1; }},
      {"stride of ranks 0", [](Announce& a) { a.rank_stride = 0; }},
      {"stride of ranks wraps", [](Announce& a) { a.rank_count = 3, a.rank_stride = 0x8000'0000; }},
      {"mask of other ranks", [](Announce& a) { a.rank_mask = 0x1FF; }},
      {"mask of fewer ranks", [](Announce& a) { a.rank_mask = 0x7F; }},
      {"mask without the first", [](Announce& a) { a.rank_mask = 0xFE; }},
      {"average over 0", [](Announce& a) { a.average_over = 0; }},
      {"no time", [](Announce& a) { a.timeout_ms = 0; }},
      {"shard starts past the part", [](Announce& a) { a.shard_offset = a.descriptor.part_bytes + 4; }},
      {"shard ends past the part", [](Announce& a) { a.shard_bytes = a.descriptor.part_bytes - a.shard_offset + 4; }},
      {"shard end wraps", [](Announce& a) { a.shard_bytes = kMax64 - 3 - a.shard_offset; }},
      {"shard offset huge", [](Announce& a) { a.shard_offset = kMax64 - 3; }},
      {"shard offset inside an element", [](Announce& a) { a.shard_offset += 2; }},
      {"shard not whole elements", [](Announce& a) { a.shard_bytes -= 2; }},
      {"chunk 0", [](Announce& a) { a.chunk_bytes = 0, a.owned_first = a.owned_count = 0; }},
      {"chunk not a multiple of 64", [](Announce& a) { a.chunk_bytes += 32; }},
      {"chunk above 64 MiB",
       [](Announce& a) { a.chunk_bytes = (64 << 20) + 64, a.owned_first = 0, a.owned_count = 1; }},
      {"owned past the end", [](Announce& a) { a.owned_count = 4; }},
      {"owned starts past the end", [](Announce& a) { a.owned_first = 5, a.owned_count = 0; }},
      {"owned wraps", [](Announce& a) { a.owned_count = kMax32; }},
      {"more chunks than 32 bits",
       [](Announce& a) {
         a.descriptor.op_bytes = a.descriptor.part_bytes = a.shard_bytes = std::uint64_t{64} << 32;
         a.shard_offset = 0, a.chunk_bytes = 64;
       }},
      {"pusher of a broadcast unknown",
       [](Announce& a) { a.descriptor.collective = Collective::kBroadcast, a.pusher = a.contributor_count; }},
      {"pusher of an all-gather unknown",
       [](Announce& a) { a.descriptor.collective = Collective::kAllGather, a.pusher = kMax32; }},
      {"chunks of an empty shard", [](Announce& a) { a.shard_bytes = 0, a.owned_first = 0, a.owned_count = 1; }},
  };
  for (const Change& change : changes) {
    Announce announce = sample_announce();
    change.apply(announce);
    EXPECT_FALSE(through_the_wire(announce)) << change.name;
  }
}

TEST(Announce, ValuesAtTheLimitAreTaken) {
  const Change changes[] = {
      {"owns nothing", [](Announce& a) { a.owned_first = 4, a.owned_count = 0; }},
      {"owns all", [](Announce& a) { a.owned_first = 0, a.owned_count = 4; }},
      {"shard ends with the part",
       [](Announce& a) {
         a.shard_bytes = a.descriptor.part_bytes - a.shard_offset, a.chunk_bytes = 64 << 20, a.owned_first = 0,
         a.owned_count = 1;
       }},
      {"home lane without a share",
       [](Announce& a) { a.shard_offset = a.shard_bytes = a.chunk_bytes = a.owned_first = a.owned_count = 0; }},
      {"empty shard at the end",
       [](Announce& a) {
         a.shard_offset = a.descriptor.part_bytes, a.shard_bytes = 0, a.owned_first = a.owned_count = 0;
       }},
      {"barrier",
       [](Announce& a) {
         a.descriptor = {};
         a.descriptor.collective = Collective::kBarrier;
         a.shard_offset = a.shard_bytes = a.owned_first = a.owned_count = 0;
       }},
      {"pusher unused by all-reduce", [](Announce& a) { a.pusher = kMax32; }},
      {"every third rank", [](Announce& a) { a.rank_stride = 3; }},
      {"some ranks", [](Announce& a) { a.rank_mask = 0x91; }},
      {"64 steps", [](Announce& a) { a.rank_count = 64, a.rank_mask = 0x8000'0000'0000'0001; }},
      {"last rank", [](Announce& a) { a.first_rank = kMax32 - 1, a.rank_count = 1; }},
      {"as many chunks as 32 bits hold",
       [](Announce& a) {
         a.descriptor.op_bytes = a.descriptor.part_bytes = a.shard_bytes = std::uint64_t{64} * kMax32;
         a.shard_offset = 0, a.chunk_bytes = 64, a.owned_first = 0, a.owned_count = kMax32;
       }},
  };
  for (const Change& change : changes) {
    Announce announce = sample_announce();
    change.apply(announce);
    EXPECT_EQ(through_the_wire(announce), announce) << change.name;
  }
}

}  // namespace
}  // namespace herring::wire
