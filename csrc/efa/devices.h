#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

/// Memory of GPUs that the network card reads and writes by itself (GPUDirect RDMA): what libfabric is asked for that
/// is not asked for host memory. Never run on real hardware (docs/adr/0035-gpudirect.md).
namespace herring::efa {

/// Whether the provider was asked for memory of devices, and said yes.
inline bool takes_devices(const fi_info& info) { return (info.caps & FI_HMEM) != 0; }

/// No copy through the host, and no call of CUDA by the provider, which could wait for a kernel that waits for us.
/// Before the endpoint is enabled. 0, or what the provider refuses with; `call` says what. A provider that does not
/// know an option is taken as it is.
int forbid_detours(fid_ep& endpoint, const char*& call);

/// fi_mr_regattr: 0, or a negative fi_errno.
int register_device(fid_domain* domain, std::span<std::byte> memory, std::uint32_t device, std::uint64_t key,
                    fid_mr** region);

}  // namespace herring::efa
