// The scalar twin of the vector kernels: says in plain code what they compute.

#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "server/reduce_internal.h"

// Products and sums are rounded one by one on every instruction set. (GCC does so in ISO mode.)
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

namespace herring::server::internal {
namespace {

constexpr std::size_t kBlockElements = 256;

float half_to_float(std::uint16_t half) {
  const std::uint32_t magnitude = std::uint32_t{half & 0x7FFFu} << 13;
  const std::uint32_t exponent = magnitude & (0x7C00u << 13);
  std::uint32_t bits = magnitude + ((127 - 15) << 23);
  if (exponent == 0x7C00u << 13) {
    bits += (128 - 16) << 23;  // Infinity and NaN.
  } else if (exponent == 0) {
    bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits + (1 << 23)) - 0x1p-14f);  // Zero and denormals.
  }
  return std::bit_cast<float>(bits | std::uint32_t{half & 0x8000u} << 16);
}

/// Nearest, ties to even. NaN is canonical before it comes here.
std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7E00;
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // Rounds to 2^16 or more.
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 makes the float adder round at the denormals' unit, 2^-24.
    magnitude = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    magnitude = (magnitude - ((127 - 15) << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | magnitude);
}

float bfloat_to_float(std::uint16_t value) { return std::bit_cast<float>(std::uint32_t{value} << 16); }

/// Nearest, ties to even. NaN is canonical before it comes here: its low bits are zero and nothing carries.
std::uint16_t float_to_bfloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// A lane says how elements become accumulators and back.

template <class T>
struct Plain {
  using Element = T;
  using Accumulator = T;
  static T load(T element) { return element; }
  static T store(T value) { return value; }
};

struct Half {
  using Element = std::uint16_t;
  using Accumulator = float;
  static float load(Element element) { return half_to_float(element); }
  static Element store(float value) { return float_to_half(value); }
};

struct BrainHalf {
  using Element = std::uint16_t;
  using Accumulator = float;
  static float load(Element element) { return bfloat_to_float(element); }
  static Element store(float value) { return float_to_bfloat(value); }
};

/// Any byte that is not 0 is true; results are 0 or 1.
struct Boolean {
  using Element = std::uint8_t;
  using Accumulator = std::uint8_t;
  static Accumulator load(Element element) { return element != 0 ? 1 : 0; }
  static Element store(Accumulator value) { return value; }
};

struct Add {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return a + b;
    else
      return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  }
};

struct Multiply {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return a * b;
    else
      return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
};

template <class T>
using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

struct Min {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
      // Equal: the same bits, or zeros of which -0 is the smaller.
      if (a == b) return std::bit_cast<T>(std::bit_cast<Bits<T>>(a) | std::bit_cast<Bits<T>>(b));
    }
    return a < b ? a : b;
  }
};

struct Max {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
      if (a == b) return std::bit_cast<T>(std::bit_cast<Bits<T>>(a) & std::bit_cast<Bits<T>>(b));
    }
    return a > b ? a : b;
  }
};

struct And {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

/// Accumulators of the tree over `count` inputs, for `elements` elements that start at `offset` bytes.
template <class Lane, class Op>
void tree(const std::byte* const* inputs, std::size_t count, std::size_t offset, std::size_t elements,
          typename Lane::Accumulator* out) {
  if (count == 1) {
    for (std::size_t i = 0; i < elements; ++i) {
      typename Lane::Element element;
      std::memcpy(&element, inputs[0] + offset + i * sizeof(element), sizeof(element));
      out[i] = Lane::load(element);
    }
    return;
  }
  const std::size_t half = std::bit_floor(count - 1);
  typename Lane::Accumulator right[kBlockElements];
  tree<Lane, Op>(inputs, half, offset, elements, out);
  tree<Lane, Op>(inputs + half, count - half, offset, elements, right);
  for (std::size_t i = 0; i < elements; ++i) out[i] = Op::apply(out[i], right[i]);
}

template <class T>
T finish(T value, [[maybe_unused]] std::uint32_t average_over) {
  if constexpr (std::is_floating_point_v<T>) {
    if (average_over > 1) value /= static_cast<T>(average_over);
    // Which operand's NaN survives depends on the processor and the compiler; one NaN does not.
    if (value != value) value = std::numeric_limits<T>::quiet_NaN();
  }
  return value;
}

struct Range {
  const std::byte* const* inputs;
  std::size_t count;
  std::size_t offset;
  std::size_t bytes;
  std::byte* out;
  std::uint32_t average_over;
};

template <class Lane, class Op>
void run(const Range& range) {
  using Element = typename Lane::Element;
  typename Lane::Accumulator block[kBlockElements];
  for (std::size_t at = 0; at < range.bytes; at += kBlockElements * sizeof(Element)) {
    const std::size_t left = (range.bytes - at) / sizeof(Element);
    const std::size_t elements = left < kBlockElements ? left : kBlockElements;
    tree<Lane, Op>(range.inputs, range.count, range.offset + at, elements, block);
    for (std::size_t i = 0; i < elements; ++i) {
      const Element element = Lane::store(finish(block[i], range.average_over));
      std::memcpy(range.out + at + i * sizeof(Element), &element, sizeof(Element));
    }
  }
}

template <class Lane>
void run_float(ReduceOp op, const Range& range) {
  switch (op) {
    case ReduceOp::kProduct:
      return run<Lane, Multiply>(range);
    case ReduceOp::kMin:
      return run<Lane, Min>(range);
    case ReduceOp::kMax:
      return run<Lane, Max>(range);
    default:
      return run<Lane, Add>(range);
  }
}

template <class T>
void run_integer(ReduceOp op, const Range& range) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return run<Plain<T>, Add>(range);
    case ReduceOp::kProduct:
      return run<Plain<T>, Multiply>(range);
    case ReduceOp::kMin:
      return run<Plain<T>, Min>(range);
    case ReduceOp::kMax:
      return run<Plain<T>, Max>(range);
    case ReduceOp::kBand:
      return run<Plain<T>, And>(range);
    case ReduceOp::kBor:
      return run<Plain<T>, Or>(range);
    case ReduceOp::kBxor:
      return run<Plain<T>, Xor>(range);
  }
}

void run_boolean(ReduceOp op, const Range& range) {
  switch (op) {
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return run<Boolean, And>(range);
    case ReduceOp::kBxor:
      return run<Boolean, Xor>(range);
    default:
      return run<Boolean, Or>(range);
  }
}

template <class T>
void divide(std::byte* data, std::size_t bytes, std::uint32_t average_over) {
  for (std::size_t at = 0; at < bytes; at += sizeof(T)) {
    T value;
    std::memcpy(&value, data + at, sizeof(T));
    value = static_cast<T>(static_cast<std::int64_t>(value) / static_cast<std::int64_t>(average_over));
    std::memcpy(data + at, &value, sizeof(T));
  }
}

}  // namespace

void reduce_scalar(ReduceSpec spec, const std::byte* const* inputs, std::size_t count, std::size_t offset,
                   std::size_t bytes, std::byte* out) {
  const Range range{inputs, count, offset, bytes, out, spec.average_over};
  switch (spec.dtype) {
    case DataType::kFloat32:
      return run_float<Plain<float>>(spec.op, range);
    case DataType::kFloat64:
      return run_float<Plain<double>>(spec.op, range);
    case DataType::kFloat16:
      return run_float<Half>(spec.op, range);
    case DataType::kBFloat16:
      return run_float<BrainHalf>(spec.op, range);
    case DataType::kInt8:
      return run_integer<std::int8_t>(spec.op, range);
    case DataType::kInt16:
      return run_integer<std::int16_t>(spec.op, range);
    case DataType::kInt32:
      return run_integer<std::int32_t>(spec.op, range);
    case DataType::kInt64:
      return run_integer<std::int64_t>(spec.op, range);
    case DataType::kUInt8:
      return run_integer<std::uint8_t>(spec.op, range);
    case DataType::kBool:
      return run_boolean(spec.op, range);
  }
}

void divide_integers(DataType dtype, std::byte* data, std::size_t bytes, std::uint32_t average_over) {
  switch (dtype) {
    case DataType::kInt8:
      return divide<std::int8_t>(data, bytes, average_over);
    case DataType::kInt16:
      return divide<std::int16_t>(data, bytes, average_over);
    case DataType::kInt32:
      return divide<std::int32_t>(data, bytes, average_over);
    case DataType::kInt64:
      return divide<std::int64_t>(data, bytes, average_over);
    case DataType::kUInt8:
      return divide<std::uint8_t>(data, bytes, average_over);
    default:
      return;
  }
}

}  // namespace herring::server::internal
