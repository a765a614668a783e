#pragma once

#include <cstddef>
#include <span>

#include "core/types.h"

namespace herring::collectives {

/// float32 and float64, in that type. Others are scaled by their frameworks.
inline bool may_scale(DataType dtype) { return dtype == DataType::kFloat32 || dtype == DataType::kFloat64; }

/// Multiplies every element; of the dtypes above.
inline void scale(std::span<std::byte> elements, DataType dtype, double factor) {
  const auto multiply = [&]<class Element>(Element by) {
    auto* const begin = reinterpret_cast<Element*>(elements.data());
    const std::size_t count = elements.size() / sizeof(Element);
    for (std::size_t i = 0; i < count; ++i) begin[i] *= by;
  };
  if (dtype == DataType::kFloat32) {
    multiply(static_cast<float>(factor));
  } else {
    multiply(factor);
  }
}

}  // namespace herring::collectives
