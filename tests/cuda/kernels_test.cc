// The kernels' bodies, called for every thread, against their twins; the twins against server/reduce.h and plain loops.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/types.h"
#include "cuda/kernels/body.h"
#include "cuda/kernels/twins.h"
#include "seeds.h"
#include "server/reduce.h"

namespace herring::cuda {
namespace {

constexpr Element kFloats[] = {Element::kFloat32, Element::kFloat16, Element::kBFloat16};
constexpr Element kSummed[] = {Element::kFloat32,  Element::kFloat64, Element::kFloat16,
                               Element::kBFloat16, Element::kInt32,   Element::kInt64};

using Bytes = std::vector<std::byte>;

std::uint64_t address(const std::byte* memory) { return reinterpret_cast<std::uint64_t>(memory); }

/// Bits as they come: all kinds of NaN, infinities and denormals among them.
Bytes noise(std::size_t bytes, std::mt19937_64& random) {
  Bytes data(bytes);
  for (std::byte& each : data) each = static_cast<std::byte>(random());
  return data;
}

void for_every_thread(std::uint32_t blocks, const auto& parameters, auto kernel) {
  for (std::uint32_t block = 0; block < blocks; ++block) {
    for (std::uint32_t thread = 0; thread < kThreads; ++thread) kernel(parameters, {block, blocks, thread, kThreads});
  }
}

TEST(Kernels, NumberTypesAsCoreDoes) {
  for (int i = 1; i <= 10; ++i) {
    EXPECT_EQ(body::bytes_of(static_cast<Element>(i)), herring::element_bytes(static_cast<DataType>(i))) << i;
  }
  EXPECT_EQ(static_cast<int>(Element::kBool), static_cast<int>(DataType::kBool));
  EXPECT_EQ(static_cast<int>(Element::kBFloat16), static_cast<int>(DataType::kBFloat16));
}

TEST(Kernels, EveryHalfBecomesTheFloatThatItIsAndComesBack) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = body::half_to_float(half);
    const bool is_nan = (bits & 0x7FFF) > 0x7C00;
    ASSERT_EQ(std::isnan(value), is_nan) << bits;
    ASSERT_EQ(body::float_to_half(value), is_nan ? 0x7E00 : half) << bits;
  }
}

/// The same elements by the kernel and by the twin.
void compare_pack(Element from, Element to, double scale, std::mt19937_64& random) {
  const std::uint32_t elements = static_cast<std::uint32_t>(random() % 3 == 0 ? random() % 20 : random() % 70'000);
  const std::size_t from_bytes = element_bytes(from), to_bytes = element_bytes(to);
  // At any place where elements of this size may lie; and where tensors with odd views do, for what is moved as bytes.
  const std::size_t shift = random() % 32 / from_bytes * from_bytes, to_shift = random() % 32 / to_bytes * to_bytes;
  const Bytes source = noise(elements * from_bytes + 32, random);
  Bytes target = noise(elements * to_bytes + 32, random), wanted = target;
  PackParameters parameters;
  parameters.source_type = from;
  parameters.target_type = to;
  parameters.scale = scale;
  ASSERT_TRUE(check_pack(parameters).is_ok());
  std::vector<Tile> tiles, twins;
  cut_tiles(address(source.data()) + shift, address(target.data()) + to_shift, elements, from, to, tiles);
  cut_tiles(address(source.data()) + shift, address(wanted.data()) + to_shift, elements, from, to, twins);
  parameters.tile_count = static_cast<std::uint32_t>(tiles.size());
  parameters.tiles = reinterpret_cast<std::uint64_t>(tiles.data());
  std::uint32_t flag = 0, twin_flag = 0;
  const bool looks = random() % 2 == 0;
  if (looks) parameters.flag = reinterpret_cast<std::uint64_t>(&flag);
  for_every_thread(1 + random() % 4, parameters, body::pack);
  pack_twin(parameters, twins, looks ? &twin_flag : nullptr);
  EXPECT_EQ(flag, twin_flag);
  EXPECT_TRUE(target == wanted) << "type " << static_cast<int>(from) << " to " << static_cast<int>(to) << ", "
                                << elements << " elements, scale " << scale << ", at " << shift << " and " << to_shift;
}

TEST(Kernels, PackIsItsTwin) {
  const testing::SeedRange range = testing::seeds(6);
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    SCOPED_TRACE("HERRING_TEST_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    for (const Element from : kFloats) {
      for (const Element to : kFloats) {
        compare_pack(from, to, 1, random);
        compare_pack(from, to, 0.125, random);
      }
    }
    compare_pack(Element::kFloat64, Element::kFloat64, 1.0 / 3, random);
    for (int type = 1; type <= 10; ++type) {
      compare_pack(static_cast<Element>(type), static_cast<Element>(type), 1, random);
    }
  }
}

TEST(Kernels, TheTwinIsThePlainLoop) {
  std::mt19937_64 random(3);
  std::vector<float> source(1000);
  for (float& each : source) each = std::normal_distribution<float>(0, 10)(random);
  std::vector<float> target(1000);
  std::vector<Tile> tiles;
  cut_tiles(reinterpret_cast<std::uint64_t>(source.data()), reinterpret_cast<std::uint64_t>(target.data()), 1000,
            Element::kFloat32, Element::kFloat32, tiles);
  PackParameters parameters;
  parameters.scale = 0.3;
  pack_twin(parameters, tiles, nullptr);
  for (std::size_t i = 0; i < 1000; ++i) ASSERT_EQ(target[i], source[i] * 0.3f);
}

TEST(Kernels, TilesCoverEveryElementOnceAndAreBounded) {
  for (const std::uint64_t elements : {0ull, 1ull, 16383ull, 16384ull, 16385ull, 1'000'000ull}) {
    std::vector<Tile> tiles;
    cut_tiles(1000, 5000, elements, Element::kBFloat16, Element::kFloat32, tiles);
    std::uint64_t covered = 0;
    for (const Tile& tile : tiles) {
      EXPECT_EQ(tile.source, 1000 + covered * 2);
      EXPECT_EQ(tile.target, 5000 + covered * 4);
      EXPECT_GT(tile.elements, 0u);
      EXPECT_LE(tile.elements * 4, kTileBytes);
      covered += tile.elements;
    }
    EXPECT_EQ(covered, elements);
  }
}

TEST(Kernels, WhatDoesNotGoTogetherIsRefused) {
  PackParameters parameters;
  parameters.target_type = Element::kInt32;
  EXPECT_EQ(check_pack(parameters).code(), Code::kInvalidArgument);
  parameters.source_type = Element::kInt32;
  EXPECT_TRUE(check_pack(parameters).is_ok());
  parameters.scale = 2;
  EXPECT_EQ(check_pack(parameters).code(), Code::kInvalidArgument);
  parameters.source_type = static_cast<Element>(77);
  EXPECT_EQ(check_pack(parameters).code(), Code::kInvalidArgument);
  SumParameters sum;
  EXPECT_EQ(check_sum(sum).code(), Code::kInvalidArgument) << "no source";
  sum.source_count = kMostSources + 1;
  EXPECT_EQ(check_sum(sum).code(), Code::kInvalidArgument);
  sum.source_count = 1;
  EXPECT_TRUE(check_sum(sum).is_ok());
  sum.type = Element::kBool;
  EXPECT_EQ(check_sum(sum).code(), Code::kInvalidArgument);
}

/// Values that are added without overflow most of the time, and noise.
Bytes numbers(Element type, std::size_t elements, std::mt19937_64& random) {
  if (random() % 2 == 0) return noise(elements * element_bytes(type), random);
  Bytes data(elements * element_bytes(type));
  for (std::size_t i = 0; i < elements; ++i) {
    const float value = std::normal_distribution<float>(0, 100)(random);
    const std::uint16_t half = type == Element::kFloat16 ? body::float_to_half(value) : body::float_to_bfloat(value);
    const double wide = value;
    if (type == Element::kFloat32) std::memcpy(&data[i * 4], &value, 4);
    if (type == Element::kFloat64) std::memcpy(&data[i * 8], &wide, 8);
    if (type == Element::kFloat16 || type == Element::kBFloat16) std::memcpy(&data[i * 2], &half, 2);
  }
  return data;
}

/// reduce(), the twin and the kernel's body: the same bits.
void compare_sum(Element type, std::uint32_t sources, std::mt19937_64& random) {
  const std::size_t elements = random() % 3000, size = element_bytes(type);
  const bool is_average = random() % 2 == 0;
  const std::size_t shift = random() % 2 == 0 ? 0 : size;
  std::vector<Bytes> inputs;
  std::vector<std::span<const std::byte>> spans;
  SumParameters parameters;
  for (std::uint32_t i = 0; i < sources; ++i) {
    inputs.push_back(numbers(type, elements + 1, random));
    parameters.sources[i] = address(inputs.back().data()) + shift;
  }
  for (const Bytes& input : inputs) spans.push_back(std::span(input).subspan(shift, elements * size));
  Bytes wanted(elements * size), twin(elements * size), target(elements * size);
  const std::span<std::byte> outputs[] = {wanted};
  server::reduce({.dtype = static_cast<DataType>(static_cast<std::uint8_t>(type)),
                  .op = is_average ? ReduceOp::kAverage : ReduceOp::kSum,
                  .average_over = is_average ? sources : 1},
                 spans, outputs, server::Isa::kScalar);
  parameters.elements = elements;
  parameters.source_count = sources;
  parameters.type = type;
  parameters.average_over = is_average ? sources : 0;
  ASSERT_TRUE(check_sum(parameters).is_ok());
  parameters.target = address(twin.data());
  sum_twin(parameters);
  EXPECT_TRUE(twin == wanted) << "twin: type " << static_cast<int>(type) << ", " << sources << " sources";
  parameters.target = address(target.data());
  for_every_thread(1 + random() % 3, parameters, body::sum);
  EXPECT_TRUE(target == wanted) << "kernel: type " << static_cast<int>(type) << ", " << sources << " sources";
  // In place.
  parameters.target = parameters.sources[sources - 1];
  for_every_thread(2, parameters, body::sum);
  EXPECT_TRUE(
      std::equal(wanted.begin(), wanted.end(), inputs[sources - 1].begin() + static_cast<std::ptrdiff_t>(shift)));
}

TEST(Kernels, SumsHaveTheBitsOfTheServers) {
  const testing::SeedRange range = testing::seeds(4);
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    SCOPED_TRACE("HERRING_TEST_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    for (const Element type : kSummed) {
      for (std::uint32_t sources = 1; sources <= kMostSources; ++sources) compare_sum(type, sources, random);
    }
  }
}

}  // namespace
}  // namespace herring::cuda
