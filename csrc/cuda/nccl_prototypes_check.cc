// Where NCCL's own header is there, it must say what nccl_prototypes.h says.
#include "cuda/nccl_prototypes.h"

#if __has_include(<cuda_runtime.h>) && __has_include(<nccl.h>)
#include <nccl.h>

#include <type_traits>

#include "cuda/same_shape.h"

namespace herring::cuda {
namespace {

#define HERRING_NCCL_CHECK(member, name, ...) \
  static_assert(kSameShape<NcclApi::member##_type, std::remove_pointer_t<decltype(&::name)>>, #name);
HERRING_NCCL_FUNCTIONS(HERRING_NCCL_CHECK)
#undef HERRING_NCCL_CHECK

static_assert(sizeof(ncclUniqueId) == sizeof(NcclId));
static_assert(ncclSuccess == kNcclSuccess && ncclInProgress == kNcclInProgress);
static_assert(ncclUint8 == kNcclUInt8 && ncclInt32 == kNcclInt32 && ncclInt64 == kNcclInt64);
static_assert(ncclFloat16 == kNcclFloat16 && ncclFloat32 == kNcclFloat32 && ncclFloat64 == kNcclFloat64);
static_assert(ncclBfloat16 == kNcclBFloat16 && ncclSum == kNcclSum && ncclAvg == kNcclAverage);
static_assert(NCCL_VERSION(2, 18, 0) == nccl_version(2, 18, 0));
static_assert(NCCL_CONFIG_UNDEF_INT == NcclConfig::kUnset && NCCL_API_MAGIC == kNcclMagic);
static_assert(sizeof(ncclConfig_t) >= sizeof(NcclConfig));
static_assert(offsetof(ncclConfig_t, size) == offsetof(NcclConfig, size));
static_assert(offsetof(ncclConfig_t, magic) == offsetof(NcclConfig, magic));
static_assert(offsetof(ncclConfig_t, version) == offsetof(NcclConfig, version));
static_assert(offsetof(ncclConfig_t, blocking) == offsetof(NcclConfig, blocking));
static_assert(offsetof(ncclConfig_t, cgaClusterSize) == offsetof(NcclConfig, cga_cluster_size));
static_assert(offsetof(ncclConfig_t, minCTAs) == offsetof(NcclConfig, min_ctas));
static_assert(offsetof(ncclConfig_t, maxCTAs) == offsetof(NcclConfig, max_ctas));
static_assert(offsetof(ncclConfig_t, netName) == offsetof(NcclConfig, net_name));
static_assert(offsetof(ncclConfig_t, splitShare) == offsetof(NcclConfig, split_share));

}  // namespace
}  // namespace herring::cuda
#endif
