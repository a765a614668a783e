#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "cuda/kernels/tables.h"

/// The kernels in plain code, on memory that the host can reach at the addresses that the parameters hold.
namespace herring::cuda {

std::size_t element_bytes(Element type);

/// kInvalidArgument names the types that do not go together.
Status check_pack(const PackParameters& parameters);
Status check_sum(const SumParameters& parameters);

/// `tiles` is what parameters.tiles points to.
void pack_twin(const PackParameters& parameters, std::span<const Tile> tiles, std::uint32_t* flag);
void sum_twin(const SumParameters& parameters);

/// Appends the tiles of `elements` elements that go from `source` to `target`.
void cut_tiles(std::uint64_t source, std::uint64_t target, std::uint64_t elements, Element source_type,
               Element target_type, std::vector<Tile>& tiles);

}  // namespace herring::cuda
