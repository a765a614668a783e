// No #pragma once and no includes: this file is the body of each vector translation unit (reduce_neon.cc,
// reduce_avx2.cc, reduce_avx512.cc), which includes what is needed, switches the instruction set on, and defines before
// it:
//   kVectorBytes                                     width of a register
//   Floats halves_to_floats(const std::byte*)        loads kVectorBytes / 2 bytes of float16, any alignment
//   void floats_to_halves(Floats, std::byte*)        stores them, nearest even
// Everything is in an anonymous namespace and uses no library template: nothing compiled here for a newer processor may
// be picked by the linker for code that runs on every processor.

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

namespace herring::server::internal {
namespace {

template <class T>
using Vector = typename VectorOf<T>::Type;

/// What one step of one stream becomes in registers.
template <class T, int kParts>
struct Registers {
  Vector<T> part[kParts];
};

template <class T>
inline Vector<T> load_vector(const std::byte* from) {
  Vector<T> value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

template <class T>
inline void store_vector(std::byte* to, Vector<T> value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

template <class T>
inline constexpr bool kIsFloat = false;
template <>
inline constexpr bool kIsFloat<float> = true;
template <>
inline constexpr bool kIsFloat<double> = true;

template <class T>
struct IntegerLike;
template <>
struct IntegerLike<float> {
  using Type = std::int32_t;
};
template <>
struct IntegerLike<double> {
  using Type = std::int64_t;
};

/// Divides, then makes NaNs canonical.
template <class T>
inline Vector<T> finish_vector(Vector<T> value, std::uint32_t average_over) {
  if constexpr (kIsFloat<T>) {
    if (average_over > 1) value = value / static_cast<T>(average_over);
    const Vector<T> nan = Vector<T>{} + (sizeof(T) == 4 ? __builtin_nanf("") : static_cast<T>(__builtin_nan("")));
    value = value == value ? value : nan;
  }
  return value;
}

// A lane says how a step of elements becomes accumulators and back.

template <class T>
struct PlainLane {
  using Scalar = T;
  static constexpr int kParts = kVectorStepBytes / kVectorBytes;
  static constexpr std::size_t kStepBytes = kVectorStepBytes;
  static constexpr std::size_t kScale = 1;
  static Registers<T, kParts> load(const std::byte* from) {
    Registers<T, kParts> value;
    for (int i = 0; i < kParts; ++i) value.part[i] = load_vector<T>(from + i * kVectorBytes);
    return value;
  }
  static void store(std::byte* to, const Registers<T, kParts>& value) {
    for (int i = 0; i < kParts; ++i) store_vector<T>(to + i * kVectorBytes, value.part[i]);
  }
};

/// Any byte that is not 0 is true; accumulators are 0 or 1.
struct BooleanLane : PlainLane<std::uint8_t> {
  static Registers<std::uint8_t, kParts> load(const std::byte* from) {
    Registers<std::uint8_t, kParts> value = PlainLane<std::uint8_t>::load(from);
    const Vector<std::uint8_t> one = Vector<std::uint8_t>{} + std::uint8_t{1};
    for (int i = 0; i < kParts; ++i) value.part[i] = value.part[i] < one ? value.part[i] : one;
    return value;
  }
};

struct HalfLane {
  using Scalar = float;
  static constexpr int kParts = 2;
  static constexpr std::size_t kStepBytes = kVectorBytes;
  static constexpr std::size_t kScale = 2;
  static Registers<float, 2> load(const std::byte* from) {
    return {{halves_to_floats(from), halves_to_floats(from + kVectorBytes / 2)}};
  }
  static void store(std::byte* to, const Registers<float, 2>& value) {
    floats_to_halves(value.part[0], to);
    floats_to_halves(value.part[1], to + kVectorBytes / 2);
  }
};

/// Even and odd elements in a register each: no shuffles.
struct BrainHalfLane {
  using Scalar = float;
  using Words = Vector<std::uint32_t>;
  static constexpr int kParts = 2;
  static constexpr std::size_t kStepBytes = kVectorBytes;
  static constexpr std::size_t kScale = 2;
  static Registers<float, 2> load(const std::byte* from) {
    const Words words = load_vector<std::uint32_t>(from);
    return {{reinterpret_cast<Vector<float>>(words << 16), reinterpret_cast<Vector<float>>(words & 0xFFFF0000u)}};
  }
  static void store(std::byte* to, const Registers<float, 2>& value) {
    store_vector<std::uint32_t>(to, rounded(value.part[0]) >> 16 | (rounded(value.part[1]) & 0xFFFF0000u));
  }
  /// Nearest even in the upper 16 bits. NaN is canonical by now and does not carry.
  static Words rounded(Vector<float> value) {
    const Words bits = reinterpret_cast<Words>(value);
    return bits + 0x7FFFu + (bits >> 16 & 1u);
  }
};

struct Add {
  template <class T>
  static Vector<T> apply(Vector<T> a, Vector<T> b) {
    return a + b;
  }
};

struct Multiply {
  template <class T>
  static Vector<T> apply(Vector<T> a, Vector<T> b) {
    return a * b;
  }
};

struct Min {
  template <class T>
  static Vector<T> apply(Vector<T> a, Vector<T> b) {
    const Vector<T> first = a < b ? a : b;
    if constexpr (kIsFloat<T>) {
      // The two differ for zeros of different sign, where OR gives -0, and with a NaN, where OR stays a NaN.
      using Word = Vector<typename IntegerLike<T>::Type>;
      const Vector<T> second = b < a ? b : a;
      return reinterpret_cast<Vector<T>>(reinterpret_cast<Word>(first) | reinterpret_cast<Word>(second));
    } else {
      return first;
    }
  }
};

struct Max {
  template <class T>
  static Vector<T> apply(Vector<T> a, Vector<T> b) {
    const Vector<T> first = a > b ? a : b;
    if constexpr (kIsFloat<T>) {
      // The two differ for zeros of different sign, where AND gives +0. With a NaN, all bits set is a NaN.
      using Word = Vector<typename IntegerLike<T>::Type>;
      const Vector<T> second = b > a ? b : a;
      const Word nan = reinterpret_cast<Word>(a != a) | reinterpret_cast<Word>(b != b);
      return reinterpret_cast<Vector<T>>((reinterpret_cast<Word>(first) & reinterpret_cast<Word>(second)) | nan);
    } else {
      return first;
    }
  }
};

struct And {
  template <class T>
  static Vector<T> apply(Vector<T> a, Vector<T> b) {
    return a & b;
  }
};

struct Or {
  template <class T>
  static Vector<T> apply(Vector<T> a, Vector<T> b) {
    return a | b;
  }
};

struct Xor {
  template <class T>
  static Vector<T> apply(Vector<T> a, Vector<T> b) {
    return a ^ b;
  }
};

template <class Lane>
using LaneRegisters = Registers<typename Lane::Scalar, Lane::kParts>;

template <class Lane, class Op>
inline LaneRegisters<Lane> combine(const LaneRegisters<Lane>& a, const LaneRegisters<Lane>& b) {
  LaneRegisters<Lane> value;
  for (int i = 0; i < Lane::kParts; ++i) {
    value.part[i] = Op::template apply<typename Lane::Scalar>(a.part[i], b.part[i]);
  }
  return value;
}

/// The balanced tree over kCount streams, in registers.
template <class Lane, class Op, int kCount>
inline LaneRegisters<Lane> tree(const std::byte* const* inputs, std::size_t at) {
  if constexpr (kCount == 1) {
    return Lane::load(inputs[0] + at);
  } else {
    constexpr int kHalf = kCount > 4 ? 4 : kCount > 2 ? 2 : 1;  // Largest power of two below kCount.
    return combine<Lane, Op>(tree<Lane, Op, kHalf>(inputs, at), tree<Lane, Op, kCount - kHalf>(inputs + kHalf, at));
  }
}

/// Asked for before its turn: a processor does not do so by itself beyond a page, or late where another core has it.
constexpr std::size_t kAheadBytes = 1024;

template <class Lane, class Op, int kCount>
void run(const KernelCall& borrowed) {
  using Scalar = typename Lane::Scalar;
  // Own copies: the stores below could alias anything that is reached through a pointer.
  const KernelCall call = borrowed;
  const std::byte* inputs[kCount];
  for (int i = 0; i < kCount; ++i) inputs[i] = call.inputs[i] + call.offset;
  for (std::size_t at = 0; at < call.bytes; at += Lane::kStepBytes) {
    for (int i = 0; i < kCount; ++i) __builtin_prefetch(inputs[i] + at + kAheadBytes);
    LaneRegisters<Lane> value = tree<Lane, Op, kCount>(inputs, at);
    for (std::size_t i = call.right_count; i > 0; --i) {
      LaneRegisters<Lane> right;
      for (int part = 0; part < Lane::kParts; ++part) {
        right.part[part] = load_vector<Scalar>(call.rights[i - 1] + at * Lane::kScale + part * kVectorBytes);
      }
      value = combine<Lane, Op>(value, right);
    }
    if (call.finish) {
      for (auto& part : value.part) part = finish_vector<Scalar>(part, call.average_over);
      Lane::store(call.out + at, value);
    } else {
      for (int part = 0; part < Lane::kParts; ++part) {
        store_vector<Scalar>(call.out + at * Lane::kScale + part * kVectorBytes, value.part[part]);
      }
    }
  }
}

template <class Lane, class Op>
KernelSet kernels() {
  return {
      {&run<Lane, Op, 1>, &run<Lane, Op, 2>, nullptr, &run<Lane, Op, 4>, nullptr, nullptr, nullptr, &run<Lane, Op, 8>}};
}

/// Gradients are sums of floats, over any number of ranks.
template <class Lane>
KernelSet float_sum_kernels() {
  return {{&run<Lane, Add, 1>, &run<Lane, Add, 2>, &run<Lane, Add, 3>, &run<Lane, Add, 4>, &run<Lane, Add, 5>,
           &run<Lane, Add, 6>, &run<Lane, Add, 7>, &run<Lane, Add, 8>}};
}

template <class Lane>
KernelSet float_kernels(ReduceOp op) {
  switch (op) {
    case ReduceOp::kProduct:
      return kernels<Lane, Multiply>();
    case ReduceOp::kMin:
      return kernels<Lane, Min>();
    case ReduceOp::kMax:
      return kernels<Lane, Max>();
    default:
      return float_sum_kernels<Lane>();
  }
}

/// Sums, products and bits do not know signs; unsigned vectors wrap without undefined behaviour.
template <class Signed, class Unsigned>
KernelSet integer_kernels(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return kernels<PlainLane<Unsigned>, Add>();
    case ReduceOp::kProduct:
      return kernels<PlainLane<Unsigned>, Multiply>();
    case ReduceOp::kMin:
      return kernels<PlainLane<Signed>, Min>();
    case ReduceOp::kMax:
      return kernels<PlainLane<Signed>, Max>();
    case ReduceOp::kBand:
      return kernels<PlainLane<std::uint64_t>, And>();
    case ReduceOp::kBor:
      return kernels<PlainLane<std::uint64_t>, Or>();
    case ReduceOp::kBxor:
      return kernels<PlainLane<std::uint64_t>, Xor>();
  }
  return {};
}

KernelSet boolean_kernels(ReduceOp op) {
  switch (op) {
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return kernels<BooleanLane, And>();
    case ReduceOp::kBxor:
      return kernels<BooleanLane, Xor>();
    default:
      return kernels<BooleanLane, Or>();
  }
}

KernelSet find_kernels(ReduceSpec spec) {
  switch (spec.dtype) {
    case DataType::kFloat32:
      return float_kernels<PlainLane<float>>(spec.op);
    case DataType::kFloat64:
      return float_kernels<PlainLane<double>>(spec.op);
    case DataType::kFloat16:
      return float_kernels<HalfLane>(spec.op);
    case DataType::kBFloat16:
      return float_kernels<BrainHalfLane>(spec.op);
    case DataType::kInt8:
      return integer_kernels<std::int8_t, std::uint8_t>(spec.op);
    case DataType::kInt16:
      return integer_kernels<std::int16_t, std::uint16_t>(spec.op);
    case DataType::kInt32:
      return integer_kernels<std::int32_t, std::uint32_t>(spec.op);
    case DataType::kInt64:
      return integer_kernels<std::int64_t, std::uint64_t>(spec.op);
    case DataType::kUInt8:
      return integer_kernels<std::uint8_t, std::uint8_t>(spec.op);
    case DataType::kBool:
      return boolean_kernels(spec.op);
  }
  return {};
}

}  // namespace
}  // namespace herring::server::internal
