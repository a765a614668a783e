#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/operation.h"
#include "fusion_buffer/shard_plan.h"

/// Who has which chunks of a shard after some lanes have died: a pure function, the same on every worker.
namespace herring::worker {

/// Chunks first .. first + chunks - 1 of the shard of plan lane `origin`, in the care of `lane`.
struct Item {
  std::uint32_t id = 0;      ///< wire::Header::shard; unique among all items of one part.
  std::uint32_t parent = 0;  ///< The id that it was a piece of before a lane died; its own where none did.
  std::uint32_t origin = 0;
  std::uint32_t lane = 0;
  std::uint32_t first = 0;
  std::uint32_t chunks = 0;
};

/// Most lanes of a plan with failover: ids have 16 bits for the lane and 16 for the piece.
inline constexpr std::uint32_t kMaxFailoverLanes = 1u << 16;

/// The items of origin's shard after the lanes in `losses` have died in this order, one of them at least being left.
/// The shard's chunks keep their numbers; runs go to the lanes alive by weight, starting with one that `seed` picks,
/// and have at most wire::kMaxHeldChunks chunks.
std::vector<Item> make_items(std::uint32_t origin, std::uint32_t chunks, std::span<const std::uint32_t> losses,
                             std::span<const double> weights, std::uint64_t seed);

}  // namespace herring::worker
