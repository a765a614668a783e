#include "core/finite.h"

#include <algorithm>
#include <cstring>

namespace herring {
namespace {

/// Elements looked at before the first look at the answer: the loop in between has no branch, so it is vectorized.
constexpr std::size_t kLookEvery = 512;
constexpr std::size_t kNamed = 8;

/// All bits of the exponent set: NaN or infinity.
template <class Bits, Bits kExponent>
std::optional<std::uint64_t> find(std::span<const std::byte> data) noexcept {
  const std::size_t count = data.size() / sizeof(Bits);
  for (std::size_t start = 0; start < count; start += kLookEvery) {
    const std::size_t length = std::min(kLookEvery, count - start);
    Bits values[kLookEvery];
    std::memcpy(values, data.data() + start * sizeof(Bits), length * sizeof(Bits));
    Bits any = 0;
    for (std::size_t i = 0; i < length; ++i) {
      any = static_cast<Bits>(any | static_cast<Bits>((values[i] & kExponent) == kExponent ? 1 : 0));
    }
    if (any == 0) continue;
    for (std::size_t i = 0; i < length; ++i) {
      if ((values[i] & kExponent) == kExponent) return start + i;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::uint64_t> find_not_finite(DataType dtype, std::span<const std::byte> data) noexcept {
  switch (dtype) {
    case DataType::kFloat32:
      return find<std::uint32_t, 0x7F80'0000>(data);
    case DataType::kFloat64:
      return find<std::uint64_t, 0x7FF0'0000'0000'0000>(data);
    case DataType::kFloat16:
      return find<std::uint16_t, 0x7C00>(data);
    case DataType::kBFloat16:
      return find<std::uint16_t, 0x7F80>(data);
    default:
      return std::nullopt;
  }
}

Status not_finite_status(const OpDescriptor& descriptor, const OpKey& key, const std::vector<NotFinite>& found) {
  std::string text = to_string(descriptor) + ", " + to_string(key) + ": NaN or infinity in the input of ";
  for (std::size_t i = 0; i < std::min(found.size(), kNamed); ++i) {
    text += (i == 0 ? "" : ", ") + found[i].who + " (first seen at element " + std::to_string(found[i].element) + ")";
  }
  if (found.size() > kNamed) text += " and " + std::to_string(found.size() - kNamed) + " others";
  return Status(Code::kNotFinite, std::move(text));
}

}  // namespace herring
