// Device memory that several processes have: allocated in whole granules, mapped where each of them likes, exported and
// imported by descriptor.
#include "cuda/device.h"

#include <unistd.h>

#include "cuda/current.h"

namespace herring::cuda {
namespace {

MemoryKind kind_of_shared(DeviceNumber device) {
  MemoryKind kind;
  kind.type = kMemoryPinned;
  kind.handle_types = kHandleDescriptor;
  kind.location = {kLocationDevice, device};
  return kind;
}

}  // namespace

/// A device that works can do without.
Status CudaDevice::or_unavailable(const Status& status) const {
  return health_.is_ok() ? Status(Code::kUnavailable, status.message()) : status;
}

Status CudaDevice::round_up(std::size_t& bytes) {
  const MemoryKind kind = kind_of_shared(device_);
  std::size_t granule = 0;
  const Current in(*this);
  Status status =
      to_status(in([&](const Api& api) { return api.mem_granularity(&granule, &kind, kGranularityMinimum); }),
                "cuMemGetAllocationGranularity", "no memory here can be shared between processes");
  if (status.is_ok()) bytes = (bytes + granule - 1) / granule * granule;
  return status;
}

Status CudaDevice::allocate_shared(std::size_t bytes, DeviceSpan& memory, int& descriptor) {
  if (Status status = ready(); !status.is_ok()) return status;
  std::size_t whole = bytes;
  if (const Status status = round_up(whole); !status.is_ok()) return or_unavailable(status);
  const MemoryKind kind = kind_of_shared(device_);
  const std::string what = "cannot allocate " + std::to_string(bytes) + " bytes of device memory to share";
  const Current in(*this);
  MemoryHandle handle = 0;
  Status status =
      to_status(in([&](const Api& api) { return api.mem_create(&handle, whole, &kind, 0); }), "cuMemCreate", what);
  if (!status.is_ok()) return or_unavailable(status);
  int exported = -1;
  status = to_status(in([&](const Api& api) { return api.mem_export(&exported, handle, kHandleDescriptor, 0); }),
                     "cuMemExportToShareableHandle", what);
  DevicePointer address = 0;
  if (status.is_ok()) status = map_shared(handle, whole, address);
  in([&](const Api& api) { return api.mem_handle_release(handle); });
  if (!status.is_ok()) {
    if (exported >= 0) close(exported);
    return or_unavailable(status);
  }
  memory = {address, bytes};
  descriptor = exported;
  return status;
}

Status CudaDevice::import_shared(int descriptor, std::size_t bytes, DeviceSpan& memory) {
  if (Status status = ready(); !status.is_ok()) return status;
  std::size_t whole = bytes;
  if (const Status status = round_up(whole); !status.is_ok()) return or_unavailable(status);
  const Current in(*this);
  MemoryHandle handle = 0;
  // The driver takes the number of a descriptor in the place of a pointer.
  void* const number = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));
  const Result result = in([&](const Api& api) { return api.mem_import(&handle, number, kHandleDescriptor); });
  // What it says of a descriptor of something else, and the device goes on.
  Status status = to_status(result == kUnknown ? kInvalidValue : result, "cuMemImportFromShareableHandle",
                            "cannot import another process's device memory");
  if (!status.is_ok()) return or_unavailable(status);
  DevicePointer address = 0;
  status = map_shared(handle, whole, address);
  in([&](const Api& api) { return api.mem_handle_release(handle); });
  if (!status.is_ok()) return or_unavailable(status);
  memory = {address, bytes};
  return status;
}

Status CudaDevice::map_shared(MemoryHandle handle, std::size_t bytes, DevicePointer& address) {
  const Current in(*this);
  const MemoryAccess access{{kLocationDevice, device_}, kAccessReadWrite};
  Status status = to_status(in([&](const Api& api) { return api.mem_address_reserve(&address, bytes, 0, 0, 0); }),
                            "cuMemAddressReserve", std::to_string(bytes) + " bytes");
  if (!status.is_ok()) return status;
  status = to_status(in([&](const Api& api) { return api.mem_map(address, bytes, 0, handle, 0); }), "cuMemMap",
                     std::to_string(bytes) + " bytes");
  const bool is_mapped = status.is_ok();
  if (is_mapped) {
    status = to_status(in([&](const Api& api) { return api.mem_set_access(address, bytes, &access, 1); }),
                       "cuMemSetAccess", "this GPU cannot reach the memory");
  }
  if (status.is_ok()) {
    shared_[address] = bytes;
    return status;
  }
  in([&](const Api& api) {
    if (is_mapped) static_cast<void>(api.mem_unmap(address, bytes));
    return api.mem_address_free(address, bytes);
  });
  return status;
}

Status CudaDevice::release_shared(DevicePointer address, std::size_t bytes) {
  const Current in(*this);
  return to_status(in([&](const Api& api) {
                     const Result unmapped = api.mem_unmap(address, bytes);
                     const Result freed = api.mem_address_free(address, bytes);
                     return unmapped != kSuccess ? unmapped : freed;
                   }),
                   "cuMemUnmap");
}

}  // namespace herring::cuda
