#include "fusion_buffer/shard_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "core/status.h"
#include "fusion_buffer/refuse.h"

namespace herring {
namespace {

__extension__ using Wide = unsigned __int128;

/// Sets to 0 the lanes that a part of this size leaves out, so that no share falls below min_shard_bytes. Takes lanes
/// from rotation % lanes on as long as the smallest ideal share stays large enough.
void keep_few_lanes(const ShardPlanInput& input, std::vector<std::uint64_t>& parts) {
  const Wide unit = input.alignment_bytes;
  // Shares are whole units at least as large as the ideal rounded down, except the last, which ends at total_bytes.
  Wide needed = (input.min_shard_bytes + unit - 1) / unit * unit;
  if (input.total_bytes % input.alignment_bytes != 0) needed += unit;
  const std::size_t lanes = parts.size();
  const std::size_t start = input.rotation % lanes;
  std::uint64_t sum = 0;
  std::uint64_t smallest = std::numeric_limits<std::uint64_t>::max();
  bool full = false;
  for (std::size_t i = 0; i < lanes; ++i) {
    std::uint64_t& part = parts[(start + i) % lanes];
    if (part == 0) continue;
    const std::uint64_t new_sum = sum + part;
    const std::uint64_t new_smallest = std::min(smallest, part);
    // ideal = total * smallest / sum; compared as quotients because needed * sum may not fit.
    full = full || (sum != 0 && Wide{input.total_bytes} * new_smallest / new_sum < needed);
    if (full) {
      part = 0;
      continue;
    }
    sum = new_sum;
    smallest = new_smallest;
  }
}

}  // namespace

// frexp and ldexp are exact.
std::vector<std::uint64_t> whole_weights(std::span<const double> weights) {
  double largest = 0;
  for (std::size_t lane = 0; lane < weights.size(); ++lane) {
    if (!std::isfinite(weights[lane]) || weights[lane] < 0) {
      refuse("shard plan: the weight of lane " + std::to_string(lane) + " is " + std::to_string(weights[lane]) +
             "; weights are finite and >= 0");
    }
    largest = std::max(largest, weights[lane]);
  }
  if (largest == 0) {
    refuse("shard plan: all " + std::to_string(weights.size()) + " lanes have weight 0; at least one must be > 0");
  }
  const int bits = std::min(53, 61 - static_cast<int>(std::bit_width(weights.size())));
  int exponent = 0;
  std::frexp(largest, &exponent);  // largest = f * 2^exponent with f in [0.5, 1).
  std::vector<std::uint64_t> parts;
  parts.reserve(weights.size());
  for (const double weight : weights) parts.push_back(static_cast<std::uint64_t>(std::ldexp(weight, bits - exponent)));
  return parts;
}

std::vector<ByteRange> make_shard_plan(const ShardPlanInput& input) {
  if (input.weights.empty()) refuse("shard plan: no lanes; give one weight for each lane");
  if (input.alignment_bytes == 0) refuse("shard plan: an alignment of 0 bytes; use 1 for none");
  std::vector<std::uint64_t> parts = whole_weights(input.weights);
  if (input.min_shard_bytes > 0) keep_few_lanes(input, parts);
  const std::size_t lanes = parts.size();
  std::uint64_t sum = 0;
  for (const std::uint64_t part : parts) sum += part;

  // Boundary i is the ideal one plus a phase in (0, 1) units, rounded down to a unit. All boundaries have the same
  // phase, so a share differs from its ideal by less than one unit; the phase decides which lanes are rounded up.
  const Wide unit = Wide{sum} * input.alignment_bytes;
  const Wide phase = Wide{sum} * (2 * Wide{input.rotation % lanes} + 1) / (2 * Wide{lanes}) * input.alignment_bytes;
  std::vector<ByteRange> plan(lanes);
  std::uint64_t before = 0;
  std::uint64_t begin = 0;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    before += parts[lane];
    const Wide boundary = (Wide{input.total_bytes} * before + phase) / unit * input.alignment_bytes;
    const bool all = before == sum || boundary >= input.total_bytes;
    const std::uint64_t end = all ? input.total_bytes : static_cast<std::uint64_t>(boundary);
    plan[lane] = {begin, end - begin};
    begin = end;
  }
  return plan;
}

PlacementWeights placement_weights(std::uint32_t worker_hosts, std::uint32_t dedicated_hosts) {
  if (worker_hosts == 0) refuse("placement: 0 worker hosts");
  if (dedicated_hosts >= worker_hosts) return {.dedicated = 1.0 / dedicated_hosts, .own_host = 0};
  const double n = worker_hosts;
  const double k = dedicated_hosts;
  const double denominator = n * n + k * n - 2 * k;
  return {.dedicated = k > 0 ? 2 * (n - 1) / denominator : 0, .own_host = (n - k) / denominator};
}

std::uint32_t chunk_count(std::uint64_t bytes, std::uint32_t chunk_bytes) {
  if (chunk_bytes == 0) refuse("chunks of 0 bytes");
  const std::uint64_t count = bytes / chunk_bytes + (bytes % chunk_bytes != 0 ? 1 : 0);
  if (count > std::numeric_limits<std::uint32_t>::max()) {
    refuse(std::to_string(bytes) + " bytes are too many chunks of " + std::to_string(chunk_bytes) +
           " bytes; use larger chunks");
  }
  return static_cast<std::uint32_t>(count);
}

ByteRange chunk_range(ByteRange shard, std::uint32_t chunk_bytes, std::uint32_t chunk) {
  const std::uint32_t count = chunk_count(shard.bytes, chunk_bytes);
  if (chunk >= count) refuse("chunk " + std::to_string(chunk) + " of a shard of " + std::to_string(count) + " chunks");
  const std::uint64_t start = std::uint64_t{chunk} * chunk_bytes;
  return {shard.offset + start, std::min<std::uint64_t>(chunk_bytes, shard.bytes - start)};
}

IndexRange split_evenly(std::uint32_t count, std::uint32_t ways, std::uint32_t owner) {
  if (owner >= ways) refuse("owner " + std::to_string(owner) + " of " + std::to_string(ways));
  const std::uint32_t each = count / ways;
  const std::uint32_t larger = count % ways;
  return {owner * each + std::min(owner, larger), each + (owner < larger ? 1 : 0)};
}

}  // namespace herring
