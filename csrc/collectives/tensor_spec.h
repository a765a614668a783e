#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/operation.h"

namespace herring::collectives {

/// What all ranks say of a tensor that they reduce together.
struct TensorSpec {
  OpDescriptor descriptor;  ///< op_bytes, dtype, reduce, dims and shape.
  double prescale = 1;      ///< Each rank's data is multiplied by this,
  double postscale = 1;     ///< and the result by this.
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

/// A tensor of a plan, as rank 0 of a group proposes it to the others.
struct PlannedTensor {
  std::string_view name;  ///< In the plan's bytes.
  TensorSpec spec;
  std::uint64_t place = 0;  ///< Where it lies among others (PlacedMemory); 0: by itself.
};

inline constexpr std::size_t kMaxPlanBytes = 1 << 20;
inline constexpr std::size_t kMaxPlannedName = 1 << 10;

/// Adds a tensor to a plan. False, and nothing is added, where the plan would pass kMaxPlanBytes.
bool append(std::vector<std::byte>& plan, const PlannedTensor& tensor);
/// The size of buckets, at the plan's beginning.
std::vector<std::byte> begin_plan(std::uint64_t bucket_bytes);

struct PlanText {
  std::uint64_t bucket_bytes = 0;
  std::vector<PlannedTensor> tensors;
};
/// None where the bytes are no plan.
std::optional<PlanText> read_plan(std::span<const std::byte> plan);

}  // namespace herring::collectives
