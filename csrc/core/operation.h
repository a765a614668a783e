#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "core/types.h"

namespace herring {

/// Names one piece of one operation, the same on every rank of the group.
/// `op` is the group's sequence number (c10d order) or the hash of a name (Horovod order); its top bit tells which, so
/// the two never meet. `part` numbers the pieces that a large operation is cut into.
struct OpKey {
  GroupId group;
  std::uint64_t op = 0;
  std::uint32_t part = 0;
  friend constexpr auto operator<=>(const OpKey&, const OpKey&) = default;
};

/// Frameworks number their process groups from here; below are the groups of Herring's own API. 0 is the whole job.
inline constexpr std::uint32_t kFirstFrameworkGroup = 1u << 30;
/// What small tensors of a group travel in together is a group too, by this much above it.
inline constexpr std::uint32_t kFirstFusedGroup = 1u << 23;
/// A framework's group whose ranks reduce on their devices has groups of its own, `which` by which: within hosts, and
/// between them. So many, for so many of the framework's groups.
inline constexpr std::uint32_t kFirstPeerGroup = 1u << 31;
inline constexpr std::uint32_t kPeerGroupBits = 14;
constexpr bool has_peer_groups(GroupId group) {
  return group.value >= kFirstFrameworkGroup && group.value - kFirstFrameworkGroup < 1u << (31 - kPeerGroupBits);
}
constexpr GroupId peer_group(GroupId group, std::uint32_t which) {
  return {kFirstPeerGroup + ((group.value - kFirstFrameworkGroup) << kPeerGroupBits) + which};
}
/// The group that a caller knows: itself, or the one that it is made for. Both have the same members.
constexpr GroupId callers_group(GroupId group) {
  if (group.value >= kFirstPeerGroup)
    return {kFirstFrameworkGroup + ((group.value - kFirstPeerGroup) >> kPeerGroupBits)};
  const bool is_fused = group.value >= kFirstFusedGroup && group.value < kFirstFrameworkGroup;
  return is_fused ? GroupId{group.value - kFirstFusedGroup} : group;
}

/// "operation 20 of process group 1 (part 3)", "a named operation"
std::string to_string(const OpKey& key);

inline constexpr std::uint8_t kMaxDims = 8;
/// Set in the entry behind a shape's sizes that is a digest of the list of tensors to which the argument belongs.
inline constexpr std::uint64_t kListDigest = std::uint64_t{1} << 63;

/// What a rank says it is doing. All ranks of the group must say the same, or each gets an error that says who said
/// what (everything here is compared).
struct OpDescriptor {
  Collective collective = Collective::kAllReduce;
  DataType dtype = DataType::kFloat32;
  ReduceOp reduce = ReduceOp::kSum;
  std::uint8_t dims = 0;         ///< Number of used entries of `shape`, at most kMaxDims.
  std::uint32_t root = 0;        ///< Group rank whose data everybody gets (kBroadcast, kAllGather parts), that
                                 ///< gathers or scatters, or that wants the result (kReduce).
  std::uint64_t op_bytes = 0;    ///< Bytes of the whole operation, over all parts.
  std::uint64_t part_bytes = 0;  ///< Bytes of this part.
  std::array<std::uint64_t, kMaxDims> shape{};
  friend bool operator==(const OpDescriptor&, const OpDescriptor&) = default;
};

/// Says the argument's shape, and so its bytes; dtype goes before. More dimensions than are said are folded into the
/// last.
void set_shape(OpDescriptor& descriptor, std::span<const std::int64_t> shape);

/// A rank whose time limit of an operation is this or more lets the others come when they like, so it never stalls.
/// More than any other operation's; on the wire it is the largest number.
inline constexpr Duration kNoHaste = std::chrono::milliseconds(0xFFFF'FFFF);

/// Those that are made of messages: their shapes may differ between ranks and are not said.
constexpr bool is_made_of_messages(Collective collective) noexcept {
  return collective > Collective::kBarrier && collective <= Collective::kUnevenAllGather;
}
/// Every rank's data is reduced with all others'.
constexpr bool reduces(Collective collective) noexcept {
  return collective == Collective::kAllReduce || collective == Collective::kReduce ||
         collective == Collective::kReduceScatter;
}
/// One rank's data is everybody's result.
constexpr bool has_one_pusher(Collective collective) noexcept {
  return collective == Collective::kBroadcast || collective == Collective::kAllGather;
}

/// "all_reduce(float32[3, 4], sum)": what a person reads in a mismatch.
std::string to_string(const OpDescriptor& descriptor);

/// How a chunk is reduced: `average_over` > 1 divides the result once, before it is rounded.
struct ReduceSpec {
  DataType dtype = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::uint32_t average_over = 1;
};

}  // namespace herring

template <>
struct std::hash<herring::OpKey> {
  std::size_t operator()(const herring::OpKey& key) const noexcept {
    std::uint64_t h = key.op * 0x9E3779B97F4A7C15ull;
    h ^= (std::uint64_t{key.group.value} << 32 | key.part) + 0x7F4A7C15ull + (h << 6) + (h >> 2);
    return static_cast<std::size_t>(h * 0xBF58476D1CE4E5B9ull);
  }
};
