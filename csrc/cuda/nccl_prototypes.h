#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

/// The part of NCCL that Herring calls, so that no header of it is needed to build. Where nccl.h is there,
/// nccl_prototypes_check.cc compares.
namespace herring::cuda {

using NcclResult = int;                           ///< ncclResult_t
using NcclCommunicator = struct NcclCommRecord*;  ///< ncclComm_t
using NcclStream = struct NcclStreamRecord*;      ///< cudaStream_t, which is CUstream
using NcclType = int;                             ///< ncclDataType_t
using NcclReduce = int;                           ///< ncclRedOp_t
struct NcclId {                                   ///< ncclUniqueId
  char bytes[128];
};

inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclInProgress = 7;

inline constexpr NcclType kNcclUInt8 = 1;
inline constexpr NcclType kNcclInt32 = 2;
inline constexpr NcclType kNcclInt64 = 4;
inline constexpr NcclType kNcclFloat16 = 6;
inline constexpr NcclType kNcclFloat32 = 7;
inline constexpr NcclType kNcclFloat64 = 8;
inline constexpr NcclType kNcclBFloat16 = 9;

inline constexpr NcclReduce kNcclSum = 0;
inline constexpr NcclReduce kNcclAverage = 4;

/// As NCCL counts versions from 2.9 on.
constexpr int nccl_version(int major, int minor, int patch) { return major * 10000 + minor * 100 + patch; }

inline constexpr unsigned kNcclMagic = 0xcafebeef;

/// ncclConfig_t as it was in NCCL 2.18: later ones only have more behind it, and go by `size` and `version`.
struct NcclConfig {
  static constexpr int kUnset = std::numeric_limits<int>::min();
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = kNcclMagic;
  unsigned version = nccl_version(2, 18, 0);
  int blocking = 0;  ///< Calls return at once: kNcclInProgress.
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
};

/// X(member, exported name, type)
#define HERRING_NCCL_FUNCTIONS(X)                                                                    \
  X(get_version, ncclGetVersion, NcclResult(int*))                                                   \
  X(get_unique_id, ncclGetUniqueId, NcclResult(NcclId*))                                             \
  X(comm_init, ncclCommInitRankConfig, NcclResult(NcclCommunicator*, int, NcclId, int, NcclConfig*)) \
  X(comm_get_async_error, ncclCommGetAsyncError, NcclResult(NcclCommunicator, NcclResult*))          \
  X(comm_finalize, ncclCommFinalize, NcclResult(NcclCommunicator))                                   \
  X(comm_destroy, ncclCommDestroy, NcclResult(NcclCommunicator))                                     \
  X(comm_abort, ncclCommAbort, NcclResult(NcclCommunicator))                                         \
  X(get_error_string, ncclGetErrorString, const char*(NcclResult))                                   \
  X(get_last_error, ncclGetLastError, const char*(NcclCommunicator))                                 \
  X(all_reduce, ncclAllReduce,                                                                       \
    NcclResult(const void*, void*, std::size_t, NcclType, NcclReduce, NcclCommunicator, NcclStream)) \
  X(reduce_scatter, ncclReduceScatter,                                                               \
    NcclResult(const void*, void*, std::size_t, NcclType, NcclReduce, NcclCommunicator, NcclStream)) \
  X(all_gather, ncclAllGather, NcclResult(const void*, void*, std::size_t, NcclType, NcclCommunicator, NcclStream))

/// The functions, as dlsym found them.
struct NcclApi {
#define HERRING_NCCL_MEMBER(member, name, ...) \
  using member##_type = __VA_ARGS__;           \
  member##_type* member = nullptr;
  HERRING_NCCL_FUNCTIONS(HERRING_NCCL_MEMBER)
#undef HERRING_NCCL_MEMBER
};

}  // namespace herring::cuda
