#include "core/finite.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace herring {
namespace {

/// Bits of a 16-bit type for 1, NaN, infinity.
struct Sample {
  DataType dtype;
  std::vector<std::byte> good;
  std::vector<std::vector<std::byte>> bad;
};

template <class T>
std::vector<std::byte> bytes_of(T value) {
  std::vector<std::byte> bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

template <class T>
Sample floating(DataType dtype) {
  using Limits = std::numeric_limits<T>;
  return {dtype, bytes_of(Limits::max()), {bytes_of(Limits::quiet_NaN()), bytes_of(-Limits::infinity())}};
}

std::vector<Sample> samples() {
  return {floating<float>(DataType::kFloat32),
          floating<double>(DataType::kFloat64),
          {DataType::kFloat16,
           bytes_of<std::uint16_t>(0x7BFF),
           {bytes_of<std::uint16_t>(0xFC00), bytes_of<std::uint16_t>(0x7C01)}},
          {DataType::kBFloat16,
           bytes_of<std::uint16_t>(0xFF7F),
           {bytes_of<std::uint16_t>(0x7F80), bytes_of<std::uint16_t>(0xFFC1)}}};
}

TEST(Finite, FindsTheFirstNanOrInfinityWhereverItIs) {
  std::mt19937_64 random(61);
  for (const Sample& sample : samples()) {
    const std::size_t size = sample.good.size();
    for (const std::size_t count : {1u, 7u, 511u, 512u, 513u, 3000u}) {
      // One byte further: any alignment.
      std::vector<std::byte> memory(1 + count * size);
      const std::span<std::byte> data = std::span(memory).subspan(1);
      for (std::size_t i = 0; i < count; ++i) std::memcpy(&data[i * size], sample.good.data(), size);
      EXPECT_FALSE(find_not_finite(sample.dtype, data).has_value()) << "the largest number is finite";
      for (const auto& bad : sample.bad) {
        const std::size_t first = random() % count;
        std::memcpy(&data[first * size], bad.data(), size);
        std::memcpy(&data[(count - 1) * size], bad.data(), size);
        const auto found = find_not_finite(sample.dtype, data);
        ASSERT_TRUE(found.has_value()) << name(sample.dtype) << ", " << count << " elements, at " << first;
        EXPECT_EQ(*found, first);
        std::memcpy(&data[first * size], sample.good.data(), size);
        std::memcpy(&data[(count - 1) * size], sample.good.data(), size);
      }
    }
  }
}

TEST(Finite, IntegersAlwaysAre) {
  const std::vector<std::byte> ones(64, std::byte{0xFF});
  for (const DataType dtype : {DataType::kInt8, DataType::kInt32, DataType::kInt64, DataType::kBool}) {
    EXPECT_FALSE(find_not_finite(dtype, ones).has_value()) << name(dtype);
  }
  EXPECT_FALSE(find_not_finite(DataType::kFloat32, {}).has_value());
}

}  // namespace
}  // namespace herring
