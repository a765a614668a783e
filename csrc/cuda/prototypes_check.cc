// Where CUDA's own header is there, it must say what prototypes.h says.
#include "cuda/prototypes.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

#include <type_traits>

#include "cuda/same_shape.h"

namespace herring::cuda {
namespace {

static_assert(sizeof(CUresult) == sizeof(Result) && sizeof(CUdevice) == sizeof(DeviceNumber));
static_assert(sizeof(CUdeviceptr) == sizeof(DevicePointer));
#define HERRING_CUDA_CHECK(member, name, ...) \
  static_assert(kSameShape<Api::member##_type, std::remove_pointer_t<decltype(&::name)>>, #name);
HERRING_CUDA_FUNCTIONS(HERRING_CUDA_CHECK)
#undef HERRING_CUDA_CHECK

static_assert(sizeof(CUmemGenericAllocationHandle) == sizeof(MemoryHandle));
static_assert(sizeof(CUmemAllocationProp) == sizeof(MemoryKind) && sizeof(CUmemAccessDesc) == sizeof(MemoryAccess));
static_assert(offsetof(CUmemAllocationProp, location) == offsetof(MemoryKind, location));
static_assert(offsetof(CUmemAllocationProp, requestedHandleTypes) == offsetof(MemoryKind, handle_types));
static_assert(CU_MEM_ALLOCATION_TYPE_PINNED == kMemoryPinned && CU_MEM_LOCATION_TYPE_DEVICE == kLocationDevice);
static_assert(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR == kHandleDescriptor);
static_assert(CU_MEM_ACCESS_FLAGS_PROT_READWRITE == kAccessReadWrite);
static_assert(CU_MEM_ALLOC_GRANULARITY_MINIMUM == kGranularityMinimum);
static_assert(CUDA_ERROR_INVALID_VALUE == kInvalidValue && CUDA_ERROR_OUT_OF_MEMORY == kOutOfMemory);
static_assert(CUDA_ERROR_NOT_INITIALIZED == kNotInitialized && CUDA_ERROR_DEINITIALIZED == kDeinitialized);
static_assert(CUDA_ERROR_DEVICE_UNAVAILABLE == kDeviceUnavailable && CUDA_ERROR_NO_DEVICE == kNoDevice);
static_assert(CUDA_ERROR_INVALID_DEVICE == kInvalidDevice && CUDA_ERROR_ECC_UNCORRECTABLE == kEccUncorrectable);
static_assert(CUDA_ERROR_NVLINK_UNCORRECTABLE == kNvlinkUncorrectable);
static_assert(CUDA_ERROR_OPERATING_SYSTEM == kOperatingSystem && CUDA_ERROR_NOT_READY == kNotReady);
static_assert(CUDA_ERROR_ILLEGAL_ADDRESS == kIllegalAddress && CUDA_ERROR_LAUNCH_TIMEOUT == kLaunchTimeout);
static_assert(CUDA_ERROR_CONTEXT_IS_DESTROYED == kContextIsDestroyed && CUDA_ERROR_ASSERT == kAssert);
static_assert(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED == kHostMemoryAlreadyRegistered);
static_assert(CUDA_ERROR_HARDWARE_STACK_ERROR == kHardwareStackError);
static_assert(CUDA_ERROR_ILLEGAL_INSTRUCTION == kIllegalInstruction);
static_assert(CUDA_ERROR_MISALIGNED_ADDRESS == kMisalignedAddress);
static_assert(CUDA_ERROR_INVALID_ADDRESS_SPACE == kInvalidAddressSpace && CUDA_ERROR_INVALID_PC == kInvalidPc);
static_assert(CUDA_ERROR_LAUNCH_FAILED == kLaunchFailed && CUDA_ERROR_NOT_SUPPORTED == kNotSupported);
static_assert(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH == kSystemDriverMismatch && CUDA_ERROR_UNKNOWN == kUnknown);
static_assert(CU_STREAM_NON_BLOCKING == kStreamNonBlocking && CU_EVENT_DISABLE_TIMING == kEventDisableTiming);
static_assert(CU_MEMHOSTREGISTER_PORTABLE == kHostRegisterPortable);
static_assert(CU_STREAM_CAPTURE_MODE_RELAXED == kCaptureModeRelaxed && CU_STREAM_CAPTURE_STATUS_NONE == kCaptureNone);
static_assert(CU_POINTER_ATTRIBUTE_MEMORY_TYPE == kPointerMemoryType);
static_assert(CU_POINTER_ATTRIBUTE_IS_MANAGED == kPointerIsManaged);
static_assert(CU_MEMORYTYPE_HOST == kMemoryTypeHost && CU_MEMORYTYPE_DEVICE == kMemoryTypeDevice);
static_assert(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == kAttributeMultiprocessors);
static_assert(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT == kAttributeAsyncEngines);
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == kAttributeMajor);
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == kAttributeMinor);

}  // namespace
}  // namespace herring::cuda
#endif
