#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "engines/plan.h"

/// Random jobs for the seeded schedules: sizes, settings, operations, and who submits what when.
namespace herring::testing {

inline ClusterOptions random_options(Random& random, std::uint64_t seed) {
  ClusterOptions options;
  options.seed = seed;
  options.workers = static_cast<std::uint32_t>(pick(random, 1, 8));
  options.lanes = static_cast<std::uint32_t>(pick(random, 1, 8));
  const std::uint32_t chunks[] = {64, 128, 256, 1024, 4096, 65536};
  options.chunk_bytes = chunks[pick(random, 0, 5)];
  options.window = static_cast<std::uint32_t>(pick(random, 1, 8));
  if (chance(random, 0.5)) options.max_window = options.window * static_cast<std::uint32_t>(pick(random, 1, 3));
  // Often one slot for each worker, the least that is allowed.
  options.slots = options.workers * static_cast<std::uint32_t>(chance(random, 0.5) ? 1 : pick(random, 1, 4)) +
                  static_cast<std::uint32_t>(pick(random, 0, 2));
  // Not drawn: what else a seed stands for stays as it was.
  options.max_run = 1u << (seed / 4 % 4);
  if (options.max_run > 1 && seed / 16 % 2 == 0) {
    options.slots =
        std::max(options.slots, options.workers * options.max_run * 3 + static_cast<std::uint32_t>(seed % 7));
    options.window = std::max(options.window, 2 * options.max_run);
  }
  options.are_lanes_apart = seed / 2 % 3 > 0;
  options.near = seed / 7 % 2 == 1;
  options.rails = std::min(static_cast<std::uint32_t>(seed / 3 % 4 + 1), options.lanes);
  const std::uint32_t eager[] = {0, 0, 64, 300, 2048};
  options.max_eager_bytes = eager[pick(random, 0, 4)];
  options.eager_window = static_cast<std::uint32_t>(pick(random, 0, 3));
  const std::uint32_t credits[] = {0, 1, 2, 3, 8};
  options.announce_credits = credits[pick(random, 0, 4)];
  options.min_shard_bytes = chance(random, 0.5) ? 0 : pick(random, 1, 4) * options.chunk_bytes / 2;
  if (chance(random, 0.4)) {
    for (std::uint32_t i = 0; i < options.lanes; ++i)
      options.weights.push_back(static_cast<double>(pick(random, 0, 3)));
    options.weights[pick(random, 0, options.lanes - 1)] = 1;  // Not all of them zero.
  }
  // Often: it takes a lane in each worker.
  if (seed / 5 % 3 == 0 && options.workers > 1) {
    options.near = true;
    options.lanes = options.workers;
    options.weights.clear();
    options.rails = options.workers % 2 == 0 && seed / 15 % 2 == 0 ? 2 : 1;
    options.one_hop_bytes = std::min<std::uint64_t>(12 * options.chunk_bytes, 64u << (seed / 30 % 8));
  }
  options.sim.max_delay = std::chrono::microseconds(pick(random, 5, 200));
  if (chance(random, 0.4)) options.sim.straggler_chance = 0.05;
  // Long enough that chunks wait, and windows become small.
  if (seed / 8 % 3 == 0) {
    options.sim.max_delay *= 10;
    options.sim.straggler_chance = 0;
    options.is_one_by_one = seed / 24 % 2 == 0;
  }
  if (chance(random, 0.2)) options.sim.again_chance = 0.05;
  if (chance(random, 0.2)) options.sim.max_sends = pick(random, 1, 8);
  if (chance(random, 0.2)) options.sim.uplink_bytes_per_second = options.sim.downlink_bytes_per_second = 1e8;
  options.sim.buffered_chance = static_cast<double>(pick(random, 0, 4)) / 4;
  if (options.seed / 2 % 2 == 1) options.sim.slow_cancel_chance = 0.5;
  return options;
}

/// Some workers in some order; the whole job for group 0.
inline std::vector<std::uint32_t> random_group(Random& random, std::uint32_t workers, std::uint32_t id) {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < workers; ++rank) {
    if (id == 0 || chance(random, 0.6)) ranks.push_back(rank);
  }
  if (ranks.empty()) ranks.push_back(static_cast<std::uint32_t>(pick(random, 0, workers - 1)));
  return ranks;
}

inline std::uint64_t random_elements_count(Random& random, const ClusterOptions& options) {
  const std::uint64_t kind = pick(random, 0, 9);
  if (kind == 0) return 0;
  if (kind <= 3) return pick(random, 1, 40);
  const std::uint64_t chunks = kind <= 7 ? 6 : 30;
  return pick(random, 1, std::min<std::uint64_t>(options.chunk_bytes * chunks / 4, 50'000));
}

inline TestOp random_op(Random& random, const ClusterOptions& options, std::uint32_t group,
                        std::vector<std::uint32_t> ranks, std::uint64_t number) {
  TestOp op;
  op.ranks = std::move(ranks);
  // Two processes for each contributor, as two ranks of each host.
  if (op.ranks.size() % 2 == 0 && chance(random, 0.25)) op.owners = 2;
  op.key = {GroupId{group}, number, static_cast<std::uint32_t>(pick(random, 0, 2))};
  if (options.rails > 1 && !options.failover && options.weights.empty() && number % 2 == 0) {
    op.rails = 1 + (options.seed + number) % ((1u << options.rails) - 1);
  }
  const bool has_lanes = op.ranks.size() == options.workers && op.owners == options.rails;
  if (has_lanes && !options.failover) op.one_hop_bytes = options.one_hop_bytes;
  if (op.one_hop_bytes > 0) op.rails = worker::kEveryRail;
  const std::uint64_t kind = pick(random, 0, 9);
  if (kind == 0) {
    op.descriptor.collective = Collective::kBarrier;
  } else {
    set_size(op.descriptor, chance(random, 0.8) ? DataType::kFloat32 : DataType::kUInt8,
             random_elements_count(random, options));
    op.descriptor.op_bytes += pick(random, 0, 3) * 1000;  // This part is one of several.
    if (op.one_hop_bytes > 0 && number % 3 != 0) {
      set_size(op.descriptor, op.descriptor.dtype,
               random_elements_count(random, options) % (options.one_hop_bytes / 4) + 1);
      // One of several parts, which all go so, or none.
      if (number % 3 == 2) op.descriptor.op_bytes += 4 * pick(random, 0, options.one_hop_bytes / 8);
    }
    if (kind <= 2) op.descriptor.collective = kind == 1 ? Collective::kBroadcast : Collective::kAllGather;
    if (kind <= 2) op.descriptor.root = static_cast<std::uint32_t>(pick(random, 0, op.contributors() - 1));
    if (kind == 3 && op.descriptor.dtype == DataType::kFloat32) {
      op.descriptor.reduce = ReduceOp::kAverage;
      op.average_over = static_cast<std::uint32_t>(op.ranks.size());
    }
  }
  return op;
}

struct Submission {
  Instant when;
  std::size_t op = 0;
  std::size_t index = 0;
};

inline std::vector<TestOp> random_ops(Random& random, const Cluster& cluster) {
  const ClusterOptions& options = cluster.options();
  std::vector<std::vector<std::uint32_t>> groups;
  for (std::uint32_t id = 0; id < 3; ++id) groups.push_back(random_group(random, options.workers, id));
  std::vector<TestOp> ops;
  const std::uint64_t count = pick(random, 1, 6);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto group = static_cast<std::uint32_t>(chance(random, 0.6) ? 0 : pick(random, 1, 2));
    ops.push_back(random_op(random, options, group, groups[group], i));
    fill(ops.back(), random, cluster.worker_config(0));
  }
  return ops;
}

/// In some jobs the memory of some workers is a device's, beside that of others. After fill(); not drawn either.
inline void put_on_devices(TestOp& op, const ClusterOptions& options) {
  const bool may_be = !options.near && !options.checksum && options.one_hop_bytes == 0 && options.seed / 3 % 2 == 0;
  const bool is_plain = op.descriptor.collective == Collective::kAllReduce && op.descriptor.part_bytes > 0;
  op.on_device.assign(op.ranks.size(), false);
  op.results.clear();
  for (std::size_t index = 0; may_be && is_plain && index < op.ranks.size(); ++index) {
    op.on_device[index] = (options.seed + op.key.op + index) % 3 != 0;
  }
  if (options.failover) op.results = op.memory;
}

/// Each worker submits its operations in an order and at times of its own.
inline std::vector<Submission> random_order(Random& random, const Cluster& cluster, const std::vector<TestOp>& ops) {
  std::vector<Submission> order;
  const bool together = chance(random, 0.3);
  const Duration apart = cluster.options().is_one_by_one ? 200 * cluster.options().sim.max_delay : Duration{};
  for (std::size_t op = 0; op < ops.size(); ++op) {
    for (std::size_t index = 0; index < ops[op].ranks.size(); ++index) {
      const auto wait = std::chrono::nanoseconds(together ? pick(random, 0, 99) : pick(random, 0, 300'000));
      order.push_back({cluster.now() + static_cast<std::int64_t>(op) * apart + wait, op, index});
    }
  }
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.when < b.when; });
  return order;
}

}  // namespace herring::testing
