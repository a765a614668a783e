#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/operation.h"
#include "core/status.h"
#include "core/types.h"

namespace herring {

/// The first element that is NaN or infinite, counted from 0; nothing where all are finite, or of a type that always
/// is. Whole elements, at any alignment.
std::optional<std::uint64_t> find_not_finite(DataType dtype, std::span<const std::byte> data) noexcept;

/// Whose input of an operation is not finite, and which element of the part.
struct NotFinite {
  std::string who;  ///< "rank 3", "ranks 4-7"
  std::uint64_t element = 0;
};

/// kNotFinite, for people: names operation, ranks and elements. `found` is not empty.
Status not_finite_status(const OpDescriptor& descriptor, const OpKey& key, const std::vector<NotFinite>& found);

}  // namespace herring
