#include "wire/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

#include "wire/header.h"

namespace herring::wire {
namespace {

using Crc = std::uint32_t (*)(std::span<const std::byte>, std::uint32_t);

void expect_rfc3720_vectors(Crc crc) {
  EXPECT_EQ(crc({}, 0), 0u);
  EXPECT_EQ(crc(std::as_bytes(std::span(std::string_view("123456789"))), 0), 0xE3069283u);
  std::vector<std::byte> bytes(32, std::byte{0});
  EXPECT_EQ(crc(bytes, 0), 0x8A9136AAu);
  bytes.assign(32, std::byte{0xFF});
  EXPECT_EQ(crc(bytes, 0), 0x62A8AB43u);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(crc(bytes, 0), 0x46DD794Eu);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(31 - i);
  EXPECT_EQ(crc(bytes, 0), 0x113FDB5Cu);
}

TEST(Crc32c, TableAgreesWithRfc3720) { expect_rfc3720_vectors(crc32c_table); }
TEST(Crc32c, ChosenOneAgreesWithRfc3720) { expect_rfc3720_vectors(crc32c); }

TEST(Crc32c, HardwareAgreesWithTableForEveryLengthAlignmentAndSeed) {
  if (!has_crc32c_hardware()) GTEST_SKIP() << "this processor has no CRC32C instruction";
  expect_rfc3720_vectors(crc32c_hardware);
  std::mt19937_64 random(20200);
  std::vector<std::byte> bytes(4096 + 16);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  for (std::size_t length = 0; length < 200; ++length) {
    for (std::size_t start = 0; start < 8; ++start) {
      const auto piece = std::span(bytes).subspan(start, length);
      const auto seed = static_cast<std::uint32_t>(random());
      ASSERT_EQ(crc32c_hardware(piece, seed), crc32c_table(piece, seed)) << "length " << length << ", start " << start;
    }
  }
  // Long ones are summed in three streams.
  for (const std::size_t length : {4096u, 6143u, 6144u, 6145u, 12287u, 12288u, 20000u, 99999u}) {
    bytes.resize(length + 3);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    const auto piece = std::span<const std::byte>(bytes).subspan(3);
    EXPECT_EQ(crc32c_hardware(piece, 7), crc32c_table(piece, 7)) << "length " << length;
  }
}

TEST(Crc32c, SumsOfTwoPiecesMakeTheSumOfBoth) {
  std::mt19937_64 random(32720);
  for (const std::size_t length : {0u, 1u, 7u, 64u, 1000u, 131072u}) {
    std::vector<std::byte> bytes(length + 64);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    const auto whole = std::span<const std::byte>(bytes);
    for (const std::size_t cut : {std::size_t{0}, std::size_t{1}, std::size_t{64}, length}) {
      EXPECT_EQ(crc32c_combine(crc32c(whole.first(cut)), crc32c(whole.subspan(cut)), crc32c_shift(bytes.size() - cut)),
                crc32c(whole))
          << length << " and 64 bytes, cut at " << cut;
    }
  }
}

TEST(Crc32c, SeedContinuesAnEarlierSum) {
  const auto text = std::as_bytes(std::span(std::string_view("the unit on the wire; a shard is several chunks")));
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(crc32c(text.subspan(cut), crc32c(text.first(cut))), crc32c(text));
  }
}

}  // namespace
}  // namespace herring::wire
