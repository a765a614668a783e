#pragma once

// Read by nvcc too: C++17, no header of ours.
#include <cstddef>
#include <cstdint>

/// What the kernels are told. Each kernel takes one block of parameters by value. Addresses are the device's.
namespace herring::cuda {

/// Types as the kernels number them: those of core/types.h (a test compares).
enum class Element : std::uint32_t {
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

/// A run of elements that one block of threads moves. Runs are cut by bytes, not by tensor, so that one large tensor
/// keeps as many blocks busy as many small ones.
struct Tile {
  std::uint64_t source = 0;
  std::uint64_t target = 0;
  std::uint32_t elements = 0;
  std::uint32_t reserved = 0;
};
inline constexpr std::uint32_t kTileBytes = 64 << 10;  ///< Of the larger of source and target.

/// kPack and kUnpack: target = source * scale as target_type, tile by tile. float32, float16 and bfloat16 become each
/// other, computed in float32 and rounded once to nearest even; float64 stays float64; all other types are moved as
/// they are, and so is what is neither scaled nor cast, NaNs with it. A NaN that is scaled or cast becomes the one
/// quiet NaN.
struct PackParameters {
  std::uint64_t tiles = 0;  ///< Tile[tile_count], in device memory.
  std::uint64_t flag = 0;   ///< uint32: set to 1 where a float of the source is NaN or infinite. 0: not looked at.
  double scale = 1;
  std::uint32_t tile_count = 0;
  Element source_type = Element::kFloat32;
  Element target_type = Element::kFloat32;
  std::uint32_t reserved = 0;
};

/// kSum: target = tree over the sources, as server/reduce.h defines it (sum and average), bit for bit. float32,
/// float64, float16, bfloat16, int32, int64: what gradients and counters are. Others are summed on the host.
/// One source without an average is moved as it is.
inline constexpr std::uint32_t kMostSources = 8;
struct SumParameters {
  std::uint64_t sources[kMostSources] = {};
  std::uint64_t target = 0;  ///< May be one of the sources; never overlaps one partly.
  std::uint64_t elements = 0;
  std::uint32_t source_count = 0;
  Element type = Element::kFloat32;
  std::uint32_t average_over = 0;  ///< 0 or 1: a sum.
  std::uint32_t reserved = 0;
};

inline constexpr std::uint32_t kThreads = 256;  ///< Of a block of kPack and kUnpack.
/// Of a block of kSum, which is to have few blocks: as many loads as possible under way in each.
inline constexpr std::uint32_t kSumThreads = 1024;

static_assert(sizeof(Tile) == 24 && sizeof(PackParameters) == 40 && sizeof(SumParameters) == 96);

}  // namespace herring::cuda
