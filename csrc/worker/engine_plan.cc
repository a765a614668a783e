#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "worker/engine_impl.h"

namespace herring::worker {
namespace {

/// The same on every process, unlike std::hash.
std::uint64_t mix(std::uint64_t value) {
  value ^= value >> 30;
  value *= 0xBF58476D1CE4E5B9ull;
  value ^= value >> 27;
  value *= 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

std::uint32_t rail_of(const EngineConfig& config, std::uint32_t lane) {
  return config.lane_rails.empty() ? 0 : config.lane_rails[lane];
}

bool has_rail(std::uint64_t rails, std::uint32_t rail) { return rails == kEveryRail || (rails >> rail & 1) != 0; }

bool takes_part(const EngineConfig& config, std::uint32_t lane, std::uint64_t rails) {
  return has_rail(rails, rail_of(config, lane));
}

/// A rail's number among those that take part, and how many do.
struct RailAmong {
  std::uint32_t index = 0;
  std::uint32_t count = 1;
};

RailAmong rail_among(const EngineConfig& config, std::uint32_t lane, std::uint64_t rails) {
  const std::uint32_t rail = rail_of(config, lane);
  if (rails == kEveryRail || config.rails == 1) return {rail, config.rails};
  const std::uint64_t before = (std::uint64_t{1} << rail) - 1;
  return {static_cast<std::uint32_t>(std::popcount(rails & before)), static_cast<std::uint32_t>(std::popcount(rails))};
}

/// first, first + step, ...: so many of a contributor's processes share out a lane's shard.
struct Owners {
  std::uint32_t first = 0;
  std::uint32_t step = 1;
  std::uint32_t count = 1;
};

Owners owners_of(const EngineConfig& config, std::uint32_t lane, std::uint64_t rails, std::uint32_t owner_count) {
  const RailAmong rail = rail_among(config, lane, rails);
  // A rail that nobody is on: somebody looks after it.
  if (rail.index >= owner_count) return {rail.index % owner_count, rail.count, 1};
  return {rail.index, rail.count, (owner_count - rail.index - 1) / rail.count + 1};
}

std::uint64_t hash_op(const OpKey& key) { return mix(mix(key.op + 0x9E3779B97F4A7C15ull) + key.group.value); }

}  // namespace

std::uint64_t heir_seed(const OpKey& key) { return mix(hash_op(key) + key.part) >> 16; }

std::uint32_t home_lane(const EngineConfig& config, const OpKey& key, std::uint64_t rails) {
  const auto lanes = static_cast<std::uint32_t>(config.lanes.size());
  if (rails == kEveryRail) return static_cast<std::uint32_t>(hash_op(key) % lanes);
  std::uint64_t count = 0;
  for (std::uint32_t lane = 0; lane < lanes; ++lane) count += takes_part(config, lane, rails) ? 1 : 0;
  std::uint64_t left = hash_op(key) % count;
  std::uint32_t lane = 0;
  while (!takes_part(config, lane, rails) || left-- > 0) ++lane;
  return lane;
}

bool are_on_one_rail(const EngineConfig& config, std::uint32_t lane, std::uint32_t other) {
  return rail_of(config, lane) == rail_of(config, other);
}

bool goes_in_one_hop(const EngineConfig& config, const Operation& operation) {
  const OpDescriptor& descriptor = operation.descriptor;
  if (operation.one_hop_bytes == 0 || operation.is_join || !operation.roster.empty()) return false;
  if (operation.contributor_count != config.lanes.size() / config.rails) return false;
  // Several owners hear from one lane alone that all have come, where nobody has anything.
  if (is_empty(operation) && operation.owner_count > 1) return false;
  if (descriptor.op_bytes > operation.one_hop_bytes) return false;
  if (is_small(config, descriptor.part_bytes)) return true;
  // What two hops can send with the announces takes no longer there.
  return reduces(descriptor.collective) &&
         descriptor.part_bytes > config.lanes.size() * std::uint64_t{config.max_eager_bytes};
}

std::uint32_t run_of(std::uint64_t said) {
  return said > 1 && said <= wire::kMaxRun ? static_cast<std::uint32_t>(said) : 0;
}

void add_bitmap(std::vector<std::byte>& out, const std::vector<bool>& bits) {
  const std::size_t start = out.size();
  out.resize(start + (bits.size() + 7) / 8);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) out[start + i / 8] |= static_cast<std::byte>(1u << (i % 8));
  }
}

bool is_small(const EngineConfig& config, std::uint64_t shard_bytes) { return shard_bytes <= config.max_eager_bytes; }

namespace {

/// In one hop: all lanes of a rail have the same. What is small goes on one rail, the rest on all.
std::vector<ByteRange> plan_one_hop(const EngineConfig& config, const Operation& operation) {
  const std::uint64_t bytes = operation.descriptor.part_bytes;
  const std::uint32_t home = rail_of(config, home_lane(config, operation.key, operation.rails));
  std::vector<ByteRange> of_rails(config.rails);
  if (config.rails == 1 || is_small(config, bytes)) {
    of_rails[home].bytes = bytes;
  } else {
    ShardPlanInput input;
    input.total_bytes = bytes;
    std::vector<double> weights(config.rails);
    for (std::uint32_t rail = 0; rail < config.rails; ++rail) weights[rail] = has_rail(operation.rails, rail) ? 1 : 0;
    input.weights = weights;
    input.min_shard_bytes = config.min_shard_bytes;
    input.rotation = home;
    of_rails = make_shard_plan(input);
    // All meet on the home rail. Its lanes end with the results that they send, so they have some.
    if (of_rails[home].bytes == 0) {
      of_rails.assign(config.rails, ByteRange{});
      of_rails[home].bytes = bytes;
    }
  }
  std::vector<ByteRange> plan(config.lanes.size());
  for (std::uint32_t lane = 0; lane < plan.size(); ++lane) plan[lane] = of_rails[rail_of(config, lane)];
  return plan;
}

}  // namespace

std::vector<ByteRange> plan_part(const EngineConfig& config, const Operation& operation) {
  const OpKey& key = operation.key;
  const std::uint64_t part_bytes = operation.descriptor.part_bytes;
  const std::uint64_t rails = operation.rails;
  if (goes_in_one_hop(config, operation)) return plan_one_hop(config, operation);
  std::vector<double> of_rails;
  ShardPlanInput input;
  input.total_bytes = part_bytes;
  input.weights = config.lane_weights;
  if (rails != kEveryRail) {
    of_rails = config.lane_weights;
    for (std::uint32_t lane = 0; lane < of_rails.size(); ++lane) {
      if (!takes_part(config, lane, rails)) of_rails[lane] = 0;
    }
    input.weights = of_rails;
  }
  input.min_shard_bytes = config.min_shard_bytes;
  // A small part starts at another lane for each operation, so that small operations spread; the first one at the lane
  // where all meet anyway.
  input.rotation =
      key.part == 0 ? home_lane(config, key, rails) : static_cast<std::uint32_t>(mix(hash_op(key) + key.part) >> 32);
  return make_shard_plan(input);
}

std::uint32_t announcers_of(const EngineConfig& config, std::uint32_t lane, std::uint32_t chunks,
                            const Operation& operation) {
  if (is_empty(operation)) return operation.owner_count;
  return std::clamp(chunks, 1u, owners_of(config, lane, operation.rails, operation.owner_count).count);
}

IndexRange owned_chunks(const EngineConfig& config, std::uint32_t lane, std::uint32_t chunks,
                        const Operation& operation) {
  const Owners owners = owners_of(config, lane, operation.rails, operation.owner_count);
  if (operation.owner < owners.first || (operation.owner - owners.first) % owners.step != 0) return {};
  const std::uint32_t place = (operation.owner - owners.first) / owners.step;
  return place < owners.count ? split_evenly(chunks, owners.count, place) : IndexRange{};
}

std::vector<std::vector<ByteRange>> owned_ranges(const EngineConfig& config, const Operation& operation) {
  const std::uint64_t rails = operation.rails;
  const std::uint32_t owner_count = operation.owner_count;
  std::vector<std::vector<ByteRange>> ranges(owner_count);
  const std::vector<ByteRange> plan = plan_part(config, operation);
  const bool is_one_hop = goes_in_one_hop(config, operation);
  std::uint64_t seen = 0;  // Rails, in one hop: all of their lanes have the same.
  for (std::uint32_t lane = 0; lane < plan.size(); ++lane) {
    const std::uint64_t rail = std::uint64_t{1} << rail_of(config, lane);
    if (is_one_hop && (std::exchange(seen, seen | rail) & rail) != 0) continue;
    const ByteRange& shard = plan[lane];
    const std::uint32_t chunks = chunk_count(shard.bytes, config.chunk_bytes);
    const Owners owners = owners_of(config, lane, rails, owner_count);
    for (std::uint32_t place = 0; place < std::min(owners.count, chunks); ++place) {
      const IndexRange owned = split_evenly(chunks, owners.count, place);
      const ByteRange first = chunk_range(shard, config.chunk_bytes, owned.first);
      const ByteRange last = chunk_range(shard, config.chunk_bytes, owned.first + owned.count - 1);
      ranges[owners.first + place * owners.step].push_back({first.offset, last.offset + last.bytes - first.offset});
    }
  }
  return ranges;
}

Status check_operation(const EngineConfig& config, const Operation& operation) {
  const auto wrong = [&](const std::string& what) {
    return Status(Code::kInvalidArgument,
                  to_string(operation.descriptor) + " of rank " + std::to_string(config.self.value) + ": " + what);
  };
  if (operation.memory.size() != operation.descriptor.part_bytes) {
    return wrong("the memory has " + std::to_string(operation.memory.size()) + " bytes, the part " +
                 std::to_string(operation.descriptor.part_bytes));
  }
  if (operation.is_on_device) {
    const bool has_results = operation.results.size() == (config.failover ? operation.memory.size() : 0);
    const bool is_plain = operation.descriptor.collective == Collective::kAllReduce && !operation.is_join &&
                          operation.roster.empty() && config.near_lanes.empty() && operation.one_hop_bytes == 0 &&
                          !config.sealed_sends;
    if (!is_plain || !has_results) {
      return wrong("memory of a device in an operation that cannot take it");
    }
  }
  if (operation.descriptor.part_bytes > operation.descriptor.op_bytes) {
    return wrong("a part of " + std::to_string(operation.descriptor.part_bytes) + " bytes in an operation of " +
                 std::to_string(operation.descriptor.op_bytes));
  }
  if (operation.contributor >= operation.contributor_count) {
    return wrong("contributor " + std::to_string(operation.contributor) + " of " +
                 std::to_string(operation.contributor_count));
  }
  if (operation.owner >= operation.owner_count) {
    return wrong("owner " + std::to_string(operation.owner) + " of " + std::to_string(operation.owner_count));
  }
  if (operation.is_join && (operation.descriptor.part_bytes != 0 || operation.key.part != 0 ||
                            operation.owner_count != 1 || !operation.roster.empty())) {
    return wrong("joins with data");
  }
  if (!operation.roster.empty() &&
      (operation.owner_count != 1 || !is_sane(operation.roster, operation.contributor_count))) {
    return wrong("a roster of contributors that do not exist");
  }
  const bool is_large = !is_small(config, operation.descriptor.part_bytes);
  if (is_large && operation.owner_count > config.rails && goes_in_one_hop(config, operation)) {
    return wrong("in one hop, but not every owner has a lane in its process");
  }
  bool has_lane = false;
  for (std::uint32_t lane = 0; lane < config.lanes.size(); ++lane) {
    has_lane = has_lane || takes_part(config, lane, operation.rails);
  }
  if (!has_lane) return wrong("no lane is on the rails that take part");
  if (has_one_pusher(operation.descriptor.collective)) {
    const std::uint32_t pusher = operation.pusher == kPusherIsRoot ? operation.descriptor.root : operation.pusher;
    if (pusher >= operation.contributor_count) {
      return wrong("root " + std::to_string(pusher) + " is not one of the " +
                   std::to_string(operation.contributor_count) + " members of the group");
    }
  }
  return Status::ok();
}

}  // namespace herring::worker
