#pragma once

#include <cstdint>
#include <span>
#include <vector>

/// The shard plan: a pure function from sizes and weights to byte ranges, the same on every process.
namespace herring {

struct ByteRange {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

struct ShardPlanInput {
  std::uint64_t total_bytes = 0;
  std::span<const double> weights;     ///< One a lane, >= 0, not all zero. Need not sum to 1.
  std::uint64_t alignment_bytes = 64;  ///< Every boundary inside the part is a multiple of this.
  std::uint64_t min_shard_bytes = 0;   ///< Small parts go to fewer lanes rather than in shards below this.
  std::uint32_t rotation = 0;          ///< Which lane a small part starts at and who gets the odd unit: spreads load.
};

/// Weights as integers in the same proportions, so that what is computed from them is the same on every machine and
/// with every compiler. Their sum is below 2^62, so its product with any 64-bit count fits 128 bits with room for one
/// addition. Throws Error(kInvalidArgument) for weights that are negative or not finite, or all 0.
std::vector<std::uint64_t> whole_weights(std::span<const double> weights);

/// One range a lane, in lane order (empty for a lane with no share); together they cover every byte exactly once.
/// Every share is within one alignment unit of the ideal where min_shard_bytes does not bind. Throws Error for no
/// weights, a negative or non-finite weight, or an alignment of 0.
std::vector<ByteRange> make_shard_plan(const ShardPlanInput& input);

/// Weights for n worker hosts and k dedicated server hosts on equal links: loads that finish
/// together. `own_host` is 0 where k >= n. n = 1 gives everything to the dedicated servers, or, where k = 0,
/// to the host itself.
struct PlacementWeights {
  double dedicated = 0;  ///< Share of each dedicated server.
  double own_host = 0;   ///< Share of the server embedded on each worker host.
};
PlacementWeights placement_weights(std::uint32_t worker_hosts, std::uint32_t dedicated_hosts);

/// Cuts a range into chunks of at most chunk_bytes; chunk i starts at offset + i * chunk_bytes.
std::uint32_t chunk_count(std::uint64_t bytes, std::uint32_t chunk_bytes);
ByteRange chunk_range(ByteRange shard, std::uint32_t chunk_bytes, std::uint32_t chunk);

/// Splits `count` consecutive things among `ways` owners: owner i has [first, first + count), sizes differ by at most
/// one.
struct IndexRange {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  friend bool operator==(const IndexRange&, const IndexRange&) = default;
};
IndexRange split_evenly(std::uint32_t count, std::uint32_t ways, std::uint32_t owner);

}  // namespace herring
