#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engines/cluster.h"
#include "seeds.h"

/// Random operations with their inputs and the results that must come out, computed here and nowhere else.
namespace herring::testing {

using Random = std::mt19937_64;

inline std::uint64_t pick(Random& random, std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
}
inline bool chance(Random& random, double p) { return std::uniform_real_distribution<double>(0, 1)(random) < p; }

/// The naive reference: the balanced binary tree over contributors, one element at a time.
template <class T, class Add>
T tree(const std::vector<T>& values, std::size_t low, std::size_t high, Add add) {
  if (high - low == 1) return values[low];
  std::size_t half = 1;
  while (half * 2 < high - low) half *= 2;
  return add(tree(values, low, low + half, add), tree(values, low + half, high, add));
}

/// One operation of one group as all its processes see it.
struct TestOp {
  std::vector<std::uint32_t> ranks;  ///< Processes, contributor by contributor.
  std::uint32_t owners = 1;          ///< Processes of each contributor.
  OpDescriptor descriptor;
  OpKey key;
  std::uint32_t average_over = 1;
  std::uint64_t rails = worker::kEveryRail;
  std::uint64_t one_hop_bytes = 0;
  Duration timeout = std::chrono::seconds(30);
  std::vector<std::vector<std::byte>> memory;  ///< By index into ranks.
  std::vector<std::vector<std::byte>> expected;
  std::vector<bool> on_device;                  ///< By index into ranks; empty: nobody's memory is a device's.
  std::vector<std::vector<std::byte>> results;  ///< Of those, with failover.

  std::uint32_t contributors() const { return static_cast<std::uint32_t>(ranks.size()) / owners; }

  worker::Operation operation(std::size_t index) {
    worker::Operation operation = shape(index);
    operation.memory = memory[index];
    operation.is_on_device = is_on_device(index);
    if (operation.is_on_device && !results.empty()) operation.results = results[index];
    return operation;
  }

  bool is_on_device(std::size_t index) const { return !on_device.empty() && on_device[index]; }
  std::vector<std::byte>& result(std::size_t index) {
    return is_on_device(index) && !results.empty() ? results[index] : memory[index];
  }

  /// Without its memory.
  worker::Operation shape(std::size_t index) const {
    worker::Operation operation;
    operation.key = key;
    operation.descriptor = descriptor;
    operation.contributor = static_cast<std::uint32_t>(index) / owners;
    operation.contributor_count = contributors();
    operation.first_rank = ranks[index / owners * owners];
    operation.rank_count = owners;
    operation.average_over = average_over;
    operation.owner = static_cast<std::uint32_t>(index) % owners;
    operation.owner_count = owners;
    operation.rails = rails;
    operation.one_hop_bytes = one_hop_bytes;
    operation.timeout = timeout;
    return operation;
  }
};

inline void set_size(OpDescriptor& descriptor, DataType dtype, std::uint64_t elements) {
  descriptor.dtype = dtype;
  descriptor.dims = 1;
  descriptor.shape[0] = elements;
  descriptor.op_bytes = descriptor.part_bytes = elements * element_bytes(dtype);
}

inline std::vector<std::byte> random_elements(Random& random, DataType dtype, std::uint64_t elements) {
  std::vector<std::byte> bytes(elements * element_bytes(dtype));
  if (dtype == DataType::kFloat32) {
    for (std::uint64_t i = 0; i < elements; ++i) {
      // Of very different size, so that another order of summation gives other bits.
      const float value = (static_cast<float>(random() % 20001) - 10000.0f) * (random() % 2 == 0 ? 1.0f : 1.37e-5f);
      std::memcpy(&bytes[i * sizeof value], &value, sizeof value);
    }
  } else {
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  }
  return bytes;
}

template <class T, class Add>
std::vector<std::byte> reduce_reference(const std::vector<std::vector<std::byte>>& inputs, Add add,
                                        std::uint32_t over) {
  std::vector<std::byte> out(inputs.front().size());
  std::vector<T> values(inputs.size());
  for (std::size_t at = 0; at < out.size(); at += sizeof(T)) {
    for (std::size_t k = 0; k < inputs.size(); ++k) std::memcpy(&values[k], &inputs[k][at], sizeof(T));
    T result = tree(values, 0, values.size(), add);
    if (over > 1) result = static_cast<T>(result / static_cast<T>(over));
    std::memcpy(&out[at], &result, sizeof(T));
  }
  return out;
}

/// Fills memory and expected from the descriptor. A process that shares its contributor with others has the
/// contributor's data, and gets results, in its own ranges only; the rest must stay as it is.
inline void fill(TestOp& op, Random& random, const worker::EngineConfig& config) {
  const OpDescriptor& d = op.descriptor;
  const std::uint64_t elements = d.collective == Collective::kBarrier ? 0 : d.part_bytes / element_bytes(d.dtype);
  std::vector<std::vector<std::byte>> inputs;
  for (std::uint32_t c = 0; c < op.contributors(); ++c) inputs.push_back(random_elements(random, d.dtype, elements));
  std::vector<std::byte> result;
  if (d.collective == Collective::kAllReduce) {
    if (d.dtype == DataType::kFloat32) {
      result = reduce_reference<float>(
          inputs, [](float a, float b) { return a + b; }, op.average_over);
    } else {
      const auto add = [](std::uint8_t a, std::uint8_t b) { return static_cast<std::uint8_t>(a + b); };
      result = reduce_reference<std::uint8_t>(inputs, add, 1);
    }
  } else if (d.collective != Collective::kBarrier) {
    result = inputs[d.root];
  }
  op.memory.clear();
  op.expected.clear();
  const auto ranges = worker::owned_ranges(config, op.shape(0));
  for (std::uint32_t i = 0; i < op.ranks.size(); ++i) {
    std::vector<std::byte> before(result.size(), std::byte{0xEE});
    std::vector<std::byte> after = before;
    for (const ByteRange& range : ranges[i % op.owners]) {
      std::memcpy(&before[range.offset], &inputs[i / op.owners][range.offset], range.bytes);
      std::memcpy(&after[range.offset], &result[range.offset], range.bytes);
    }
    op.memory.push_back(std::move(before));
    op.expected.push_back(std::move(after));
  }
  if (!op.results.empty()) op.results = op.memory;
}

}  // namespace herring::testing
