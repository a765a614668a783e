// A libcuda.so.1 without a GPU: what Herring calls of the driver, on a FakeGpu. Kernels are the bodies that nvcc
// compiles, called for every thread in turn. Built several times, each with something missing:
//   FAKE_CUDA_VERSION   what cuDriverGetVersion says (12040)
//   FAKE_CUDA_INIT      what cuInit gives (0)
//   FAKE_CUDA_GPUS      how many there are (1); the first two reach each other's memory
//   FAKE_CUDA_LACKS     without cuMemHostRegister_v2
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "cuda/kernels/body.h"
#include "cuda/kernels/twins.h"
#include "cuda/prototypes.h"
#include "device/fake_gpu.h"

#ifndef FAKE_CUDA_VERSION
#define FAKE_CUDA_VERSION 12040
#endif
#ifndef FAKE_CUDA_GPUS
#define FAKE_CUDA_GPUS 1
#endif
#ifndef FAKE_CUDA_INIT
#define FAKE_CUDA_INIT 0
#endif

namespace {

using namespace herring::cuda;
using herring::testing::FakeGpu;

constexpr std::size_t kLimit = 64 << 20;
constexpr std::size_t kGranule = 2 << 20;
constexpr Result kIllegalState = 401;
constexpr Result kNotFound = 500;

/// As the driver: one for the process. HERRING_TEST_SEED is the world's seed, as for all tests.
struct Fake {
  Fake() : gpu({.seed = seed(), .memory_bytes = kLimit, .pin_bytes = kLimit}) {}
  static std::uint64_t seed() {
    const char* const text = std::getenv("HERRING_TEST_SEED");
    return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
  }

  std::recursive_mutex mutex;
  FakeGpu gpu;
  bool is_initialized = false;
  int functions_without_memory = 0;
  int contexts = 0;  ///< How often the primary context was retained.
  std::map<std::thread::id, int> pushed;
  std::map<MemoryHandle, std::pair<int, std::size_t>> memory;  ///< Descriptor and bytes.
  std::map<DevicePointer, std::size_t> reserved;
  std::map<DevicePointer, MemoryHandle> mapped;  ///< Without a right to use it so far, too.
  MemoryHandle last_memory = 0;
  std::vector<std::string> misuse;
};

Fake& fake() {
  static auto* const one = new Fake();
  return *one;
}

/// Every call but a few: initialised, and with a context of this thread.
Result enter(bool needs_context = true) {
  if (!fake().is_initialized) return kNotInitialized;
  if (needs_context && fake().pushed[std::this_thread::get_id()] == 0) {
    fake().misuse.push_back("a call without a context");
    return 201;
  }
  if (fake().gpu.is_broken()) return kIllegalAddress;
  return kSuccess;
}

std::uint64_t id(const void* handle) { return reinterpret_cast<std::uint64_t>(handle); }

std::uint64_t reach(std::uint64_t address, std::size_t bytes) {
  std::byte* const there = fake().gpu.alias(address, bytes);
  if (there == nullptr) fake().gpu.fail();
  return reinterpret_cast<std::uint64_t>(there);
}

template <class Parameters>
void for_every_thread(unsigned blocks, unsigned threads, const Parameters& parameters,
                      void (*body)(const Parameters&, const body::Position&)) {
  for (std::uint32_t block = 0; block < blocks && !fake().gpu.is_broken(); ++block) {
    for (std::uint32_t thread = 0; thread < threads; ++thread) body(parameters, {block, blocks, thread, threads});
  }
}

void run_pack(PackParameters parameters, unsigned blocks, unsigned threads) {
  std::vector<Tile> tiles(parameters.tile_count);
  const std::size_t bytes = tiles.size() * sizeof(Tile);
  const std::uint64_t table = reach(parameters.tiles, bytes);
  if (table == 0) return;
  std::memcpy(tiles.data(), reinterpret_cast<const void*>(table), bytes);
  for (Tile& tile : tiles) {
    tile.source = reach(tile.source, tile.elements * element_bytes(parameters.source_type));
    tile.target = reach(tile.target, tile.elements * element_bytes(parameters.target_type));
  }
  parameters.tiles = reinterpret_cast<std::uint64_t>(tiles.data());
  if (parameters.flag != 0) parameters.flag = reach(parameters.flag, 4);
  for_every_thread(blocks, threads, parameters, body::pack);
}

void run_sum(SumParameters parameters, unsigned blocks, unsigned threads) {
  const std::size_t bytes = parameters.elements * element_bytes(parameters.type);
  for (std::uint32_t i = 0; i < parameters.source_count; ++i) {
    parameters.sources[i] = reach(parameters.sources[i], bytes);
  }
  parameters.target = reach(parameters.target, bytes);
  for_every_thread(blocks, threads, parameters, body::sum);
}

}  // namespace

extern "C" {

using namespace herring::cuda;
using herring::testing::FakeGpu;

#define ENTER(...)                          \
  const std::lock_guard lock(fake().mutex); \
  if (const Result entered = enter(__VA_ARGS__); entered != kSuccess) return entered

Result cuInit(unsigned) {
  if (FAKE_CUDA_INIT == 0) fake().is_initialized = true;
  return FAKE_CUDA_INIT;
}
Result cuDriverGetVersion(int* version) {
  *version = FAKE_CUDA_VERSION;
  return kSuccess;
}
Result cuGetErrorName(Result error, const char** name) {
  static const std::map<Result, const char*> kNames{
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},     {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"}, {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},   {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"}};
  const auto found = kNames.find(error);
  if (found == kNames.end()) return kInvalidValue;
  *name = found->second;
  return kSuccess;
}
Result cuGetErrorString(Result error, const char** text) {
  if (error != kIllegalAddress) return kInvalidValue;
  *text = "an illegal memory access was encountered";
  return kSuccess;
}
Result cuDeviceGetCount(int* count) {
  *count = FAKE_CUDA_GPUS;
  return fake().is_initialized ? kSuccess : kNotInitialized;
}
Result cuDeviceGet(DeviceNumber* device, int number) {
  ENTER(false);
  *device = number;
  return number >= 0 && number < FAKE_CUDA_GPUS ? kSuccess : kInvalidDevice;
}
Result cuDeviceGetName(char* name, int size, DeviceNumber) {
  std::strncpy(name, "Fake GPU", static_cast<std::size_t>(size));
  return kSuccess;
}
Result cuDeviceGetPCIBusId(char* text, int size, DeviceNumber) {
  std::strncpy(text, "0000:0F:00.0", static_cast<std::size_t>(size));
  return kSuccess;
}
Result cuDeviceGetAttribute(int* value, int which, DeviceNumber) {
  *value = which == kAttributeMajor ? 9 : which == kAttributeAsyncEngines ? 2 : which == kAttributeMinor ? 0 : 132;
  return kSuccess;
}
Result cuDeviceCanAccessPeer(int* can, DeviceNumber device, DeviceNumber peer) {
  *can = device < 2 && peer < 2 ? 1 : 0;
  return kSuccess;
}
Result cuDeviceTotalMem_v2(std::size_t* bytes, DeviceNumber) {
  *bytes = kLimit;
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(Context* context, DeviceNumber) {
  ENTER(false);
  ++fake().contexts;
  *context = reinterpret_cast<Context>(&fake());
  return kSuccess;
}
Result cuDevicePrimaryCtxRelease_v2(DeviceNumber) {
  ENTER(false);
  return --fake().contexts >= 0 ? kSuccess : kIllegalState;
}
Result cuCtxPushCurrent_v2(Context) {
  const std::lock_guard lock(fake().mutex);
  ++fake().pushed[std::this_thread::get_id()];
  return fake().contexts > 0 ? kSuccess : kInvalidValue;
}
Result cuCtxPopCurrent_v2(Context* context) {
  const std::lock_guard lock(fake().mutex);
  *context = nullptr;
  return --fake().pushed[std::this_thread::get_id()] >= 0 ? kSuccess : kInvalidValue;
}
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
  ENTER();
  if (flags != kStreamNonBlocking || priority != -5) fake().misuse.push_back("a stream that waits for others");
  *stream = reinterpret_cast<Stream>(fake().gpu.create_stream());
  return kSuccess;
}
Result cuStreamDestroy_v2(Stream stream) {
  ENTER();
  fake().gpu.destroy_stream(id(stream));
  return kSuccess;
}
Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  ENTER();
  if (!fake().gpu.has_event(id(event)) || !fake().gpu.has_stream(id(stream))) return 400;
  fake().gpu.wait(id(stream), id(event));
  return kSuccess;
}
Result cuStreamIsCapturing(Stream stream, int* state) {
  ENTER();
  *state = fake().gpu.is_captured(id(stream)) ? 1 : 0;
  return kSuccess;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int current = 0;
  std::swap(*mode, current);
  return kSuccess;
}

Result cuEventCreate(Event* event, unsigned) {
  ENTER();
  *event = reinterpret_cast<Event>(fake().gpu.create_event());
  return kSuccess;
}
Result cuEventDestroy_v2(Event event) {
  ENTER();
  fake().gpu.destroy_event(id(event));
  return kSuccess;
}
Result cuEventRecord(Event event, Stream stream) {
  ENTER();
  if (!fake().gpu.has_event(id(event)) || !fake().gpu.has_stream(id(stream))) return 400;
  fake().gpu.record(id(event), id(stream));
  return kSuccess;
}
Result cuEventQuery(Event event) {
  ENTER();
  fake().gpu.run_a_little(8);
  if (fake().gpu.is_broken()) return kIllegalAddress;
  return fake().gpu.is_done(id(event)) ? kSuccess : kNotReady;
}

Result cuMemAlloc_v2(DevicePointer* address, std::size_t bytes) {
  ENTER();
  if (bytes == 0) return kInvalidValue;
  *address = fake().gpu.allocate(bytes);
  return *address != 0 ? kSuccess : kOutOfMemory;
}
Result cuMemFree_v2(DevicePointer address) {
  ENTER();
  return fake().gpu.release(address) ? kSuccess : kInvalidValue;
}

Result cuMemGetAllocationGranularity(std::size_t* bytes, const MemoryKind* kind, int) {
  ENTER();
  if (kind->type != kMemoryPinned || kind->handle_types != kHandleDescriptor) return kInvalidValue;
  *bytes = kGranule;
  return kSuccess;
}
Result cuMemCreate(MemoryHandle* handle, std::size_t bytes, const MemoryKind*, unsigned long long) {
  ENTER();
  if (bytes == 0 || bytes % kGranule != 0) return kInvalidValue;
  if (fake().gpu.allocated_bytes() + bytes > kLimit) return kOutOfMemory;
  *handle = ++fake().last_memory;
  fake().memory[*handle] = {FakeGpu::create_file(bytes), bytes};
  return kSuccess;
}
Result cuMemRelease(MemoryHandle handle) {
  ENTER();
  const auto found = fake().memory.find(handle);
  if (found == fake().memory.end()) return kInvalidValue;
  close(found->second.first);
  fake().memory.erase(found);
  return kSuccess;
}
Result cuMemAddressReserve(DevicePointer* address, std::size_t bytes, std::size_t, DevicePointer, unsigned long long) {
  ENTER();
  void* const place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *address = id(place);
  fake().reserved[*address] = bytes;
  return place == MAP_FAILED ? kOutOfMemory : kSuccess;
}
Result cuMemAddressFree(DevicePointer address, std::size_t bytes) {
  ENTER();
  const auto found = fake().reserved.find(address);
  if (found == fake().reserved.end() || found->second != bytes) return kInvalidValue;
  if (fake().mapped.contains(address)) fake().misuse.push_back("an address was freed that memory is mapped at");
  munmap(reinterpret_cast<void*>(address), bytes);
  fake().reserved.erase(found);
  return kSuccess;
}
Result cuMemMap(DevicePointer address, std::size_t bytes, std::size_t, MemoryHandle handle, unsigned long long) {
  ENTER();
  if (!fake().reserved.contains(address) || !fake().memory.contains(handle)) return kInvalidValue;
  if (fake().memory[handle].second != bytes) return kInvalidValue;
  fake().mapped[address] = handle;
  return kSuccess;
}
Result cuMemSetAccess(DevicePointer address, std::size_t bytes, const MemoryAccess* access, std::size_t count) {
  ENTER();
  if (!fake().mapped.contains(address) || count != 1 || access->flags != kAccessReadWrite) return kInvalidValue;
  fake().gpu.map(fake().memory[fake().mapped[address]].first, bytes, address);
  return kSuccess;
}
Result cuMemUnmap(DevicePointer address, std::size_t bytes) {
  ENTER();
  if (fake().mapped.erase(address) == 0) return kInvalidValue;
  fake().gpu.release(address);  // Where nobody was given a right to it, there is nothing.
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return kSuccess;
}
Result cuMemExportToShareableHandle(void* out, MemoryHandle handle, int type, unsigned long long) {
  ENTER();
  if (type != kHandleDescriptor || !fake().memory.contains(handle)) return kInvalidValue;
  *static_cast<int*>(out) = dup(fake().memory[handle].first);
  return kSuccess;
}
Result cuMemImportFromShareableHandle(MemoryHandle* handle, void* number, int type) {
  ENTER();
  const int file = static_cast<int>(reinterpret_cast<std::intptr_t>(number));
  struct stat facts {};
  if (type != kHandleDescriptor) return kInvalidValue;
  if (fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode)) return kUnknown;  // As the driver.
  *handle = ++fake().last_memory;
  fake().memory[*handle] = {dup(file), static_cast<std::size_t>(facts.st_size)};
  return kSuccess;
}
#ifndef FAKE_CUDA_LACKS
Result cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned flags) {
  ENTER();
  if (flags != kHostRegisterPortable) fake().misuse.push_back("memory pinned for one GPU alone");
  const auto* const start = static_cast<const std::byte*>(memory);
  if (fake().gpu.is_pinned(id(memory), 1)) return kHostMemoryAlreadyRegistered;
  return fake().gpu.pin(start, bytes) ? kSuccess : kOutOfMemory;
}
#endif
Result cuMemHostUnregister(void* memory) {
  ENTER();
  return fake().gpu.unpin(static_cast<const std::byte*>(memory)) ? kSuccess : kInvalidValue;
}
Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t bytes, Stream stream) {
  ENTER();
  return fake().gpu.copy(id(stream), to, id(from), bytes, true, false) ? kSuccess : kInvalidValue;
}
/// To memory that is not pinned the driver copies by way of its own: the call returns when the copy has ended.
Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t bytes, Stream stream) {
  {
    ENTER();
    if (!fake().gpu.copy(id(stream), id(to), from, bytes, false, true)) return kInvalidValue;
    if (fake().gpu.is_pinned(id(to), bytes)) return kSuccess;
  }
  while (true) {
    ENTER();
    if (fake().gpu.is_idle(id(stream))) return kSuccess;
    fake().gpu.run_a_little(8);
  }
}
Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, std::size_t bytes, Stream stream) {
  ENTER();
  return fake().gpu.copy(id(stream), to, from, bytes, true, true) ? kSuccess : kInvalidValue;
}
Result cuPointerGetAttribute(void* value, int which, DevicePointer address) {
  ENTER();
  const bool is_device = fake().gpu.is_device(address), is_pinned = fake().gpu.is_pinned(address, 1);
  if (!is_device && !is_pinned) return kInvalidValue;
  *static_cast<unsigned*>(value) = which == kPointerIsManaged ? 0 : is_device ? kMemoryTypeDevice : kMemoryTypeHost;
  return kSuccess;
}

Result cuModuleLoadData(Module* module, const void* image) {
  ENTER();
  if (std::strstr(static_cast<const char*>(image), ".version 7.8") == nullptr) return 218;
  *module = reinterpret_cast<Module>(&fake());
  return kSuccess;
}
Result cuModuleUnload(Module) { return kSuccess; }
Result cuModuleGetFunction(Function* function, Module, const char* name) {
  ENTER();
  const bool is_sum = std::strcmp(name, "herring_sum") == 0;
  if (!is_sum && std::strcmp(name, "herring_pack") != 0) return kNotFound;
  if (fake().functions_without_memory > 0 && fake().functions_without_memory-- == 1) return kOutOfMemory;
  *function = reinterpret_cast<Function>(static_cast<std::uintptr_t>(is_sum ? 2 : 1));
  return kSuccess;
}
Result cuLaunchKernel(Function function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                      unsigned, Stream stream, void** parameters, void**) {
  ENTER();
  if (id(function) == 2) {
    const SumParameters copy = *static_cast<const SumParameters*>(parameters[0]);
    fake().gpu.launch(id(stream), [copy, blocks, threads] { run_sum(copy, blocks, threads); });
  } else {
    const PackParameters copy = *static_cast<const PackParameters*>(parameters[0]);
    fake().gpu.launch(id(stream), [copy, blocks, threads] { run_pack(copy, blocks, threads); });
  }
  return kSuccess;
}

// For the tests.
FakeGpu* herring_fake_gpu() { return &fake().gpu; }
Result herring_fake_stall(Stream stream, int is_stalled) {
  const std::lock_guard lock(fake().mutex);
  is_stalled != 0 ? fake().gpu.stall(id(stream)) : fake().gpu.unstall(id(stream));
  return kSuccess;
}
Result herring_fake_fail() {
  const std::lock_guard lock(fake().mutex);
  fake().gpu.fail();
  return kSuccess;
}
/// The n-th cuModuleGetFunction from now on finds no memory.
void herring_fake_lose_function(int n) { fake().functions_without_memory = n; }
int herring_fake_contexts() { return fake().contexts; }
const char* herring_fake_misuse() { return fake().misuse.empty() ? "" : fake().misuse.front().c_str(); }
}
