#pragma once

#include "cuda/kernels/tables.h"

/// What one thread of each kernel does. nvcc compiles it for the GPU (kernels.cu); the tests compile it for the CPU,
/// call it for every thread in turn, and compare with the twins: so the arithmetic and the addressing are tested where
/// there is no GPU. C++17, for nvcc.
#if defined(__CUDACC__)
#define HERRING_BODY __host__ __device__ __forceinline__
#else
#include <cstring>
#define HERRING_BODY inline
#endif

namespace herring::cuda::body {

struct Position {
  std::uint32_t block;
  std::uint32_t blocks;
  std::uint32_t thread;
  std::uint32_t threads;
};

template <class To, class From>
HERRING_BODY To bits_as(From from) {
#if defined(__CUDA_ARCH__)
  union {
    From from;
    To to;
  } both = {from};
  return both.to;
#else
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
#endif
}

// --- Elements. A float that is NaN is stored as the one quiet NaN, as server/reduce.cc stores it. ---

HERRING_BODY float half_to_float(std::uint16_t half) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7FFFu) << 13;
  const std::uint32_t exponent = magnitude & (0x7C00u << 13);
  std::uint32_t bits = magnitude + ((127u - 15u) << 23);
  if (exponent == 0x7C00u << 13) {
    bits += (128u - 16u) << 23;
  } else if (exponent == 0) {
    bits = bits_as<std::uint32_t>(bits_as<float>(bits + (1u << 23)) - 6.103515625e-05f);
  }
  return bits_as<float>(bits | static_cast<std::uint32_t>(half & 0x8000u) << 16);
#endif
}

HERRING_BODY std::uint16_t float_to_half(float value) {
#if defined(__CUDA_ARCH__)
  std::uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return value != value ? static_cast<std::uint16_t>(0x7E00) : half;
#else
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7E00;
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {
    magnitude = bits_as<std::uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    magnitude = (magnitude - ((127u - 15u) << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | magnitude);
#endif
}

HERRING_BODY float quiet(float value) { return value != value ? bits_as<float>(0x7FC00000u) : value; }
HERRING_BODY double quiet(double value) {
  return value != value ? bits_as<double>(static_cast<std::uint64_t>(0x7FF8000000000000ull)) : value;
}

HERRING_BODY std::uint16_t float_to_bfloat(float value) {
  const std::uint32_t bits = bits_as<std::uint32_t>(quiet(value));
  return static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

struct Float {
  using Stored = float;
  using Value = float;
  static HERRING_BODY float load(float stored) { return stored; }
  static HERRING_BODY float store(float value) { return quiet(value); }
};
struct Double {
  using Stored = double;
  using Value = double;
  static HERRING_BODY double load(double stored) { return stored; }
  static HERRING_BODY double store(double value) { return quiet(value); }
};
struct Half {
  using Stored = std::uint16_t;
  using Value = float;
  static HERRING_BODY float load(std::uint16_t stored) { return half_to_float(stored); }
  static HERRING_BODY std::uint16_t store(float value) { return float_to_half(value); }
};
struct BrainHalf {
  using Stored = std::uint16_t;
  using Value = float;
  static HERRING_BODY float load(std::uint16_t stored) {
    return bits_as<float>(static_cast<std::uint32_t>(stored) << 16);
  }
  static HERRING_BODY std::uint16_t store(float value) { return float_to_bfloat(value); }
};
template <class T>
struct Integer {
  using Stored = T;
  using Value = T;
  static HERRING_BODY T load(T stored) { return stored; }
  static HERRING_BODY T store(T value) { return value; }
};
HERRING_BODY bool is_finite(float value) { return (bits_as<std::uint32_t>(value) & 0x7F800000u) != 0x7F800000u; }
HERRING_BODY bool is_finite(double value) {
  return (bits_as<std::uint64_t>(value) & 0x7FF0000000000000ull) != 0x7FF0000000000000ull;
}

template <class T>
HERRING_BODY T* at(std::uint64_t address) {
  return reinterpret_cast<T*>(address);
}

/// Four elements that move with one access.
template <class T>
struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) Four {
  T element[4];
};
struct alignas(16) Sixteen {
  std::uint32_t word[4];
};

/// Elements before the first that is aligned for a Four; they all come before where none is.
template <class T>
HERRING_BODY std::uint32_t head_of(std::uint64_t address, std::uint32_t elements) {
  constexpr std::uint32_t kAlign = alignof(Four<T>);
  const std::uint32_t over = static_cast<std::uint32_t>(address % kAlign);
  if (over == 0) return 0;
  if (over % sizeof(T) != 0) return elements;
  const std::uint32_t head = (kAlign - over) / static_cast<std::uint32_t>(sizeof(T));
  return head < elements ? head : elements;
}

// --- Pack ---

/// to[i] = convert(from[i]). Several loads are under way at once: what one thread waits for is the memory's latency.
template <class From, class To, class Convert>
HERRING_BODY void stream(const From* from, To* to, std::uint32_t count, const Position& position, Convert convert) {
  constexpr std::uint32_t kAtOnce = 4;
  const std::uint32_t step = position.threads;
  std::uint32_t i = position.thread;
  for (; i + (kAtOnce - 1) * step < count; i += kAtOnce * step) {
    From loaded[kAtOnce];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (std::uint32_t k = 0; k < kAtOnce; ++k) loaded[k] = from[i + k * step];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (std::uint32_t k = 0; k < kAtOnce; ++k) to[i + k * step] = convert(loaded[k]);
  }
  for (; i < count; i += step) to[i] = convert(from[i]);
}

template <class T>
HERRING_BODY void stream(const T* from, T* to, std::uint32_t count, const Position& position) {
  stream(from, to, count, position, [](const T& loaded) { return loaded; });
}

/// Scales and casts one tile. Gives whether all that this thread saw was finite.
template <class From, class To>
HERRING_BODY bool convert_tile(const Tile& tile, typename From::Value scale, bool look, const Position& position) {
  using Source = typename From::Stored;
  using Target = typename To::Stored;
  const Source* const source = at<const Source>(tile.source);
  Target* const target = at<Target>(tile.target);
  bool fine = true;
  const auto one = [&](std::uint32_t i) {
    const auto value = From::load(source[i]);
    if (look) fine = fine && is_finite(value);
    target[i] = To::store(value * scale);
  };
  std::uint32_t head = head_of<Target>(tile.target, tile.elements);
  if ((tile.source + head * sizeof(Source)) % alignof(Four<Source>) != 0) head = tile.elements;
  for (std::uint32_t i = position.thread; i < head; i += position.threads) one(i);
  const std::uint32_t fours = (tile.elements - head) / 4;
  const auto convert = [&](const Four<Source>& loaded) {
    Four<Target> stored;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int k = 0; k < 4; ++k) {
      const auto value = From::load(loaded.element[k]);
      if (look) fine = fine && is_finite(value);
      stored.element[k] = To::store(value * scale);
    }
    return stored;
  };
  stream(at<const Four<Source>>(tile.source + head * sizeof(Source)),
         at<Four<Target>>(tile.target + head * sizeof(Target)), fours, position, convert);
  for (std::uint32_t i = head + fours * 4 + position.thread; i < tile.elements; i += position.threads) one(i);
  return fine;
}

template <class T>
HERRING_BODY bool sees_only_finite(const Tile& tile, const Position& position) {
  const typename T::Stored* const source = at<const typename T::Stored>(tile.source);
  bool fine = true;
  for (std::uint32_t i = position.thread; i < tile.elements; i += position.threads) {
    fine = fine && is_finite(T::load(source[i]));
  }
  return fine;
}

/// Moves one tile as it is.
HERRING_BODY void move_tile(const Tile& tile, std::uint32_t element_bytes, const Position& position) {
  const std::uint32_t bytes = tile.elements * element_bytes;
  const std::uint8_t* const source = at<const std::uint8_t>(tile.source);
  std::uint8_t* const target = at<std::uint8_t>(tile.target);
  const bool meets = tile.source % 16 == tile.target % 16;
  std::uint32_t head = meets ? static_cast<std::uint32_t>((16 - tile.target % 16) % 16) : bytes;
  if (head > bytes) head = bytes;
  const std::uint32_t wide = (bytes - head) / 16;
  if (!meets && tile.source % 4 == tile.target % 4) {
    // Neighbours in a bucket of 32-bit elements: words, the rest by bytes.
    std::uint32_t first = static_cast<std::uint32_t>((4 - tile.target % 4) % 4);
    if (first > bytes) first = bytes;
    const std::uint32_t words = (bytes - first) / 4;
    for (std::uint32_t i = position.thread; i < first; i += position.threads) target[i] = source[i];
    stream(at<const std::uint32_t>(tile.source + first), at<std::uint32_t>(tile.target + first), words, position);
    for (std::uint32_t i = first + words * 4 + position.thread; i < bytes; i += position.threads) target[i] = source[i];
    return;
  }
  for (std::uint32_t i = position.thread; i < head; i += position.threads) target[i] = source[i];
  stream(at<const Sixteen>(tile.source + head), at<Sixteen>(tile.target + head), wide, position);
  for (std::uint32_t i = head + wide * 16 + position.thread; i < bytes; i += position.threads) target[i] = source[i];
}

HERRING_BODY std::uint32_t bytes_of(Element type) {
  switch (type) {
    case Element::kFloat64:
    case Element::kInt64:
      return 8;
    case Element::kFloat32:
    case Element::kInt32:
      return 4;
    case Element::kFloat16:
    case Element::kBFloat16:
    case Element::kInt16:
      return 2;
    default:
      return 1;
  }
}

template <class From>
HERRING_BODY bool convert_from(const PackParameters& parameters, const Tile& tile, const Position& position) {
  const bool look = parameters.flag != 0;
  const float scale = static_cast<float>(parameters.scale);
  switch (parameters.target_type) {
    case Element::kFloat16:
      return convert_tile<From, Half>(tile, scale, look, position);
    case Element::kBFloat16:
      return convert_tile<From, BrainHalf>(tile, scale, look, position);
    default:
      return convert_tile<From, Float>(tile, scale, look, position);
  }
}

HERRING_BODY bool pack_tile(const PackParameters& parameters, const Tile& tile, const Position& position) {
  if (parameters.source_type == parameters.target_type && parameters.scale == 1) {
    move_tile(tile, bytes_of(parameters.source_type), position);
    if (parameters.flag == 0) return true;
    switch (parameters.source_type) {
      case Element::kFloat32:
        return sees_only_finite<Float>(tile, position);
      case Element::kFloat64:
        return sees_only_finite<Double>(tile, position);
      case Element::kFloat16:
        return sees_only_finite<Half>(tile, position);
      case Element::kBFloat16:
        return sees_only_finite<BrainHalf>(tile, position);
      default:
        return true;
    }
  }
  switch (parameters.source_type) {
    case Element::kFloat64:
      return convert_tile<Double, Double>(tile, parameters.scale, parameters.flag != 0, position);
    case Element::kFloat16:
      return convert_from<Half>(parameters, tile, position);
    case Element::kBFloat16:
      return convert_from<BrainHalf>(parameters, tile, position);
    default:
      return convert_from<Float>(parameters, tile, position);
  }
}

HERRING_BODY void pack(const PackParameters& parameters, const Position& position) {
  const Tile* const tiles = at<const Tile>(parameters.tiles);
  bool fine = true;
  for (std::uint32_t i = position.block; i < parameters.tile_count; i += position.blocks) {
    fine = pack_tile(parameters, tiles[i], position) && fine;
  }
  // Whoever writes writes the same.
  if (!fine) *at<std::uint32_t>(parameters.flag) = 1;
}

// --- Sum ---

template <class T>
HERRING_BODY T plus(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return a + b;
  } else {
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  }
}

template <class T>
HERRING_BODY T divided(T value, std::uint32_t by) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return value / static_cast<T>(by);
  } else {
    return static_cast<T>(static_cast<std::int64_t>(value) / static_cast<std::int64_t>(by));
  }
}

/// tree(0, count), as a binary counter makes it: level k holds the sum of a whole run of 2^k sources.
template <class Lane, int kWidth, class Load>
HERRING_BODY void tree(std::uint32_t count, Load load, typename Lane::Value (&out)[kWidth]) {
  constexpr int kLevels = 4;
  static_assert(kMostSources == 1u << (kLevels - 1), "a level for each bit of the number of sources");
  typename Lane::Value level[kLevels][kWidth] = {};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (std::uint32_t i = 0; i < kMostSources; ++i) {
    if (i < count) {
      typename Lane::Value carry[kWidth];
      load(i, carry);
      int k = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (; k < kLevels - 1; ++k) {
        if ((i >> k & 1u) == 0) break;
        for (int w = 0; w < kWidth; ++w) carry[w] = plus(level[k][w], carry[w]);
      }
      for (int w = 0; w < kWidth; ++w) level[k][w] = carry[w];
    }
  }
  bool has = false;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int k = 0; k < kLevels; ++k) {
    if ((count >> k & 1u) == 0) continue;
    for (int w = 0; w < kWidth; ++w) out[w] = has ? plus(level[k][w], out[w]) : level[k][w];
    has = true;
  }
}

template <class Lane>
HERRING_BODY typename Lane::Stored finished(typename Lane::Value value, std::uint32_t average_over) {
  return Lane::store(average_over > 1 ? divided(value, average_over) : value);
}

template <class Lane>
HERRING_BODY void sum_as(const SumParameters& parameters, const Position& position) {
  using Stored = typename Lane::Stored;
  using Value = typename Lane::Value;
  const std::uint64_t first = std::uint64_t{position.block} * position.threads + position.thread;
  const std::uint64_t step = std::uint64_t{position.blocks} * position.threads;
  if (parameters.source_count == 1 && parameters.average_over <= 1) {
    // Nothing is computed: NaNs stay what they are.
    const Stored* const source = at<const Stored>(parameters.sources[0]);
    for (std::uint64_t i = first; i < parameters.elements; i += step) at<Stored>(parameters.target)[i] = source[i];
    return;
  }
  bool wide = parameters.target % alignof(Four<Stored>) == 0;
  for (std::uint32_t i = 0; i < parameters.source_count; ++i) {
    wide = wide && parameters.sources[i] % alignof(Four<Stored>) == 0;
  }
  // One piece of code for both, as it is long: what is not aligned, and the end, is loaded one by one.
  for (std::uint64_t at_four = first; at_four * 4 < parameters.elements; at_four += step) {
    const std::uint64_t start = at_four * 4;
    const bool whole = wide && start + 4 <= parameters.elements;
    Value values[4];
    tree<Lane, 4>(
        parameters.source_count,
        [&](std::uint32_t source, Value(&out)[4]) {
          Four<Stored> loaded = {};
          if (whole) {
            loaded = at<const Four<Stored>>(parameters.sources[source])[at_four];
          } else {
            for (std::uint64_t w = 0; w < 4 && start + w < parameters.elements; ++w) {
              loaded.element[w] = at<const Stored>(parameters.sources[source])[start + w];
            }
          }
          for (int w = 0; w < 4; ++w) out[w] = Lane::load(loaded.element[w]);
        },
        values);
    Four<Stored> stored;
    for (int w = 0; w < 4; ++w) stored.element[w] = finished<Lane>(values[w], parameters.average_over);
    if (whole) {
      at<Four<Stored>>(parameters.target)[at_four] = stored;
    } else {
      for (std::uint64_t w = 0; w < 4 && start + w < parameters.elements; ++w) {
        at<Stored>(parameters.target)[start + w] = stored.element[w];
      }
    }
  }
}

HERRING_BODY void sum(const SumParameters& parameters, const Position& position) {
  switch (parameters.type) {
    case Element::kFloat32:
      return sum_as<Float>(parameters, position);
    case Element::kFloat64:
      return sum_as<Double>(parameters, position);
    case Element::kFloat16:
      return sum_as<Half>(parameters, position);
    case Element::kBFloat16:
      return sum_as<BrainHalf>(parameters, position);
    case Element::kInt32:
      return sum_as<Integer<std::int32_t>>(parameters, position);
    case Element::kInt64:
      return sum_as<Integer<std::int64_t>>(parameters, position);
    default:
      return;  // check_sum() refuses it.
  }
}

}  // namespace herring::cuda::body
