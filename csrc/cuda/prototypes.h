#pragma once

#include <cstddef>
#include <cstdint>

/// The part of CUDA's driver interface that Herring calls, so that no CUDA header is needed to build. Where cuda.h is
/// there, prototypes_check.cc compares. Names are those that libcuda.so.1 exports: with their version.
namespace herring::cuda {

using Result = int;                       ///< CUresult
using DeviceNumber = int;                 ///< CUdevice
using DevicePointer = std::uint64_t;      ///< CUdeviceptr
using Context = struct ContextRecord*;    ///< CUcontext
using Stream = struct StreamRecord*;      ///< CUstream
using Event = struct EventRecord*;        ///< CUevent
using Module = struct ModuleRecord*;      ///< CUmodule
using Function = struct FunctionRecord*;  ///< CUfunction
using MemoryHandle = std::uint64_t;       ///< CUmemGenericAllocationHandle

struct MemoryLocation {  ///< CUmemLocation
  int type = 0;
  int id = 0;
};
struct MemoryKind {  ///< CUmemAllocationProp
  int type = 0;
  int handle_types = 0;
  MemoryLocation location;
  void* security = nullptr;
  unsigned char flags[8] = {};
};
struct MemoryAccess {  ///< CUmemAccessDesc
  MemoryLocation location;
  int flags = 0;
};

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kDeviceUnavailable = 46;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kEccUncorrectable = 214;
inline constexpr Result kNvlinkUncorrectable = 220;
inline constexpr Result kOperatingSystem = 304;
inline constexpr Result kNotReady = 600;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kLaunchTimeout = 702;
inline constexpr Result kContextIsDestroyed = 709;
inline constexpr Result kAssert = 710;
inline constexpr Result kHostMemoryAlreadyRegistered = 712;
inline constexpr Result kHardwareStackError = 714;
inline constexpr Result kIllegalInstruction = 715;
inline constexpr Result kMisalignedAddress = 716;
inline constexpr Result kInvalidAddressSpace = 717;
inline constexpr Result kInvalidPc = 718;
inline constexpr Result kLaunchFailed = 719;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kSystemDriverMismatch = 803;
inline constexpr Result kUnknown = 999;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kCaptureNone = 0;
inline constexpr int kPointerMemoryType = 2;
inline constexpr int kPointerIsManaged = 8;
inline constexpr unsigned kMemoryTypeHost = 1;
inline constexpr unsigned kMemoryTypeDevice = 2;
inline constexpr int kMemoryPinned = 1;
inline constexpr int kLocationDevice = 1;
inline constexpr int kHandleDescriptor = 1;  ///< A POSIX file descriptor.
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kGranularityMinimum = 0;
inline constexpr int kAttributeMultiprocessors = 16;
inline constexpr int kAttributeAsyncEngines = 40;
inline constexpr int kAttributeMajor = 75;
inline constexpr int kAttributeMinor = 76;

/// X(member, exported name, type)
#define HERRING_CUDA_FUNCTIONS(X)                                                                         \
  X(init, cuInit, Result(unsigned))                                                                       \
  X(driver_get_version, cuDriverGetVersion, Result(int*))                                                 \
  X(get_error_name, cuGetErrorName, Result(Result, const char**))                                         \
  X(get_error_string, cuGetErrorString, Result(Result, const char**))                                     \
  X(device_get_count, cuDeviceGetCount, Result(int*))                                                     \
  X(device_get, cuDeviceGet, Result(DeviceNumber*, int))                                                  \
  X(device_get_name, cuDeviceGetName, Result(char*, int, DeviceNumber))                                   \
  X(device_get_attribute, cuDeviceGetAttribute, Result(int*, int, DeviceNumber))                          \
  X(device_get_pci_bus_id, cuDeviceGetPCIBusId, Result(char*, int, DeviceNumber))                         \
  X(device_total_mem, cuDeviceTotalMem_v2, Result(std::size_t*, DeviceNumber))                            \
  X(device_can_access_peer, cuDeviceCanAccessPeer, Result(int*, DeviceNumber, DeviceNumber))              \
  X(primary_ctx_retain, cuDevicePrimaryCtxRetain, Result(Context*, DeviceNumber))                         \
  X(primary_ctx_release, cuDevicePrimaryCtxRelease_v2, Result(DeviceNumber))                              \
  X(ctx_push_current, cuCtxPushCurrent_v2, Result(Context))                                               \
  X(ctx_pop_current, cuCtxPopCurrent_v2, Result(Context*))                                                \
  X(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange, Result(int*, int*))                       \
  X(stream_create_with_priority, cuStreamCreateWithPriority, Result(Stream*, unsigned, int))              \
  X(stream_destroy, cuStreamDestroy_v2, Result(Stream))                                                   \
  X(stream_wait_event, cuStreamWaitEvent, Result(Stream, Event, unsigned))                                \
  X(stream_is_capturing, cuStreamIsCapturing, Result(Stream, int*))                                       \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, Result(int*))                               \
  X(event_create, cuEventCreate, Result(Event*, unsigned))                                                \
  X(event_destroy, cuEventDestroy_v2, Result(Event))                                                      \
  X(event_record, cuEventRecord, Result(Event, Stream))                                                   \
  X(event_query, cuEventQuery, Result(Event))                                                             \
  X(mem_alloc, cuMemAlloc_v2, Result(DevicePointer*, std::size_t))                                        \
  X(mem_free, cuMemFree_v2, Result(DevicePointer))                                                        \
  X(mem_granularity, cuMemGetAllocationGranularity, Result(std::size_t*, const MemoryKind*, int))         \
  X(mem_create, cuMemCreate, Result(MemoryHandle*, std::size_t, const MemoryKind*, unsigned long long))   \
  X(mem_handle_release, cuMemRelease, Result(MemoryHandle))                                               \
  X(mem_address_reserve, cuMemAddressReserve,                                                             \
    Result(DevicePointer*, std::size_t, std::size_t, DevicePointer, unsigned long long))                  \
  X(mem_address_free, cuMemAddressFree, Result(DevicePointer, std::size_t))                               \
  X(mem_map, cuMemMap, Result(DevicePointer, std::size_t, std::size_t, MemoryHandle, unsigned long long)) \
  X(mem_unmap, cuMemUnmap, Result(DevicePointer, std::size_t))                                            \
  X(mem_set_access, cuMemSetAccess, Result(DevicePointer, std::size_t, const MemoryAccess*, std::size_t)) \
  X(mem_export, cuMemExportToShareableHandle, Result(void*, MemoryHandle, int, unsigned long long))       \
  X(mem_import, cuMemImportFromShareableHandle, Result(MemoryHandle*, void*, int))                        \
  X(mem_host_register, cuMemHostRegister_v2, Result(void*, std::size_t, unsigned))                        \
  X(mem_host_unregister, cuMemHostUnregister, Result(void*))                                              \
  X(memcpy_htod_async, cuMemcpyHtoDAsync_v2, Result(DevicePointer, const void*, std::size_t, Stream))     \
  X(memcpy_dtoh_async, cuMemcpyDtoHAsync_v2, Result(void*, DevicePointer, std::size_t, Stream))           \
  X(memcpy_dtod_async, cuMemcpyDtoDAsync_v2, Result(DevicePointer, DevicePointer, std::size_t, Stream))   \
  X(pointer_get_attribute, cuPointerGetAttribute, Result(void*, int, DevicePointer))                      \
  X(module_load_data, cuModuleLoadData, Result(Module*, const void*))                                     \
  X(module_unload, cuModuleUnload, Result(Module))                                                        \
  X(module_get_function, cuModuleGetFunction, Result(Function*, Module, const char*))                     \
  X(launch_kernel, cuLaunchKernel,                                                                        \
    Result(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**))

/// The functions, as dlsym found them.
struct Api {
#define HERRING_CUDA_MEMBER(member, name, ...) \
  using member##_type = __VA_ARGS__;           \
  member##_type* member = nullptr;
  HERRING_CUDA_FUNCTIONS(HERRING_CUDA_MEMBER)
#undef HERRING_CUDA_MEMBER
};

}  // namespace herring::cuda
