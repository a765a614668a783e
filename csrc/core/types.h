#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace herring {

/// A point on the monotonic clock. Engines receive it as an argument and never read a clock themselves, so that the
/// simulator can run them under virtual time.
using Instant = std::chrono::steady_clock::time_point;
using Duration = std::chrono::nanoseconds;

/// A number that names one kind of thing. Different kinds do not convert into each other or into integers.
template <class Kind>
struct Id {
  std::uint32_t value = 0;
  friend constexpr auto operator<=>(Id, Id) = default;
};

/// Rank of a training process in the job, 0 .. workers-1.
using WorkerRank = Id<struct WorkerRankKind>;
/// Rank of a server in the job, 0 .. servers-1.
using ServerRank = Id<struct ServerRankKind>;
/// Position of a lane in the shard plan, 0 .. lanes-1, the same on every process.
using LaneId = Id<struct LaneKind>;
/// A data-plane endpoint: workers come first (PeerId{w} is worker w), then the lanes (PeerId{workers + lane}).
using PeerId = Id<struct PeerKind>;
/// Stands for whoever it may be.
inline constexpr PeerId kAnyPeer{0xFFFF'FFFF};
/// A process group. Group 0 is the whole job.
using GroupId = Id<struct GroupKind>;
/// A membership version.
using Epoch = Id<struct EpochKind>;

/// Matches a send with the receive posted for it. Chosen by the receiver, echoed by the sender.
struct Tag {
  std::uint64_t value = 0;
  friend constexpr auto operator<=>(Tag, Tag) = default;
};

/// Where control messages (all but Push, Result and Data) arrive: every endpoint keeps a bounded pool of receives
/// posted on it, each as good as the other. No other tag has the top bit set.
inline constexpr Tag kControlTag{0x8000'0000'0000'0001ull};

/// Names one posted send or receive in its completion. Chosen by whoever posts it.
struct Token {
  std::uint64_t value = 0;
  friend constexpr auto operator<=>(Token, Token) = default;
};

/// Element types on the wire. Numbers are part of the wire format and are never reused.
enum class DataType : std::uint8_t {
  kFloat32 = 1,
  kFloat64 = 2,
  kFloat16 = 3,
  kBFloat16 = 4,
  kInt8 = 5,
  kInt16 = 6,
  kInt32 = 7,
  kInt64 = 8,
  kUInt8 = 9,
  kBool = 10,
};

/// Reduction operators on the wire. kAverage is a sum divided once, at the end, by the number of ranks.
enum class ReduceOp : std::uint8_t {
  kSum = 1,
  kAverage = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
  kBand = 6,
  kBor = 7,
  kBxor = 8,
};

/// What a group of ranks does together. Numbers are part of the wire format.
enum class Collective : std::uint8_t {
  kAllReduce = 1,
  kBroadcast = 2,
  kAllGather = 3,
  kBarrier = 4,
  // Made of messages. As operations they have no bytes: they say what a rank is doing.
  kGather = 5,
  kScatter = 6,
  kAllToAll = 7,
  kUnevenAllGather = 8,  ///< Every rank brings as much as it likes.
  // Carried out as kAllReduce; what nobody wants of the result is dropped by its caller.
  kReduce = 9,
  kReduceScatter = 10,
};

/// The number names one of them.
constexpr bool is_known(Collective collective) noexcept {
  return collective >= Collective::kAllReduce && collective <= Collective::kReduceScatter;
}

/// Size of one element in bytes; 0 for a number that names no type.
std::size_t element_bytes(DataType dtype) noexcept;
/// "float32", "sum", "all_reduce", ...; "unknown" for a number that names nothing.
std::string_view name(DataType dtype) noexcept;
std::string_view name(ReduceOp op) noexcept;
std::string_view name(Collective collective) noexcept;

}  // namespace herring

template <class Kind>
struct std::hash<herring::Id<Kind>> {
  std::size_t operator()(herring::Id<Kind> id) const noexcept { return std::hash<std::uint32_t>{}(id.value); }
};
