// A GPU for TensorFlow where there is none: a plug-in device (TensorFlow's C interface for such) of type "GPU" on a
// FakeGpu. Its memory faults when the host reads it, its copies move in random pieces, its streams run in any order
// that events allow, by a thread of their own. Built by accelerator.py.
#include <tensorflow/c/experimental/stream_executor/stream_executor.h>
#include <tensorflow/c/kernels.h>
#include <tensorflow/c/ops.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "bindings/tensorflow/gpu_stream.h"
#include "cuda/open.h"
#include "device/fake_gpu.h"
#include "device/locked_device.h"

struct SP_Stream_st {
  std::uint64_t id;
};
struct SP_Event_st {
  std::uint64_t id;
};
struct SP_Timer_st {};

namespace {

using herring::testing::FakeGpu;

struct World {
  World()
      : gpu({.seed = number("HERRING_TEST_SEED", 1),
             .memory_bytes = 1u << 30,
             .pin_bytes = number("FAKE_GPU_PIN_BYTES", 1u << 30)}) {
    std::thread([this] { run(); }).detach();
  }
  static std::uint64_t number(const char* variable, std::uint64_t otherwise) {
    const char* const text = std::getenv(variable);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
  }
  /// As a GPU does, whether anybody looks or not.
  [[noreturn]] void run() {
    while (true) {
      bool has_moved = false;
      {
        const std::lock_guard lock(mutex);
        for (int i = 0; i < 16 && gpu.step(); ++i) has_moved = true;
      }
      if (!has_moved) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  std::recursive_mutex mutex;
  FakeGpu gpu;
  std::uint64_t compute = 0;    ///< The first stream that TensorFlow makes.
  std::int64_t copies_out = 0;  ///< Of TensorFlow's own.
  std::int64_t copies_back = 0;
  std::atomic<std::int64_t> own_copies = 0;  ///< Of Herring's, either way.
  std::atomic<bool> fails_own_copies = false;
  std::atomic<std::int64_t> launches = 0;  ///< Of late kernels.
};

World& world() {
  static auto* const one = new World();
  return *one;
}

#define LOCKED const std::lock_guard lock(world().mutex)

std::uint64_t address_of(const void* memory) { return reinterpret_cast<std::uint64_t>(memory); }

void wait_for(std::uint64_t event) {
  while (true) {
    {
      LOCKED;
      if (world().gpu.is_broken() || world().gpu.is_done(event)) return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void finish(std::uint64_t stream) {
  const std::uint64_t event = [&] {
    LOCKED;
    const std::uint64_t made = world().gpu.create_event();
    world().gpu.record(made, stream);
    return made;
  }();
  wait_for(event);
  LOCKED;
  world().gpu.destroy_event(event);
}

void fail(TF_Status* status, const char* text) { TF_SetStatus(status, TF_INTERNAL, text); }
void succeed(TF_Status* status) { TF_SetStatus(status, TF_OK, ""); }

void copy(SP_Stream stream, const void* to, const void* from, std::uint64_t bytes, bool to_device, bool from_device,
          TF_Status* status) {
  LOCKED;
  if (world().gpu.copy(stream->id, address_of(to), address_of(from), bytes, to_device, from_device)) {
    return succeed(status);
  }
  fail(status, "the fake GPU: copy outside of its memory");
}

void copy_now(const void* to, const void* from, std::uint64_t bytes, bool to_device, bool from_device,
              TF_Status* status) {
  SP_Stream_st stream{};
  {
    LOCKED;
    stream.id = world().gpu.create_stream();
  }
  copy(&stream, to, from, bytes, to_device, from_device, status);
  finish(stream.id);
  LOCKED;
  world().gpu.destroy_stream(stream.id);
}

void fill(SP_Stream stream, SP_DeviceMemoryBase* memory, std::uint64_t bytes, const void* pattern, std::size_t width,
          TF_Status* status) {
  LOCKED;
  std::uint32_t value = 0;
  std::memcpy(&value, pattern, width);
  world().gpu.launch(stream->id, [address = address_of(memory->opaque), bytes, value, width] {
    std::byte* const there = world().gpu.alias(address, bytes);
    for (std::uint64_t i = 0; i + width <= bytes; i += width) std::memcpy(there + i, &value, width);
  });
  succeed(status);
}

void set_up_memory(SP_StreamExecutor& executor) {
  executor.allocate = [](const SP_Device*, std::uint64_t bytes, std::int64_t, SP_DeviceMemoryBase* memory) {
    LOCKED;
    memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
    memory->opaque = reinterpret_cast<void*>(world().gpu.allocate(bytes));
    memory->size = bytes;
  };
  executor.deallocate = [](const SP_Device*, SP_DeviceMemoryBase* memory) {
    LOCKED;
    if (memory->opaque != nullptr) world().gpu.release(address_of(memory->opaque));
    memory->opaque = nullptr;
    memory->size = 0;
  };
  executor.host_memory_allocate = [](const SP_Device*, std::uint64_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, 4096, bytes) == 0 ? memory : nullptr;
  };
  executor.host_memory_deallocate = [](const SP_Device*, void* memory) { std::free(memory); };
  executor.get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return 0; };
  executor.device_memory_usage = [](const SP_Device*, std::int64_t* free, std::int64_t* total) -> TF_Bool {
    LOCKED;
    *total = static_cast<std::int64_t>(world().gpu.memory_bytes());
    *free = *total - static_cast<std::int64_t>(world().gpu.allocated_bytes());
    return 1;
  };
}

void set_up_streams(SP_StreamExecutor& executor) {
  executor.create_stream = [](const SP_Device*, SP_Stream* stream, TF_Status* status) {
    LOCKED;
    *stream = new SP_Stream_st{world().gpu.create_stream()};
    if (world().compute == 0) world().compute = (*stream)->id;
    succeed(status);
  };
  executor.destroy_stream = [](const SP_Device*, SP_Stream stream) {
    finish(stream->id);
    LOCKED;
    world().gpu.destroy_stream(stream->id);
    delete stream;
  };
  executor.create_stream_dependency = [](const SP_Device*, SP_Stream later, SP_Stream first, TF_Status* status) {
    LOCKED;
    const std::uint64_t event = world().gpu.create_event();
    world().gpu.record(event, first->id);
    world().gpu.wait(later->id, event);
    world().gpu.destroy_event(event);
    succeed(status);
  };
  executor.get_stream_status = [](const SP_Device*, SP_Stream, TF_Status* status) { succeed(status); };
  executor.create_event = [](const SP_Device*, SP_Event* event, TF_Status* status) {
    LOCKED;
    *event = new SP_Event_st{world().gpu.create_event()};
    succeed(status);
  };
  executor.destroy_event = [](const SP_Device*, SP_Event event) {
    LOCKED;
    world().gpu.destroy_event(event->id);
    delete event;
  };
  executor.get_event_status = [](const SP_Device*, SP_Event event) {
    LOCKED;
    return world().gpu.is_done(event->id) ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
  };
  executor.record_event = [](const SP_Device*, SP_Stream stream, SP_Event event, TF_Status* status) {
    LOCKED;
    world().gpu.record(event->id, stream->id);
    succeed(status);
  };
  executor.wait_for_event = [](const SP_Device* const, SP_Stream stream, SP_Event event, TF_Status* const status) {
    LOCKED;
    world().gpu.wait(stream->id, event->id);
    succeed(status);
  };
}

void set_up_timers(SP_StreamExecutor& executor) {
  executor.create_timer = [](const SP_Device*, SP_Timer* timer, TF_Status* status) {
    *timer = new SP_Timer_st;
    succeed(status);
  };
  executor.destroy_timer = [](const SP_Device*, SP_Timer timer) { delete timer; };
  executor.start_timer = [](const SP_Device*, SP_Stream, SP_Timer, TF_Status* status) { succeed(status); };
  executor.stop_timer = [](const SP_Device*, SP_Stream, SP_Timer, TF_Status* status) { succeed(status); };
}

void set_up_copies(SP_StreamExecutor& executor) {
  executor.memcpy_dtoh = [](const SP_Device*, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from,
                            std::uint64_t bytes, TF_Status* status) {
    ++world().copies_out;
    copy(stream, to, from->opaque, bytes, false, true, status);
  };
  executor.memcpy_htod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from,
                            std::uint64_t bytes, TF_Status* status) {
    ++world().copies_back;
    copy(stream, to->opaque, from, bytes, true, false, status);
  };
  executor.memcpy_dtod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to,
                            const SP_DeviceMemoryBase* from, std::uint64_t bytes,
                            TF_Status* status) { copy(stream, to->opaque, from->opaque, bytes, true, true, status); };
  executor.sync_memcpy_dtoh = [](const SP_Device*, void* to, const SP_DeviceMemoryBase* from, std::uint64_t bytes,
                                 TF_Status* status) { copy_now(to, from->opaque, bytes, false, true, status); };
  executor.sync_memcpy_htod = [](const SP_Device*, SP_DeviceMemoryBase* to, const void* from, std::uint64_t bytes,
                                 TF_Status* status) { copy_now(to->opaque, from, bytes, true, false, status); };
  executor.sync_memcpy_dtod = [](const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                                 std::uint64_t bytes,
                                 TF_Status* status) { copy_now(to->opaque, from->opaque, bytes, true, true, status); };
}

void set_up_waits(SP_StreamExecutor& executor) {
  executor.block_host_for_event = [](const SP_Device*, SP_Event event, TF_Status* status) {
    wait_for(event->id);
    succeed(status);
  };
  executor.block_host_until_done = [](const SP_Device*, SP_Stream stream, TF_Status* status) {
    finish(stream->id);
    succeed(status);
  };
  executor.synchronize_all_activity = [](const SP_Device*, TF_Status* status) {
    while (true) {
      {
        LOCKED;
        if (world().gpu.waiting() == 0) break;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    succeed(status);
  };
}

void set_up_fills(SP_StreamExecutor& executor) {
  executor.mem_zero = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* memory, std::uint64_t bytes,
                         TF_Status* status) {
    const std::uint8_t zero = 0;
    fill(stream, memory, bytes, &zero, 1, status);
  };
  executor.memset = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* memory, std::uint8_t pattern,
                       std::uint64_t bytes, TF_Status* status) { fill(stream, memory, bytes, &pattern, 1, status); };
  executor.memset32 = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* memory, std::uint32_t pattern,
                         std::uint64_t bytes, TF_Status* status) { fill(stream, memory, bytes, &pattern, 4, status); };
  executor.host_callback = [](const SP_Device*, SP_Stream stream, SE_StatusCallbackFn call, void* argument) -> TF_Bool {
    LOCKED;
    world().gpu.launch(stream->id, [call, argument] {
      std::thread([call, argument] {
        TF_Status* const status = TF_NewStatus();
        call(argument, status);
        TF_DeleteStatus(status);
      }).detach();
    });
    return 1;
  };
}

// --- TensorFlow's kernels that the tests need on a GPU: its build without CUDA has none ---

struct Owned {
  TF_Tensor* tensor = nullptr;
  ~Owned() {
    if (tensor != nullptr) TF_DeleteTensor(tensor);
  }
};

std::vector<std::int64_t> shape_of(const TF_Tensor* tensor) {
  std::vector<std::int64_t> shape;
  for (int i = 0; i < TF_NumDims(tensor); ++i) shape.push_back(TF_Dim(tensor, i));
  return shape;
}

std::uint64_t stream_of(TF_OpKernelContext* context, TF_Status* status) {
  SP_Stream const stream = TF_GetStream(context, status);
  return stream == nullptr ? 0 : stream->id;
}

/// What a kernel gives TensorFlow where nothing may fail.
struct Call {
  explicit Call(TF_OpKernelContext* own) : context(own), status(TF_NewStatus()), stream(stream_of(own, status)) {}
  ~Call() {
    if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(context, status);
    TF_DeleteStatus(status);
  }
  TF_Tensor* input(int index) {
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context, index, &tensor, status);
    return tensor;
  }
  TF_Tensor* output(int index, TF_DataType type, const std::vector<std::int64_t>& shape, std::size_t bytes) {
    return TF_AllocateOutput(context, index, type, shape.data(), static_cast<int>(shape.size()), bytes, status);
  }
  void move(const void* to, const void* from, std::size_t bytes) {
    LOCKED;
    if (bytes != 0) world().gpu.copy(stream, address_of(to), address_of(from), bytes, true, true);
  }

  TF_OpKernelContext* context;
  TF_Status* status;
  std::uint64_t stream;
};

/// A kernel that takes its time, and then gives what it got.
void compute_late(void*, TF_OpKernelContext* context) {
  Call call(context);
  ++world().launches;
  const Owned input{call.input(0)};
  if (input.tensor == nullptr) return;
  const std::size_t bytes = TF_TensorByteSize(input.tensor);
  const Owned output{call.output(0, TF_TensorType(input.tensor), shape_of(input.tensor), bytes)};
  LOCKED;
  for (int i = 0; i < 300; ++i) world().gpu.launch(call.stream, [] {});
  call.move(TF_TensorData(output.tensor), TF_TensorData(input.tensor), bytes);
}

/// Of vectors alone.
void compute_concat(void*, TF_OpKernelContext* context) {
  Call call(context);
  std::vector<Owned> inputs(static_cast<std::size_t>(TF_NumInputs(context) - 1));
  std::size_t bytes = 0;
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    inputs[i].tensor = call.input(static_cast<int>(i));
    bytes += TF_TensorByteSize(inputs[i].tensor);
    elements += TF_Dim(inputs[i].tensor, 0);
  }
  const Owned output{call.output(0, TF_TensorType(inputs[0].tensor), {elements}, bytes)};
  auto* to = static_cast<std::byte*>(TF_TensorData(output.tensor));
  for (const Owned& input : inputs) {
    call.move(to, TF_TensorData(input.tensor), TF_TensorByteSize(input.tensor));
    to += TF_TensorByteSize(input.tensor);
  }
}

void compute_split(void*, TF_OpKernelContext* context) {
  Call call(context);
  const Owned input{call.input(0)};
  const Owned sizes{call.input(1)};
  const std::size_t width =
      TF_TensorByteSize(input.tensor) / static_cast<std::size_t>(std::max<std::int64_t>(TF_Dim(input.tensor, 0), 1));
  const auto* from = static_cast<const std::byte*>(TF_TensorData(input.tensor));
  for (int i = 0; i < TF_NumOutputs(context); ++i) {
    const std::int64_t elements = TF_TensorType(sizes.tensor) == TF_INT32
                                      ? static_cast<const std::int32_t*>(TF_TensorData(sizes.tensor))[i]
                                      : static_cast<const std::int64_t*>(TF_TensorData(sizes.tensor))[i];
    const std::size_t bytes = static_cast<std::size_t>(elements) * width;
    const Owned output{call.output(i, TF_TensorType(input.tensor), {elements}, bytes)};
    call.move(TF_TensorData(output.tensor), from, bytes);
    from += bytes;
  }
}

/// What a function as StreamOf says of this very kernel.
void compute_ask(void* function, TF_OpKernelContext* context) {
  TF_Status* const status = TF_NewStatus();
  const Owned answer{TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(std::int32_t), status)};
  TF_DeleteStatus(status);
  herring::tensorflow_binding::GpuStream stream;
  const std::int32_t said = reinterpret_cast<herring::tensorflow_binding::StreamOf>(function)(context, &stream);
  std::memcpy(TF_TensorData(answer.tensor), &said, sizeof(said));
}

void* create_ask(TF_OpKernelConstruction* context) {
  std::int64_t function = 0;
  TF_Status* const status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrInt64(context, "function", &function, status);
  TF_DeleteStatus(status);
  return reinterpret_cast<void*>(function);
}

void* create_nothing(TF_OpKernelConstruction*) { return nullptr; }
void delete_nothing(void*) {}

void serve(const char* op, void (*compute)(void*, TF_OpKernelContext*), std::initializer_list<const char*> on_host) {
  TF_Status* const status = TF_NewStatus();
  TF_KernelBuilder* const builder = TF_NewKernelBuilder(op, "GPU", &create_nothing, compute, &delete_nothing);
  for (const char* argument : on_host) TF_KernelBuilder_HostMemory(builder, argument);
  TF_KernelBuilder_Priority(builder, 1);  // TensorFlow's own, which are there in part, need Eigen's GPU.
  TF_RegisterKernelBuilder(op, builder, status);
  TF_DeleteStatus(status);
}

// --- What Herring asks of a GPU's driver (core/device.h), on the same fake ---

/// Counts what is copied.
class CountingDevice final : public herring::testing::LockedDevice {
 public:
  CountingDevice() : LockedDevice(world().gpu, world().mutex) {}

  herring::Status copy_to_host(herring::StreamHandle stream, std::span<std::byte> to,
                               herring::DeviceSpan from) override {
    ++world().own_copies;
    if (world().fails_own_copies) return {herring::Code::kTransport, description() + ": the device failed"};
    return LockedDevice::copy_to_host(stream, to, from);
  }
  herring::Status copy_to_device(herring::StreamHandle stream, herring::DeviceSpan to,
                                 std::span<const std::byte> from) override {
    ++world().own_copies;
    return LockedDevice::copy_to_device(stream, to, from);
  }
  herring::Status launch(herring::StreamHandle stream, herring::KernelId kernel, std::span<const std::byte> parameters,
                         std::uint32_t blocks) override {
    if (World::number("FAKE_GPU_NO_KERNELS", 0) != 0) {
      return {herring::Code::kUnavailable, description() + ": the driver is too old"};
    }
    return LockedDevice::launch(stream, kernel, parameters, blocks);
  }
};

const bool is_plugged_in = [] {
  herring::cuda::set_plug_in([](herring::DeviceId) { return std::make_unique<CountingDevice>(); });
  return true;
}();

}  // namespace

extern "C" {

void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status* status) {
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "HERRING_FAKE";
  params->platform->type = "GPU";
  params->platform->supports_unified_memory = 0;
  params->platform->use_bfc_allocator = 1;
  params->platform->force_memory_growth = 1;
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
  SP_PlatformFns& functions = *params->platform_fns;
  functions.struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  functions.get_device_count = [](const SP_Platform*, int* count, TF_Status*) { *count = 1; };
  functions.create_device = [](const SP_Platform*, SE_CreateDeviceParams* device, TF_Status*) {
    device->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    device->device->hardware_name = "no GPU";
    device->device->device_vendor = "herring";
    device->device->pci_bus_id = "0000:00:00.0";
  };
  functions.destroy_device = [](const SP_Platform*, SP_Device*) {};
  functions.create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* device, TF_Status*) {
    *device->device_fns = {SP_DEVICE_FNS_STRUCT_SIZE};
  };
  functions.destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  functions.create_stream_executor = [](const SP_Platform*, SE_CreateStreamExecutorParams* executor, TF_Status*) {
    executor->stream_executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
    SP_StreamExecutor& functions = *executor->stream_executor;
    for (const auto set_up :
         {&set_up_memory, &set_up_streams, &set_up_timers, &set_up_copies, &set_up_waits, &set_up_fills}) {
      set_up(functions);
    }
  };
  functions.destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  functions.create_timer_fns = [](const SP_Platform*, SP_TimerFns* timer, TF_Status*) {
    timer->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
    timer->nanoseconds = [](SP_Timer) -> std::uint64_t { return 0; };
  };
  functions.destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
  TF_SetStatus(status, TF_OK, "");
}

void TF_InitKernel() {
  serve("FakeGpuLate", &compute_late, {});
  for (const char* device : {"CPU", "GPU"}) {
    TF_KernelBuilder* const builder =
        TF_NewKernelBuilder("FakeGpuAsk", device, &create_ask, &compute_ask, &delete_nothing);
    TF_KernelBuilder_HostMemory(builder, "said");
    TF_Status* const status = TF_NewStatus();
    TF_RegisterKernelBuilder("FakeGpuAsk", builder, status);
    TF_DeleteStatus(status);
  }
  serve("ConcatV2", &compute_concat, {"axis"});
  serve("SplitV", &compute_split, {"size_splits", "split_dim"});
}

/// As bindings/tensorflow/gpu_stream.cc, for this plug-in's devices.
int fake_stream_of(void* context, herring::tensorflow_binding::GpuStream* answer) {
  TF_Status* const status = TF_NewStatus();
  const std::uint64_t stream = stream_of(static_cast<TF_OpKernelContext*>(context), status);
  TF_DeleteStatus(status);
  *answer = {stream, 0, 1};
  return stream != 0 ? 1 : 0;
}

/// TensorFlow's kernels that come after it on the GPU wait, until it is let go.
void fake_stall(int on) {
  LOCKED;
  on != 0 ? world().gpu.stall(world().compute) : world().gpu.unstall(world().compute);
}
/// Herring alone sees it: TensorFlow ends the process.
void fake_break() { world().fails_own_copies = true; }
/// TensorFlow's copies from the device and to it so far.
std::int64_t fake_copies() {
  LOCKED;
  return world().copies_out + world().copies_back;
}
std::int64_t fake_launches() { return world().launches; }
std::int64_t fake_own_copies() { return world().own_copies; }
/// The first thing that no correct user does; empty: there was none.
const char* fake_fault() {
  LOCKED;
  return world().gpu.faults().empty() ? "" : world().gpu.faults().front().c_str();
}
}

namespace {

/// When the library is loaded.
[[maybe_unused]] const bool kIsDefined = [] {
  TF_OpDefinitionBuilder* const builder = TF_NewOpDefinitionBuilder("FakeGpuLate");
  TF_OpDefinitionBuilderAddAttr(builder, "T: type");
  TF_OpDefinitionBuilderAddInput(builder, "value: T");
  TF_OpDefinitionBuilderAddOutput(builder, "same: T");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, [](TF_ShapeInferenceContext* context, TF_Status* status) {
    TF_ShapeHandle* const shape = TF_NewShapeHandle();
    TF_ShapeInferenceContextGetInput(context, 0, shape, status);
    TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
    TF_DeleteShapeHandle(shape);
  });
  TF_Status* const status = TF_NewStatus();
  TF_RegisterOpDefinition(builder, status);
  TF_OpDefinitionBuilder* const ask = TF_NewOpDefinitionBuilder("FakeGpuAsk");
  TF_OpDefinitionBuilderAddAttr(ask, "function: int");
  TF_OpDefinitionBuilderAddOutput(ask, "said: int32");
  TF_OpDefinitionBuilderSetIsStateful(ask, true);
  TF_RegisterOpDefinition(ask, status);
  TF_DeleteStatus(status);
  return true;
}();

}  // namespace
