#include "cuda/kernels/twins.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

namespace herring::cuda {
namespace {

template <class T>
T load(std::uint64_t address, std::uint64_t index) {
  T value;
  std::memcpy(&value, reinterpret_cast<const std::byte*>(address) + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(std::uint64_t address, std::uint64_t index, T value) {
  std::memcpy(reinterpret_cast<std::byte*>(address) + index * sizeof(T), &value, sizeof(T));
}

bool is_small_float(Element type) {
  return type == Element::kFloat32 || type == Element::kFloat16 || type == Element::kBFloat16;
}

bool is_float(Element type) { return is_small_float(type) || type == Element::kFloat64; }

float half_to_float(std::uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int mantissa = half & 1023;
  const float sign = (half & 0x8000u) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

/// Nearest, ties to even, found by looking at the two neighbours in the unit of the result.
std::uint16_t float_to_half(float value) {
  if (std::isnan(value)) return 0x7E00;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7C00u);
  int exponent = size == 0 ? -14 : std::max(std::ilogb(size), -14);
  // Exact: a power of two. nearbyint() rounds ties to even in the default environment.
  auto steps = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(static_cast<double>(size), 10 - exponent)));
  if (steps == 2048) {
    steps = 1024;
    ++exponent;
  }
  if (steps < 1024) return static_cast<std::uint16_t>(sign | steps);
  return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(exponent + 15) << 10 | (steps - 1024));
}

float load_float(Element type, std::uint64_t address, std::uint64_t index) {
  if (type == Element::kFloat32) return load<float>(address, index);
  const auto bits = load<std::uint16_t>(address, index);
  return type == Element::kFloat16 ? half_to_float(bits) : std::bit_cast<float>(std::uint32_t{bits} << 16);
}

void store_float(Element type, std::uint64_t address, std::uint64_t index, float value) {
  if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  if (type == Element::kFloat32) return store(address, index, value);
  if (type == Element::kFloat16) return store(address, index, float_to_half(value));
  const auto bits = std::bit_cast<std::uint32_t>(value);
  store(address, index, static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16));
}

template <class T>
T tree(const SumParameters& parameters, std::uint64_t index, std::uint32_t first, std::uint32_t count) {
  if (count == 1) {
    if constexpr (std::is_same_v<T, float>) {
      return load_float(parameters.type, parameters.sources[first], index);
    } else {
      return load<T>(parameters.sources[first], index);
    }
  }
  const std::uint32_t half = std::bit_floor(count - 1);
  const T left = tree<T>(parameters, index, first, half);
  const T right = tree<T>(parameters, index, first + half, count - half);
  if constexpr (std::is_floating_point_v<T>) {
    return left + right;
  } else {
    return static_cast<T>(static_cast<std::uint64_t>(left) + static_cast<std::uint64_t>(right));
  }
}

template <class T>
void sum(const SumParameters& parameters) {
  for (std::uint64_t i = 0; i < parameters.elements; ++i) {
    T value = tree<T>(parameters, i, 0, parameters.source_count);
    if (parameters.average_over > 1) {
      if constexpr (std::is_floating_point_v<T>) {
        value /= static_cast<T>(parameters.average_over);
      } else {
        value = static_cast<T>(static_cast<std::int64_t>(value) / static_cast<std::int64_t>(parameters.average_over));
      }
    }
    if constexpr (std::is_same_v<T, float>) {
      store_float(parameters.type, parameters.target, i, value);
    } else {
      if constexpr (std::is_same_v<T, double>) {
        if (std::isnan(value)) value = std::numeric_limits<double>::quiet_NaN();
      }
      store(parameters.target, i, value);
    }
  }
}

bool sees_not_finite(Element type, std::uint64_t address, std::uint64_t index) {
  if (type == Element::kFloat64) return !std::isfinite(load<double>(address, index));
  return is_small_float(type) && !std::isfinite(load_float(type, address, index));
}

std::string number(Element type) { return std::to_string(static_cast<std::uint32_t>(type)); }

}  // namespace

std::size_t element_bytes(Element type) {
  return herring::element_bytes(static_cast<DataType>(static_cast<std::uint8_t>(type)));
}

Status check_pack(const PackParameters& parameters) {
  const Element from = parameters.source_type, to = parameters.target_type;
  if (element_bytes(from) == 0 || element_bytes(to) == 0) {
    return {Code::kInvalidArgument, "pack: no element type has the number " + number(from) + " or " + number(to)};
  }
  if (from != to && !(is_small_float(from) && is_small_float(to))) {
    return {Code::kInvalidArgument, "pack: type " + number(from) + " does not become type " + number(to) +
                                        "; only float32, float16 and bfloat16 become each other"};
  }
  if (parameters.scale != 1 && !is_float(from)) {
    return {Code::kInvalidArgument, "pack: type " + number(from) + " cannot be scaled; only floating point can"};
  }
  return Status::ok();
}

Status check_sum(const SumParameters& parameters) {
  if (!is_float(parameters.type) && parameters.type != Element::kInt32 && parameters.type != Element::kInt64) {
    return {Code::kInvalidArgument, "sum: type " + number(parameters.type) + " is not summed on the device"};
  }
  if (parameters.source_count == 0 || parameters.source_count > kMostSources) {
    return {Code::kInvalidArgument, "sum: takes 1 to " + std::to_string(kMostSources) + " sources, got " +
                                        std::to_string(parameters.source_count)};
  }
  return Status::ok();
}

void pack_twin(const PackParameters& parameters, std::span<const Tile> tiles, std::uint32_t* flag) {
  const Element from = parameters.source_type, to = parameters.target_type;
  const bool is_moved = from == to && parameters.scale == 1;
  for (const Tile& tile : tiles) {
    for (std::uint32_t i = 0; i < tile.elements; ++i) {
      if (flag != nullptr && sees_not_finite(from, tile.source, i)) *flag = 1;
      if (is_moved) {
        const std::size_t size = element_bytes(from);
        std::memcpy(reinterpret_cast<std::byte*>(tile.target) + i * size,
                    reinterpret_cast<const std::byte*>(tile.source) + i * size, size);
      } else if (from == Element::kFloat64) {
        const double value = load<double>(tile.source, i) * parameters.scale;
        store(tile.target, i, std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value);
      } else {
        store_float(to, tile.target, i, load_float(from, tile.source, i) * static_cast<float>(parameters.scale));
      }
    }
  }
}

void sum_twin(const SumParameters& parameters) {
  if (parameters.elements == 0) return;
  if (parameters.source_count == 1 && parameters.average_over <= 1) {
    // Nothing is computed: NaNs stay what they are.
    std::memmove(reinterpret_cast<void*>(parameters.target), reinterpret_cast<const void*>(parameters.sources[0]),
                 parameters.elements * element_bytes(parameters.type));
    return;
  }
  switch (parameters.type) {
    case Element::kFloat32:
    case Element::kFloat16:
    case Element::kBFloat16:
      return sum<float>(parameters);
    case Element::kFloat64:
      return sum<double>(parameters);
    case Element::kInt32:
      return sum<std::int32_t>(parameters);
    case Element::kInt64:
      return sum<std::int64_t>(parameters);
    default:
      return;  // check_sum() refuses it.
  }
}

void cut_tiles(std::uint64_t source, std::uint64_t target, std::uint64_t elements, Element source_type,
               Element target_type, std::vector<Tile>& tiles) {
  const std::uint64_t from = element_bytes(source_type), to = element_bytes(target_type);
  const std::uint64_t most = kTileBytes / std::max(from, to);
  for (std::uint64_t at = 0; at < elements; at += most) {
    const auto count = static_cast<std::uint32_t>(std::min(most, elements - at));
    tiles.push_back({source + at * from, target + at * to, count, 0});
  }
}

}  // namespace herring::cuda
