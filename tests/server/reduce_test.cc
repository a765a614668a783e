#include "server/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace herring::server {
namespace {

constexpr std::array kDataTypes{DataType::kFloat32, DataType::kFloat64, DataType::kFloat16, DataType::kBFloat16,
                                DataType::kInt8,    DataType::kInt16,   DataType::kInt32,   DataType::kInt64,
                                DataType::kUInt8,   DataType::kBool};
constexpr std::array kOps{ReduceOp::kSum,     ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                          ReduceOp::kProduct, ReduceOp::kBand,    ReduceOp::kBor, ReduceOp::kBxor};
constexpr std::array<std::size_t, 11> kCounts{1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33};

using Bytes = std::vector<std::byte>;

bool is_float16(DataType dtype) { return dtype == DataType::kFloat16 || dtype == DataType::kBFloat16; }
bool is_float(DataType dtype) {
  return is_float16(dtype) || dtype == DataType::kFloat32 || dtype == DataType::kFloat64;
}

std::vector<ReduceSpec> all_specs(std::uint32_t average_over) {
  std::vector<ReduceSpec> specs;
  for (const DataType dtype : kDataTypes) {
    for (const ReduceOp op : kOps) {
      const ReduceSpec spec{dtype, op, op == ReduceOp::kAverage ? average_over : 1};
      if (check(spec).is_ok()) specs.push_back(spec);
    }
  }
  return specs;
}

std::string describe(ReduceSpec spec, std::size_t inputs, std::size_t elements, Isa isa) {
  return std::string(name(spec.dtype)) + " " + std::string(name(spec.op)) + " of " + std::to_string(inputs) + " x " +
         std::to_string(elements) + " on " + std::string(name(isa));
}

/// Instruction sets of this machine besides the scalar one.
std::vector<Isa> vector_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kNeon, Isa::kAvx2, Isa::kAvx512}) {
    if (is_available(isa)) isas.push_back(isa);
  }
  return isas;
}

template <class T>
Bytes to_bytes(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <class T>
std::vector<T> from_bytes(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

Bytes reduce_bytes(ReduceSpec spec, const std::vector<Bytes>& inputs, Isa isa = best_isa()) {
  Bytes out(inputs.at(0).size(), std::byte{0xAB});
  const std::vector<std::span<const std::byte>> spans(inputs.begin(), inputs.end());
  const std::vector<std::span<std::byte>> outputs{out};
  reduce(spec, spans, outputs, isa);
  return out;
}

template <class T>
std::vector<T> reduce_values(ReduceSpec spec, const std::vector<std::vector<T>>& inputs, Isa isa = best_isa()) {
  std::vector<Bytes> bytes;
  for (const auto& input : inputs) bytes.push_back(to_bytes(input));
  return from_bytes<T>(reduce_bytes(spec, bytes, isa));
}

// Conversions of our own, by value instead of by bits, so that a slip in the product's cannot hide in ours.

double decode(DataType dtype, std::uint16_t bits) {
  const int mantissa_bits = dtype == DataType::kFloat16 ? 10 : 7;
  const int bias = dtype == DataType::kFloat16 ? 15 : 127;
  const int exponent = (bits & 0x7FFF) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 2 * bias + 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

std::uint16_t encode(DataType dtype, double value) {
  const int mantissa_bits = dtype == DataType::kFloat16 ? 10 : 7;
  const int bias = dtype == DataType::kFloat16 ? 15 : 127;
  const int infinity = (2 * bias + 1) << mantissa_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | 1 << (mantissa_bits - 1));
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(value);
  if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | infinity);
  const int exponent = magnitude == 0 ? 1 - bias : std::max(std::ilogb(magnitude), 1 - bias);
  // In units of the last place; nearbyint rounds ties to even. A carry out of the mantissa raises the exponent by
  // itself.
  const double units = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  const double bits = units + std::ldexp(exponent - (1 - bias), mantissa_bits);
  return static_cast<std::uint16_t>(sign | (bits >= infinity ? infinity : static_cast<int>(bits)));
}

/// The order that the header promises, in one line of code per line of contract.
template <class T>
T tree_sum(const std::vector<T>& values, std::size_t lo, std::size_t hi) {
  if (hi - lo == 1) return values[lo];
  std::size_t half = 1;
  while (half * 2 < hi - lo) half *= 2;
  return tree_sum(values, lo, lo + half) + tree_sum(values, lo + half, hi);
}

class ReduceTest : public ::testing::Test {
 protected:
  ReduceTest() : seed_(std::random_device{}()), random_(seed_) { std::printf("seed %u\n", seed_); }

  std::vector<double> normals(std::size_t count, double spread = 3) {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> exponent(-spread, spread);
    std::vector<double> values(count);
    for (double& value : values) value = normal(random_) * std::exp2(exponent(random_));
    return values;
  }

  /// Random bits: integers of all sizes, and floats with NaNs of every payload, infinities and denormals; now and then
  /// a special value in every type.
  Bytes random_elements(DataType dtype, std::size_t elements) {
    Bytes bytes(elements * element_bytes(dtype));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    if (dtype == DataType::kBool) {
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_() % 16 == 0 ? random_() : random_() % 2);
    }
    if (!is_float(dtype)) return bytes;
    const std::size_t width = element_bytes(dtype);
    for (std::size_t i = 0; i < elements; ++i) {
      if (random_() % 2 == 0) continue;
      std::byte* top =
          bytes.data() + (i + 1) * width - 1;  // Sign and exponent: small numbers, so that sums stay finite.
      if (random_() % 8 != 0) {
        *top = static_cast<std::byte>(random_() % 2 * 0x80 + 0x3C + random_() % 4);
      } else {
        std::memset(bytes.data() + i * width, 0, width);  // +-0
        *top = static_cast<std::byte>(random_() % 2 * 0x80);
      }
    }
    return bytes;
  }

  std::vector<Bytes> random_inputs(DataType dtype, std::size_t count, std::size_t elements) {
    std::vector<Bytes> inputs;
    for (std::size_t i = 0; i < count; ++i) inputs.push_back(random_elements(dtype, elements));
    return inputs;
  }

  std::uint32_t seed_;
  std::mt19937 random_;
};

TEST_F(ReduceTest, VectorKernelsEqualTheirScalarTwinInEveryBit) {
  const std::vector<Isa> isas = vector_isas();
  if (isas.empty()) GTEST_SKIP() << "this processor has neither NEON nor AVX2 nor AVX-512";
  for (const std::size_t count : kCounts) {
    for (const ReduceSpec spec : all_specs(static_cast<std::uint32_t>(count) * 3 + 1)) {
      const std::size_t width = element_bytes(spec.dtype);
      // Below one vector step, whole steps, steps with odd tails, and across a block of the tree.
      for (const std::size_t elements :
           {std::size_t{0}, std::size_t{1}, 63 / width, 64 / width, 64 / width * 3 + 1, (4096 + 64 * 5) / width + 3}) {
        const std::vector<Bytes> inputs = random_inputs(spec.dtype, count, elements);
        const Bytes expected = reduce_bytes(spec, inputs, Isa::kScalar);
        for (const Isa isa : isas) {
          ASSERT_EQ(reduce_bytes(spec, inputs, isa), expected) << describe(spec, count, elements, isa);
        }
      }
    }
  }
}

TEST_F(ReduceTest, Avx512KernelsRunWhereTheProcessorHasThem) {
  if (best_isa() != Isa::kAvx512) {
    const std::vector<Bytes> inputs(2, Bytes(64));
    EXPECT_THROW(reduce_bytes({}, inputs, Isa::kAvx512), Error);
    GTEST_SKIP() << "this processor has no AVX-512 F/BW/DQ/VL: its kernels were compiled, not run";
  }
  EXPECT_EQ(vector_isas().size(), 2u);
}

TEST_F(ReduceTest, WhatTheProcessorDoesNotHaveIsRefused) {
  const std::vector<Bytes> inputs(2, Bytes(64));
  for (const Isa isa : {Isa::kNeon, Isa::kAvx2, Isa::kAvx512}) {
    if (is_available(isa)) continue;
    EXPECT_THROW(reduce_bytes({}, inputs, isa), Error) << name(isa);
  }
#if defined(__aarch64__)
  EXPECT_EQ(best_isa(), Isa::kNeon);
#else
  EXPECT_FALSE(is_available(Isa::kNeon));
#endif
}

TEST_F(ReduceTest, AlignmentChangesNothing) {
  for (const ReduceSpec spec : all_specs(3)) {
    const std::size_t elements = 301;
    const std::size_t bytes = elements * element_bytes(spec.dtype);
    const std::vector<Bytes> inputs = random_inputs(spec.dtype, 5, elements);
    const Bytes expected = reduce_bytes(spec, inputs, Isa::kScalar);
    std::vector<Bytes> shifted(6, Bytes(bytes + 64));
    std::vector<std::span<const std::byte>> spans;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const std::size_t shift = random_() % 64;
      std::ranges::copy(inputs[i], shifted[i].begin() + static_cast<std::ptrdiff_t>(shift));
      spans.push_back(std::span(shifted[i]).subspan(shift, bytes));
    }
    const std::size_t out_shift = 1 + random_() % 62;
    const std::vector<std::span<std::byte>> outputs{std::span(shifted[5]).subspan(out_shift, bytes)};
    reduce(spec, spans, outputs);
    ASSERT_TRUE(std::ranges::equal(outputs[0], expected)) << describe(spec, 5, elements, best_isa());
    // Nothing is written outside of the output.
    ASSERT_EQ(shifted[5][out_shift - 1], std::byte{0});
    ASSERT_EQ(shifted[5][out_shift + bytes], std::byte{0});
  }
}

TEST_F(ReduceTest, AnOutputMayBeAnyInputAndThereMayBeSeveral) {
  for (const ReduceSpec spec :
       {ReduceSpec{DataType::kFloat32, ReduceOp::kSum, 1}, ReduceSpec{DataType::kBFloat16, ReduceOp::kAverage, 7},
        ReduceSpec{DataType::kInt32, ReduceOp::kAverage, 7}, ReduceSpec{DataType::kInt8, ReduceOp::kMax, 1}}) {
    for (const std::size_t count : {1, 2, 3, 8, 9, 17, 33}) {
      const std::size_t elements = 20011;  // Several blocks and an odd tail.
      const std::vector<Bytes> original = random_inputs(spec.dtype, count, elements);
      const Bytes expected = reduce_bytes(spec, original, Isa::kScalar);
      for (const Isa isa : {Isa::kScalar, best_isa()}) {
        for (std::size_t aliased = 0; aliased < count; ++aliased) {
          std::vector<Bytes> inputs = original;
          Bytes fresh(expected.size());
          const std::vector<std::span<const std::byte>> spans(inputs.begin(), inputs.end());
          const std::size_t other = (aliased + 1) % count;
          reduce(spec, spans, std::vector<std::span<std::byte>>{inputs[aliased], fresh, inputs[other]}, isa);
          ASSERT_EQ(inputs[aliased], expected) << describe(spec, count, elements, isa) << " into " << aliased;
          ASSERT_EQ(inputs[other], expected) << describe(spec, count, elements, isa) << " into " << other;
          ASSERT_EQ(fresh, expected);
          for (std::size_t i = 0; i < count; ++i) {
            if (i != aliased && i != other) {
              ASSERT_EQ(inputs[i], original[i]);
            }
          }
        }
      }
    }
  }
}

template <class T>
void expect_promised_order(ReduceSpec spec, const std::vector<std::vector<double>>& values) {
  std::vector<std::vector<T>> inputs;
  for (const auto& input : values) inputs.emplace_back(input.begin(), input.end());
  for (const Isa isa : {Isa::kScalar, best_isa()}) {
    const std::vector<T> result = reduce_values<T>(spec, inputs, isa);
    for (std::size_t e = 0; e < result.size(); ++e) {
      std::vector<T> column;
      for (const auto& input : inputs) column.push_back(input[e]);
      ASSERT_EQ(result[e], tree_sum(column, 0, column.size()) / static_cast<T>(spec.average_over))
          << describe(spec, inputs.size(), e, isa);
    }
  }
}

TEST_F(ReduceTest, SumsInThePromisedOrderAndDividesOnce) {
  for (std::size_t count = 1; count <= 40; ++count) {
    std::vector<std::vector<double>> values;
    for (std::size_t i = 0; i < count; ++i) values.push_back(normals(171));
    for (const std::uint32_t over : {1u, 3u}) {
      const ReduceOp op = over > 1 ? ReduceOp::kAverage : ReduceOp::kSum;
      expect_promised_order<float>({DataType::kFloat32, op, over}, values);
      expect_promised_order<double>({DataType::kFloat64, op, over}, values);
    }
  }
}

TEST_F(ReduceTest, SixteenBitTypesAreSummedInFloat32AndRoundedOnce) {
  for (const DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
    for (const std::size_t count : kCounts) {
      if (count == 1) continue;
      for (const std::uint32_t over : {1u, 7u}) {
        const ReduceSpec spec{dtype, ReduceOp::kAverage, over};
        const std::size_t elements = 517;
        std::vector<std::vector<std::uint16_t>> inputs;
        for (std::size_t i = 0; i < count; ++i) {
          auto& input = inputs.emplace_back();
          // Spread wide: float16 sums reach denormals and infinity.
          for (const double value : normals(elements, 20)) input.push_back(encode(dtype, value));
        }
        for (const Isa isa : {Isa::kScalar, best_isa()}) {
          const auto result = reduce_values(spec, inputs, isa);
          for (std::size_t e = 0; e < elements; ++e) {
            std::vector<float> column;
            for (const auto& input : inputs) column.push_back(static_cast<float>(decode(dtype, input[e])));
            const float sum = tree_sum(column, 0, count) / static_cast<float>(over);
            ASSERT_EQ(result[e], encode(dtype, sum)) << describe(spec, count, e, isa) << ": " << sum;
          }
        }
      }
    }
  }
}

TEST_F(ReduceTest, EverySixteenBitNumberAndEveryTieSurvives) {
  for (const DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
    std::vector<std::uint16_t> all(65536);
    std::iota(all.begin(), all.end(), std::uint16_t{0});
    // x + (-0) is x. (x + next) / 2 lies half way between two neighbours wherever float32 holds it.
    const std::vector<std::uint16_t> zeros(65536, 0x8000);
    std::vector<std::uint16_t> next(65536);
    for (std::size_t i = 0; i < 65536; ++i) next[i] = static_cast<std::uint16_t>(i + 1);
    for (const Isa isa : {Isa::kScalar, best_isa()}) {
      const auto same = reduce_values<std::uint16_t>({dtype, ReduceOp::kSum, 1}, {all, zeros}, isa);
      const auto ties = reduce_values<std::uint16_t>({dtype, ReduceOp::kAverage, 2}, {all, next}, isa);
      for (std::size_t i = 0; i < 65536; ++i) {
        const double value = decode(dtype, all[i]);
        ASSERT_EQ(same[i], std::isnan(value) ? encode(dtype, value) : i) << name(dtype) << " " << name(isa);
        const float sum = static_cast<float>(value) + static_cast<float>(decode(dtype, next[i]));
        ASSERT_EQ(ties[i], encode(dtype, sum / 2)) << i << " " << name(dtype) << " " << name(isa);
      }
    }
  }
}

/// What a user loses otherwise: gradients that drift with the number of ranks.
TEST_F(ReduceTest, FloatingSumsStayWithinTheErrorOfATreeOfLogDepth) {
  for (const std::size_t count : {2, 7, 16, 33, 300}) {
    const std::size_t elements = 257;
    std::vector<std::vector<double>> values;
    for (std::size_t i = 0; i < count; ++i) values.push_back(normals(elements));
    std::vector<std::vector<float>> singles;
    std::vector<std::vector<std::uint16_t>> halves, brains;
    for (auto& input : values) {
      // Rounded to what the narrowest type holds, so that all start from the same numbers.
      for (double& value : input) value = decode(DataType::kBFloat16, encode(DataType::kBFloat16, value));
      singles.emplace_back(input.begin(), input.end());
      auto& half = halves.emplace_back();
      auto& brain = brains.emplace_back();
      for (const double value : input) {
        half.push_back(encode(DataType::kFloat16, value));
        brain.push_back(encode(DataType::kBFloat16, value));
      }
    }
    const auto single = reduce_values<float>({DataType::kFloat32, ReduceOp::kSum, 1}, singles);
    const auto half = reduce_values<std::uint16_t>({DataType::kFloat16, ReduceOp::kSum, 1}, halves);
    const auto brain = reduce_values<std::uint16_t>({DataType::kBFloat16, ReduceOp::kSum, 1}, brains);
    const double depth = std::ceil(std::log2(count));
    for (std::size_t e = 0; e < elements; ++e) {
      double exact = 0, magnitude = 0, exact_half = 0;
      for (std::size_t i = 0; i < count; ++i) {
        exact += values[i][e];
        exact_half += decode(DataType::kFloat16, halves[i][e]);
        magnitude += std::abs(values[i][e]);
      }
      const double bound = depth * 0x1p-24 * magnitude * 1.001;
      ASSERT_LE(std::abs(single[e] - exact), bound);
      ASSERT_LE(std::abs(decode(DataType::kFloat16, half[e]) - exact_half),
                bound + std::abs(exact_half) * 0x1p-11 * 1.001 + 0x1p-25);
      ASSERT_LE(std::abs(decode(DataType::kBFloat16, brain[e]) - exact), bound + std::abs(exact) * 0x1p-8 * 1.001);
    }
  }
}

TEST_F(ReduceTest, ReducingAlignedRunsBeforehandChangesNoBit) {
  for (const DataType dtype : {DataType::kFloat32, DataType::kFloat64}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      const ReduceSpec spec{dtype, op, 1};
      for (const std::size_t count : {4, 7, 8, 13, 16, 33, 64}) {
        const std::vector<Bytes> inputs = random_inputs(dtype, count, 99);
        const Bytes expected = reduce_bytes(spec, inputs);
        for (std::size_t run = 2; run <= count; run *= 2) {
          std::vector<Bytes> hosts;
          for (std::size_t first = 0; first < count; first += run) {
            const auto begin = inputs.begin() + static_cast<std::ptrdiff_t>(first);
            const auto end = begin + static_cast<std::ptrdiff_t>(std::min(run, count - first));
            hosts.push_back(reduce_bytes(spec, {begin, end}));
          }
          Bytes joined = reduce_bytes(spec, hosts);
          ASSERT_EQ(joined, expected) << describe(spec, count, 99, best_isa()) << " in runs of " << run;
        }
      }
    }
  }
}

template <class T>
void expect_integers(DataType dtype, const std::vector<Bytes>& bytes) {
  using Unsigned = std::make_unsigned_t<T>;
  std::vector<std::vector<T>> inputs;
  for (const Bytes& input : bytes) inputs.push_back(from_bytes<T>(input));
  const std::uint32_t over = 5;
  for (const Isa isa : {Isa::kScalar, best_isa()}) {
    const auto result = [&](ReduceOp op) {
      return reduce_values<T>({dtype, op, op == ReduceOp::kAverage ? over : 1}, inputs, isa);
    };
    const auto sum = result(ReduceOp::kSum), average = result(ReduceOp::kAverage), product = result(ReduceOp::kProduct),
               least = result(ReduceOp::kMin), most = result(ReduceOp::kMax), all = result(ReduceOp::kBand),
               any = result(ReduceOp::kBor), parity = result(ReduceOp::kBxor);
    for (std::size_t e = 0; e < sum.size(); ++e) {
      std::uint64_t add = 0, multiply = 1, ones = ~std::uint64_t{0}, either = 0, odd = 0;
      T low = inputs[0][e], high = inputs[0][e];
      for (const auto& input : inputs) {
        const std::uint64_t value = static_cast<Unsigned>(input[e]);
        add += value;
        multiply *= value;
        ones &= value;
        either |= value;
        odd ^= value;
        low = std::min(low, input[e]);
        high = std::max(high, input[e]);
      }
      ASSERT_EQ(sum[e], static_cast<T>(add));
      ASSERT_EQ(average[e], static_cast<T>(static_cast<std::int64_t>(static_cast<T>(add)) / over));
      ASSERT_EQ(product[e], static_cast<T>(multiply));
      ASSERT_EQ(least[e], low);
      ASSERT_EQ(most[e], high);
      ASSERT_EQ(all[e], static_cast<T>(ones));
      ASSERT_EQ(any[e], static_cast<T>(either));
      ASSERT_EQ(parity[e], static_cast<T>(odd));
    }
  }
}

TEST_F(ReduceTest, IntegersWrapAndTheirAverageTruncates) {
  for (const std::size_t count : {2, 3, 8, 17}) {
    expect_integers<std::int8_t>(DataType::kInt8, random_inputs(DataType::kInt8, count, 333));
    expect_integers<std::int16_t>(DataType::kInt16, random_inputs(DataType::kInt16, count, 333));
    expect_integers<std::int32_t>(DataType::kInt32, random_inputs(DataType::kInt32, count, 333));
    expect_integers<std::int64_t>(DataType::kInt64, random_inputs(DataType::kInt64, count, 333));
    expect_integers<std::uint8_t>(DataType::kUInt8, random_inputs(DataType::kUInt8, count, 333));
  }
  const auto average = reduce_values<std::int32_t>({DataType::kInt32, ReduceOp::kAverage, 2}, {{-3, 3, 7}, {0, 0, 0}});
  EXPECT_EQ(average, (std::vector<std::int32_t>{-1, 1, 3}));
  EXPECT_EQ(reduce_values<std::int8_t>({DataType::kInt8, ReduceOp::kAverage, 4}, {{-7}}), std::vector<std::int8_t>{-1});
}

TEST_F(ReduceTest, BoolsAreLogical) {
  const std::vector<std::uint8_t> a{0, 0, 1, 1, 2, 0xFF}, b{0, 1, 0, 1, 1, 0x80};
  for (const Isa isa : {Isa::kScalar, best_isa()}) {
    // Long enough for the vector kernels.
    std::vector<std::uint8_t> left, right;
    for (int i = 0; i < 64; ++i) {
      left.insert(left.end(), a.begin(), a.end());
      right.insert(right.end(), b.begin(), b.end());
    }
    const auto first = [&](ReduceOp op) {
      auto result = reduce_values<std::uint8_t>({DataType::kBool, op, 1}, {left, right}, isa);
      result.resize(a.size());
      return result;
    };
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor}) {
      EXPECT_EQ(first(op), (std::vector<std::uint8_t>{0, 1, 1, 1, 1, 1}));
    }
    for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand}) {
      EXPECT_EQ(first(op), (std::vector<std::uint8_t>{0, 0, 0, 1, 1, 1}));
    }
    EXPECT_EQ(first(ReduceOp::kBxor), (std::vector<std::uint8_t>{0, 1, 1, 0, 0, 0}));
  }
}

template <class T>
void expect_special_values(DataType dtype) {
  const T nan = std::numeric_limits<T>::quiet_NaN(), inf = std::numeric_limits<T>::infinity();
  const T tiny = std::numeric_limits<T>::denorm_min();
  struct Row {
    T a, b, sum, least, most;
  };
  const std::vector<Row> rows{{nan, 1, nan, nan, nan},
                              {1, -nan, nan, nan, nan},
                              {inf, -inf, nan, -inf, inf},
                              {inf, 1, inf, 1, inf},
                              {T{0}, -T{0}, 0, -T{0}, 0},
                              {-T{0}, T{0}, 0, -T{0}, 0},
                              {-T{0}, -T{0}, -T{0}, -T{0}, -T{0}},
                              {tiny, tiny, 2 * tiny, tiny, tiny},
                              {nan, inf, nan, nan, nan},
                              {-inf, nan, nan, nan, nan},
                              {-tiny, tiny, 0, -tiny, tiny}};
  std::vector<T> a, b, sum, least, most;
  for (int repeat = 0; repeat < 32; ++repeat) {
    for (const Row& row : rows) {
      a.push_back(row.a);
      b.push_back(row.b);
      sum.push_back(row.sum);
      least.push_back(row.least);
      most.push_back(row.most);
    }
  }
  for (const Isa isa : {Isa::kScalar, best_isa()}) {
    // As bytes: NaN payloads and the sign of zero count.
    const std::vector<Bytes> inputs{to_bytes(a), to_bytes(b)};
    EXPECT_EQ(reduce_bytes({dtype, ReduceOp::kSum, 1}, inputs, isa), to_bytes(sum)) << name(dtype) << name(isa);
    EXPECT_EQ(reduce_bytes({dtype, ReduceOp::kMin, 1}, inputs, isa), to_bytes(least)) << name(dtype) << name(isa);
    EXPECT_EQ(reduce_bytes({dtype, ReduceOp::kMax, 1}, inputs, isa), to_bytes(most)) << name(dtype) << name(isa);
  }
}

TEST_F(ReduceTest, NansInfinitiesDenormalsAndSignedZeros) {
  expect_special_values<float>(DataType::kFloat32);
  expect_special_values<double>(DataType::kFloat64);
}

TEST_F(ReduceTest, AnAverageOverOneInputDividesAndACopyCopies) {
  EXPECT_EQ(reduce_values<float>({DataType::kFloat32, ReduceOp::kAverage, 4}, {{1, 6}}),
            (std::vector<float>{0.25, 1.5}));
  const std::vector<Bytes> one = random_inputs(DataType::kFloat32, 1, 1001);
  EXPECT_EQ(reduce_bytes({DataType::kFloat32, ReduceOp::kMax, 1}, one), one[0]);
}

#if defined(__x86_64__)
TEST_F(ReduceTest, AThreadThatFlushesDenormalsGetsTheSameBits) {
  for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16}) {
    // The smallest denormals; encode() of float16's bits and float32's denormals are both plain small integers.
    const std::vector<Bytes> inputs(2, dtype == DataType::kFloat32 ? to_bytes(std::vector<std::uint32_t>(37, 3))
                                                                   : to_bytes(std::vector<std::uint16_t>(37, 3)));
    for (const Isa isa : {Isa::kScalar, best_isa()}) {
      const Bytes expected = reduce_bytes({dtype, ReduceOp::kAverage, 4}, inputs, isa);
      const unsigned saved = _mm_getcsr();
      const unsigned flushing = saved | 0x8040 | 0x6000;  // Flush, denormals are zero, round toward zero.
      _mm_setcsr(flushing);
      const Bytes result = reduce_bytes({dtype, ReduceOp::kAverage, 4}, inputs, isa);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(saved);
      EXPECT_EQ(result, expected);
      EXPECT_NE(expected[0], std::byte{0});
      EXPECT_EQ(after & ~0x3Fu, flushing & ~0x3Fu);
    }
  }
}
#endif

TEST(ReduceCheck, RefusesWhatDoesNotGoTogetherByName) {
  const auto message = [](ReduceSpec spec) { return check(spec).to_string(); };
  EXPECT_NE(message({DataType::kFloat16, ReduceOp::kBand, 1}).find("band needs integers or bool, not float16"),
            std::string::npos);
  EXPECT_NE(message({DataType::kBool, ReduceOp::kAverage, 2}).find("bool has no average"), std::string::npos);
  EXPECT_EQ(check({DataType::kFloat32, ReduceOp::kAverage, 0}).code(), Code::kInvalidArgument);
  EXPECT_EQ(check({DataType::kFloat32, ReduceOp::kSum, 2}).code(), Code::kInvalidArgument);
  EXPECT_EQ(check({static_cast<DataType>(99), ReduceOp::kSum, 1}).code(), Code::kInvalidArgument);
  EXPECT_EQ(check({DataType::kInt8, static_cast<ReduceOp>(0), 1}).code(), Code::kInvalidArgument);
  EXPECT_EQ(all_specs(2).size(), 4 * 5u + 5 * 8u + 7u);
}

TEST(ReduceCheck, RefusesSpansThatBreakTheContract) {
  std::array<std::byte, 256> memory{};
  const std::span<std::byte> all(memory);
  const ReduceSpec spec{DataType::kFloat32, ReduceOp::kSum, 1};
  using Inputs = std::vector<std::span<const std::byte>>;
  using Outputs = std::vector<std::span<std::byte>>;
  const auto run = [&](const Inputs& inputs, const Outputs& outputs) { reduce(spec, inputs, outputs); };
  EXPECT_NO_THROW(run({all.first(64), all.last(64)}, {all.first(64), all.last(64)}));
  EXPECT_NO_THROW(run({{}, {}}, {{}}));
  EXPECT_THROW(run({}, {all}), Error);
  EXPECT_THROW(run({all}, {}), Error);
  EXPECT_THROW(run({all.first(64), all.first(60)}, {all.first(64)}), Error);
  EXPECT_THROW(run({all.first(64)}, {all.first(60)}), Error);
  EXPECT_THROW(run({all.first(63)}, {all.first(63)}), Error);
  EXPECT_THROW(run({all.first(64)}, {all.subspan(4, 64)}), Error);
  EXPECT_THROW(run({all.subspan(4, 64)}, {all.first(64)}), Error);
  EXPECT_THROW(run({all.first(64)}, {all.subspan(128, 64), all.subspan(132, 64)}), Error);
}

}  // namespace
}  // namespace herring::server
