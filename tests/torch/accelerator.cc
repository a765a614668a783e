// A GPU for torch where there is none: torch's device "privateuseone" on a FakeGpu. Its memory faults when the host
// reads it, its copies move in random pieces, its streams run in any order that events allow, and memory that is freed
// while another stream still uses it is written down. Built by accelerator.py; loaded with ctypes.
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>

#include "cuda/nccl_prototypes.h"
#include "cuda/open.h"
#include "device/fake_collectives.h"
#include "device/fake_gpu.h"
#include "device/locked_device.h"

namespace {

using herring::testing::FakeGpu;

struct World {
  World() : gpu({.seed = seed(), .memory_bytes = 1u << 30, .pin_bytes = 1u << 30}) { gpu_stream(0); }
  static std::uint64_t seed() {
    const char* const text = std::getenv("HERRING_TEST_SEED");
    return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
  }
  /// torch's stream id to the fake's stream; 0 is the default stream.
  std::uint64_t gpu_stream(c10::StreamId id) {
    auto [found, is_new] = streams.try_emplace(id);
    if (is_new) found->second = gpu.create_stream();
    return found->second;
  }

  std::recursive_mutex mutex;
  FakeGpu gpu;
  std::map<c10::StreamId, std::uint64_t> streams;
  c10::StreamId last_stream = 0;
  std::int64_t copies = 0;                 ///< Between host and device, so far.
  std::atomic<std::int64_t> launches = 0;  ///< Of Herring's kernels.
  bool is_capturing = false;
  std::vector<std::string> faults;  ///< Of what NCCL's fake saw.
  std::atomic<bool> are_collectives_held = false;
  std::atomic<std::int64_t> collectives = 0;  ///< Asked of NCCL's fake, so far.
};

World& world() {
  static auto* const one = new World();
  return *one;
}

#define LOCKED const std::lock_guard lock(world().mutex)

thread_local c10::StreamId current_stream = 0;

std::uint64_t current() { return world().gpu_stream(current_stream); }

void finish(std::uint64_t stream) {
  // Everybody else goes on meanwhile: what the stream waits for may be theirs.
  const std::uint64_t event = [&] {
    LOCKED;
    const std::uint64_t made = world().gpu.create_event();
    world().gpu.record(made, stream);
    return made;
  }();
  while (true) {
    LOCKED;
    if (world().gpu.is_done(event)) break;
    world().gpu.step();
  }
  LOCKED;
  world().gpu.destroy_event(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
  static c10::Device zero() { return {kType, 0}; }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, zero(), id); }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return zero(); }
  c10::Device getDevice() const override { return zero(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    LOCKED;
    return stream(++world().last_stream);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    LOCKED;
    return stream(++world().last_stream);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, next.id()));
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    LOCKED;
    if (*event == nullptr) *event = reinterpret_cast<void*>(world().gpu.create_event());
    world().gpu.record(reinterpret_cast<std::uint64_t>(*event), world().gpu_stream(on.id()));
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event == nullptr) return;
    LOCKED;
    world().gpu.wait(world().gpu_stream(on.id()), reinterpret_cast<std::uint64_t>(event));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    LOCKED;
    world().gpu.run_a_little(8);
    return world().gpu.is_done(reinterpret_cast<std::uint64_t>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    LOCKED;
    world().gpu.destroy_event(reinterpret_cast<std::uint64_t>(event));
  }
  void synchronizeEvent(void* event) const override {
    while (!queryEvent(event)) {
    }
  }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& on) const override {
    std::uint64_t id = 0;
    {
      LOCKED;
      id = world().gpu_stream(on.id());
    }
    finish(id);
  }
  bool isStreamCapturing(const c10::Stream&) const { return world().is_capturing; }
  void* getStreamNativeHandle(const c10::Stream on) const override {
    LOCKED;
    return reinterpret_cast<void*>(world().gpu_stream(on.id()));
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

/// Autograd asks whether there is a device before it takes a backward pass to its streams.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

const bool has_hooks = [] {
  c10::register_privateuse1_backend("privateuseone");
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

/// As torch's caching allocator: memory is free again once the stream that it was allocated on has got so far. What
/// other streams do with it is not waited for.
struct Allocator final : c10::Allocator {
  struct Block {
    std::uint64_t address;
    std::uint64_t stream;
  };
  c10::DataPtr allocate(std::size_t bytes) override {
    LOCKED;
    const std::uint64_t address = world().gpu.allocate(bytes == 0 ? 1 : bytes);
    TORCH_CHECK(address != 0, "fake accelerator: out of memory");
    return {reinterpret_cast<void*>(address), new Block{address, current()}, &release, Guard::zero()};
  }
  static void release(void* block) {
    LOCKED;
    const Block freed = *static_cast<Block*>(block);
    delete static_cast<Block*>(block);
    world().gpu.launch(freed.stream, [freed] { world().gpu.release(freed.address); });
  }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "fake accelerator: copy_data"); }
};

Allocator* allocator() {
  static auto* const one = new Allocator();
  return one;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const auto type = c10::scalarTypeToTypeMeta(dtype.value_or(at::kFloat));
  std::int64_t elements = size.empty() ? 1 : 0;
  bool is_empty = false;
  std::int64_t last = 0;
  for (std::size_t i = 0; i < size.size(); ++i) {
    is_empty = is_empty || size[i] == 0;
    last += (size[i] - 1) * stride[i];
  }
  elements = is_empty ? 0 : last + 1;
  const std::size_t bytes = static_cast<std::size_t>(elements) * type.itemsize();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       allocator()->allocate(bytes), allocator(), false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat>) {
  std::vector<std::int64_t> stride(size.size(), 1);
  for (std::size_t i = size.size(); i > 1; --i) stride[i - 2] = stride[i - 1] * std::max<std::int64_t>(size[i - 1], 1);
  return empty_strided(size, stride, dtype, layout, device, pin);
}

/// The tensor's memory as the fake itself sees it.
at::Tensor seen(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const auto start = reinterpret_cast<std::uint64_t>(tensor.storage().data());
  std::byte* const there = world().gpu.alias(start, tensor.storage().nbytes());
  TORCH_CHECK(there != nullptr, "fake accelerator: memory is gone");
  return at::from_blob(there + tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size()),
                       tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  std::uint64_t stream = 0;
  {
    LOCKED;
    stream = current();
    world().copies += static_cast<std::int64_t>(from.is_cpu() != to.is_cpu());
    const bool is_plain = from.is_contiguous() && to.is_contiguous() && from.scalar_type() == to.scalar_type() &&
                          from.sizes() == to.sizes();
    if (is_plain && from.numel() > 0) {
      TORCH_CHECK(world().gpu.copy(stream, reinterpret_cast<std::uint64_t>(to.data_ptr()),
                                   reinterpret_cast<std::uint64_t>(from.data_ptr()), from.nbytes(), !to.is_cpu(),
                                   !from.is_cpu()),
                  "fake accelerator: copy outside of memory");
    } else if (from.numel() > 0) {
      // Raw views: that the tensors live so long is the caller's affair, as with a real device.
      const at::Tensor source = seen(from), target = seen(to);
      world().gpu.launch(stream, [source, target] { target.copy_(source.expand(target.sizes())); });
    }
  }
  if (!non_blocking) finish(stream);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) { return copy_from(from, to, false); }

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, std::int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  c10::TensorImpl* const tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  tensor->set_sizes_and_strides(size, stride);
  return self;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

namespace {

using namespace herring;

/// What Herring asks of a GPU's driver (core/device.h), on the same fake. Any thread.
class Driver final : public herring::testing::LockedDevice {
 public:
  Driver() : LockedDevice(world().gpu, world().mutex) {}

  Status allocate_shared(std::size_t bytes, DeviceSpan& memory, int& descriptor) override {
    if (std::getenv("FAKE_ACCELERATOR_SHARES_NOTHING") != nullptr) {
      return {Code::kUnavailable, "this fake shares no memory"};
    }
    return LockedDevice::allocate_shared(bytes, memory, descriptor);
  }
  Status launch(StreamHandle stream, KernelId kernel, std::span<const std::byte> parameters,
                std::uint32_t blocks) override {
    ++world().launches;
    return LockedDevice::launch(stream, kernel, parameters, blocks);
  }
};

const bool is_plugged_in = [] {
  cuda::set_plug_in([](DeviceId) { return std::make_unique<Driver>(); });
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

extern "C" {

/// A kernel of somebody's on this thread's current stream, which comes late.
void fake_fill_later(std::uint64_t address, std::uint64_t bytes, int value) {
  LOCKED;
  for (int i = 0; i < 200; ++i) world().gpu.launch(current(), [] {});
  world().gpu.launch(current(), [=] { std::memset(world().gpu.alias(address, bytes), value, bytes); });
}
/// Never ends, until it is let go.
void fake_stall(int on) {
  LOCKED;
  on != 0 ? world().gpu.stall(current()) : world().gpu.unstall(current());
}
void fake_capture(int on) { world().is_capturing = on != 0; }
/// Where the fake itself, and a card that reads its memory, has these bytes; null where they are not the device's.
void* fake_alias(std::uint64_t address, std::uint64_t bytes) {
  LOCKED;
  return world().gpu.alias(address, bytes);
}
/// Copies from the host and to it so far.
std::int64_t fake_copies() {
  LOCKED;
  return world().copies;
}
/// Of Herring's kernels, so far.
std::int64_t fake_launches() { return world().launches; }
/// NCCL's kernels do not begin on this rank.
void fake_hold_collectives() { world().are_collectives_held = true; }
/// Of NCCL's, so far.
std::int64_t fake_collectives() { return world().collectives; }
void fake_break() {
  LOCKED;
  world().gpu.fail();
}
std::int64_t fake_new_stream() {
  LOCKED;
  return ++world().last_stream;
}
std::int64_t fake_set_stream(std::int64_t id) { return std::exchange(current_stream, id); }
void fake_run_all() {
  LOCKED;
  world().gpu.run_all();
}
/// The first thing that no correct user does; empty: there was none.
const char* fake_fault() {
  LOCKED;
  if (!world().faults.empty()) return world().faults.front().c_str();
  return world().gpu.faults().empty() ? "" : world().gpu.faults().front().c_str();
}
std::uint64_t fake_allocated() {
  LOCKED;
  world().gpu.run_all();
  return world().gpu.allocated_bytes();
}
}

// --- NCCL, on the same fake: HERRING_NCCL is this file's library ---

namespace {

using herring::testing::FakeCollectives;

thread_local std::string last_error;

herring::DataType type_of(cuda::NcclType type) {
  switch (type) {
    case cuda::kNcclFloat32:
      return DataType::kFloat32;
    case cuda::kNcclFloat64:
      return DataType::kFloat64;
    case cuda::kNcclFloat16:
      return DataType::kFloat16;
    case cuda::kNcclBFloat16:
      return DataType::kBFloat16;
    case cuda::kNcclInt32:
      return DataType::kInt32;
    case cuda::kNcclInt64:
      return DataType::kInt64;
    default:
      return DataType::kUInt8;
  }
}
herring::ReduceOp reduce_of(cuda::NcclReduce reduce) {
  return reduce == cuda::kNcclAverage ? ReduceOp::kAverage : ReduceOp::kSum;
}
DeviceSpan span_of(const void* memory, std::size_t bytes) { return {reinterpret_cast<std::uint64_t>(memory), bytes}; }
StreamHandle handle_of(void* stream) { return {reinterpret_cast<std::uint64_t>(stream)}; }
cuda::NcclResult result_of(const Status& status) {
  if (status.is_ok()) return cuda::kNcclSuccess;
  if (status.is_again()) return cuda::kNcclInProgress;
  last_error = status.message();
  return 3;  // ncclInternalError
}
/// Counts a collective.
cuda::NcclResult asked(const Status& status) {
  ++world().collectives;
  return result_of(status);
}
/// Of how many ranks a communicator is, which FakeCollectives alone knows of itself.
struct FakeComm {
  FakeCollectives collectives;
  std::size_t members;
};

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = cuda::nccl_version(2, 27, 7);
  return 0;
}
const char* ncclGetErrorString(int) { return "internal error"; }
const char* ncclGetLastError(FakeComm*) { return last_error.c_str(); }
int ncclGetUniqueId(cuda::NcclId* id) {
  const auto made = FakeCollectives::make_id();
  std::memcpy(id->bytes, made.data(), made.size());
  return 0;
}
int ncclCommInitRankConfig(FakeComm** comm, int members, cuda::NcclId id, int index, cuda::NcclConfig* config) {
  if (config->size < sizeof(*config) || config->magic != cuda::kNcclMagic || config->blocking != 0) return 4;
  if (std::getenv("FAKE_NCCL_REFUSES") != nullptr) {
    last_error = "this fake connects nobody";
    return 3;
  }
  DeviceCollectivesLibrary::Id given;
  std::memcpy(given.data(), id.bytes, given.size());
  const auto fault = [](const std::string& text) {
    LOCKED;
    world().faults.push_back(text);
  };
  static const auto neighbors = std::make_shared<herring::testing::FakeNeighbors>();
  *comm = new FakeComm{
      {FakeCollectives::World{&world().gpu, &world().mutex, fault, true, &world().are_collectives_held, neighbors},
       given, static_cast<std::uint32_t>(members), static_cast<std::uint32_t>(index)},
      static_cast<std::size_t>(members)};
  return cuda::kNcclInProgress;
}
int ncclCommGetAsyncError(FakeComm* comm, int* error) {
  *error = result_of(comm->collectives.poll());
  return 0;
}
int ncclCommFinalize(FakeComm*) { return cuda::kNcclInProgress; }
/// Waits for the other ranks', as long as it takes.
int ncclCommDestroy(FakeComm* comm) {
  comm->collectives.close(herring::Instant::max());
  delete comm;
  return 0;
}
int ncclCommAbort(FakeComm* comm) {
  delete comm;
  return 0;
}
int ncclAllReduce(const void* from, void* to, std::size_t count, int type, int reduce, FakeComm* comm, void* stream) {
  const std::size_t bytes = count * herring::element_bytes(type_of(type));
  return asked(comm->collectives.all_reduce(handle_of(stream), span_of(to, bytes), span_of(from, bytes), type_of(type),
                                            reduce_of(reduce)));
}
int ncclReduceScatter(const void* from, void* to, std::size_t count, int type, int reduce, FakeComm* comm,
                      void* stream) {
  const std::size_t bytes = count * herring::element_bytes(type_of(type));
  return asked(comm->collectives.reduce_scatter(
      handle_of(stream), span_of(to, bytes), span_of(from, bytes * comm->members), type_of(type), reduce_of(reduce)));
}
int ncclAllGather(const void* from, void* to, std::size_t count, int type, FakeComm* comm, void* stream) {
  const std::size_t bytes = count * herring::element_bytes(type_of(type));
  return asked(
      comm->collectives.all_gather(handle_of(stream), span_of(to, bytes * comm->members), span_of(from, bytes)));
}
}
