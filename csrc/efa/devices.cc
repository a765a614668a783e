#include "efa/devices.h"

#include <rdma/fi_errno.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace herring::efa {
namespace {

/// FI_OPT_CUDA_API_PERMITTED of libfabric 1.18, for which older headers have no name. Numbers are never reused.
constexpr int kCudaApiPermitted = 10;
static_assert(FI_OPT_FI_HMEM_P2P == 8, "the options are numbered from FI_OPT_MIN_MULTI_RECV = 0 on");
#if FI_VERSION_GE(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), FI_VERSION(1, 18))
static_assert(FI_OPT_CUDA_API_PERMITTED == kCudaApiPermitted);
#endif

/// fi_mr_attr grows at its end from release to release (hmem_data, page_size, base_mr, sub_mr_cnt), and the library may
/// be newer than the headers.
struct Attributes {
  fi_mr_attr attr;
  std::array<std::byte, 64> later;
};
static_assert(offsetof(fi_mr_attr, iface) == 64 && offsetof(fi_mr_attr, device) == 72, "as in libfabric 1.17 to 2.5");

bool is_unknown(int result) { return result == -FI_ENOPROTOOPT || result == -FI_ENOSYS; }

}  // namespace

int forbid_detours(fid_ep& endpoint, const char*& call) {
  int required = FI_HMEM_P2P_REQUIRED;
  call = "fi_setopt (FI_OPT_FI_HMEM_P2P: the card has to reach the GPU's memory itself)";
  int result = fi_setopt(&endpoint.fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &required, sizeof(required));
  if (result != 0 && !is_unknown(result)) return result;
  bool permitted = false;
  call = "fi_setopt (FI_OPT_CUDA_API_PERMITTED: the provider would have to copy with CUDA)";
  result = fi_setopt(&endpoint.fid, FI_OPT_ENDPOINT, kCudaApiPermitted, &permitted, sizeof(permitted));
  return is_unknown(result) ? 0 : result;
}

int register_device(fid_domain* domain, std::span<std::byte> memory, std::uint32_t device, std::uint64_t key,
                    fid_mr** region) {
  const iovec span{memory.data(), memory.size()};
  Attributes attributes{};
  fi_mr_attr& attr = attributes.attr;
  attr.mr_iov = &span;
  attr.iov_count = 1;
  attr.access = FI_SEND | FI_RECV;
  attr.requested_key = key;
  attr.iface = FI_HMEM_CUDA;
  attr.device.cuda = static_cast<int>(device);
  return fi_mr_regattr(domain, &attr, 0, region);
}

}  // namespace herring::efa
