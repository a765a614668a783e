#include "core/config_value.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

namespace herring {
namespace {

TEST(ConfigValue, BytesTakeEverySuffixInEitherCase) {
  EXPECT_EQ(parse_bytes("0"), 0u);
  EXPECT_EQ(parse_bytes("17B"), 17u);
  for (const auto* text : {"64K", "64KB", "64KiB", "64k", "64kb", "64kib", "65536"})
    EXPECT_EQ(parse_bytes(text), 65536u);
  EXPECT_EQ(parse_bytes("3MB"), std::uint64_t{3} << 20);
  EXPECT_EQ(parse_bytes("3GiB"), std::uint64_t{3} << 30);
  EXPECT_EQ(parse_bytes("3t"), std::uint64_t{3} << 40);
  EXPECT_EQ(parse_bytes("16777215TB"), std::uint64_t{16777215} << 40);
  for (const auto* text : {"", "K", "1KX", "1KBB", "1kiBB", "1Ki", "1iB", "1 K", "-1", "16777216TB"}) {
    EXPECT_FALSE(parse_bytes(text)) << text;
  }
}

TEST(ConfigValue, BytesTextIsExactAndReadable) {
  EXPECT_EQ(bytes_text(0), "0");
  EXPECT_EQ(bytes_text(100), "100");
  EXPECT_EQ(bytes_text(1024), "1KB");
  EXPECT_EQ(bytes_text(1536), "1536");
  EXPECT_EQ(bytes_text(25 << 20), "25MB");
  EXPECT_EQ(bytes_text(std::uint64_t{5000} << 40), "5000TB");
  for (std::uint64_t value = 1; value != 0; value <<= 1) {
    EXPECT_EQ(parse_bytes(bytes_text(value)), value);
    EXPECT_EQ(parse_bytes(bytes_text(value - 1)), value - 1);
  }
  EXPECT_EQ(parse_bytes(bytes_text(std::numeric_limits<std::uint64_t>::max())),
            std::numeric_limits<std::uint64_t>::max());
}

TEST(ConfigValue, SecondsTextRoundTrips) {
  for (const double value : {0.001, 0.1, 1.0, 5.0, 600.0, 1.0 / 3})
    EXPECT_EQ(parse_seconds(seconds_text(value)), value);
  EXPECT_EQ(seconds_text(600), "600");
}

TEST(ConfigValue, EditDistanceCountsSwapsAsOne) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("servers", "sevrers"), 1u);
  EXPECT_EQ(edit_distance("lanes", "lanes"), 0u);
}

TEST(ConfigValue, NearestNameKnowsWhenNothingIsNear) {
  constexpr std::array<std::string_view, 3> kKnown = {"HUB", "LANES", "CHUNK_BYTES"};
  EXPECT_EQ(nearest_name("LANE", kKnown), "LANES");
  EXPECT_EQ(nearest_name("CHUNK", kKnown), "CHUNK_BYTES");
  EXPECT_EQ(nearest_name("TELESCOPE", kKnown), "");
  EXPECT_EQ(nearest_name("", kKnown), "");
  EXPECT_EQ(nearest_name(std::string(1000, 'L'), kKnown), "");
}

}  // namespace
}  // namespace herring
