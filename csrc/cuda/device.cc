#include "cuda/device.h"

#include <utility>

#include "cuda/current.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/tables.h"
#include "cuda/open.h"

namespace herring::cuda {
namespace {

Stream stream_of(StreamHandle handle) { return reinterpret_cast<Stream>(handle.value); }

}  // namespace

CudaDevice::CudaDevice(std::shared_ptr<Driver> driver, DeviceId id) : driver_(std::move(driver)), id_(id) {
  if (const Status status = driver_->check_process(); !status.is_ok()) throw Error(status);
  const Api& api = driver_->api();
  const auto require = [this](Result result, const char* call) {
    const Status status = driver_->check(result, call);
    if (!status.is_ok()) throw Error(Code::kUnavailable, status.message());
  };
  require(api.device_get(&device_, static_cast<int>(id.value)), "cuDeviceGet");
  const GpuFacts facts = driver_->facts(static_cast<int>(id.value));
  description_ = "cuda:" + std::to_string(id.value) + " (" + facts.name + ", driver " + driver_->version_text() + ")";
  require(api.primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

CudaDevice::~CudaDevice() {
  // In a forked child or after a failure the driver must not be asked for anything.
  if (!health_.is_ok() || !driver_->check_process().is_ok()) return;
  {
    const Current in(*this);
    in([&](const Api& api) {
      if (module_ != nullptr) static_cast<void>(api.module_unload(module_));
      for (auto& [stream, marks] : marks_) {
        for (const Mark& mark : marks) static_cast<void>(api.event_destroy(mark.event));
      }
      for (const Event event : free_events_) static_cast<void>(api.event_destroy(event));
      for (const Stream stream : streams_) static_cast<void>(api.stream_destroy(stream));
      return kSuccess;
    });
  }
  for (const auto& [address, bytes] : shared_) static_cast<void>(release_shared(address, bytes));
  static_cast<void>(driver_->api().primary_ctx_release(device_));
}

Status CudaDevice::ready() {
  if (!health_.is_ok()) return health_;
  return driver_->check_process();
}

Status CudaDevice::to_status(Result result, const char* call, const std::string& what) {
  if (result == kSuccess) return Status::ok();
  const Status status = driver_->check(result, call);
  Status full{status.code(), description_ + ": " + (what.empty() ? "" : what + ": ") + status.message()};
  if (is_fatal(result) && health_.is_ok()) health_ = full;
  return full;
}

StreamHandle CudaDevice::create_stream() {
  ready().or_throw();
  const Current in(*this);
  Stream stream = nullptr;
  to_status(in([&](const Api& api) {
              int least = 0, greatest = 0;
              const Result result = api.ctx_get_stream_priority_range(&least, &greatest);
              return result != kSuccess ? result
                                        : api.stream_create_with_priority(&stream, kStreamNonBlocking, greatest);
            }),
            "cuStreamCreateWithPriority")
      .or_throw();
  streams_.push_back(stream);
  return {reinterpret_cast<std::uint64_t>(stream)};
}

Status CudaDevice::allocate(std::size_t bytes, DeviceSpan& memory) {
  if (Status status = ready(); !status.is_ok()) return status;
  const Current in(*this);
  DevicePointer address = 0;
  const std::string what = "cannot allocate " + std::to_string(bytes) + " bytes of device memory";
  Status status = to_status(in([&](const Api& api) { return api.mem_alloc(&address, bytes); }), "cuMemAlloc", what);
  if (status.is_ok()) memory = {address, bytes};
  return status;
}

Status CudaDevice::release(DeviceSpan memory) {
  if (Status status = ready(); !status.is_ok()) return status;
  if (const auto found = shared_.find(memory.address); found != shared_.end()) {
    const std::size_t bytes = found->second;
    shared_.erase(found);
    return release_shared(memory.address, bytes);
  }
  const Current in(*this);
  return to_status(in([&](const Api& api) { return api.mem_free(memory.address); }), "cuMemFree");
}

Status CudaDevice::pin(std::span<std::byte> memory) {
  if (Status status = ready(); !status.is_ok()) return status;
  const Current in(*this);
  const Result result =
      in([&](const Api& api) { return api.mem_host_register(memory.data(), memory.size(), kHostRegisterPortable); });
  Status status = to_status(result, "cuMemHostRegister",
                            "the system cannot pin " + std::to_string(memory.size()) +
                                " bytes (limit of locked memory: `ulimit -l`), so copies are slower");
  if (status.is_ok() || !health_.is_ok()) return status;
  return {Code::kUnavailable, status.message()};
}

Status CudaDevice::unpin(std::span<std::byte> memory) {
  if (Status status = ready(); !status.is_ok()) return status;
  const Current in(*this);
  return to_status(in([&](const Api& api) { return api.mem_host_unregister(memory.data()); }), "cuMemHostUnregister");
}

Status CudaDevice::wait_event(StreamHandle stream, ForeignEvent event) {
  if (Status status = ready(); !status.is_ok()) return status;
  const Current in(*this);
  return to_status(in([&](const Api& api) {
                     return api.stream_wait_event(stream_of(stream), reinterpret_cast<Event>(event.value), 0);
                   }),
                   "cuStreamWaitEvent");
}

Status CudaDevice::wait_ticket(StreamHandle stream, Ticket ticket) {
  for (const auto& [of, marks] : marks_) {
    for (const Mark& mark : marks) {
      if (mark.ticket == ticket) return wait_event(stream, {reinterpret_cast<std::uint64_t>(mark.event)});
    }
  }
  return ready();  // Done.
}

namespace {

Status check_sizes(std::size_t to, std::size_t from) {
  if (to == from) return Status::ok();
  return {Code::kInvalidArgument, "cuda: copy of " + std::to_string(from) + " bytes to " + std::to_string(to)};
}

}  // namespace

Status CudaDevice::copy_to_host(StreamHandle stream, std::span<std::byte> to, DeviceSpan from) {
  if (Status status = ready(); !status.is_ok()) return status;
  if (Status status = check_sizes(to.size(), from.bytes); !status.is_ok() || to.empty()) return status;
  const Current in(*this);
  return to_status(
      in([&](const Api& api) { return api.memcpy_dtoh_async(to.data(), from.address, to.size(), stream_of(stream)); }),
      "cuMemcpyDtoHAsync", std::to_string(to.size()) + " bytes");
}

Status CudaDevice::copy_to_device(StreamHandle stream, DeviceSpan to, std::span<const std::byte> from) {
  if (Status status = ready(); !status.is_ok()) return status;
  if (Status status = check_sizes(to.bytes, from.size()); !status.is_ok() || to.empty()) return status;
  const Current in(*this);
  return to_status(
      in([&](const Api& api) { return api.memcpy_htod_async(to.address, from.data(), to.bytes, stream_of(stream)); }),
      "cuMemcpyHtoDAsync", std::to_string(to.bytes) + " bytes");
}

Status CudaDevice::copy_inside(StreamHandle stream, DeviceSpan to, DeviceSpan from) {
  if (Status status = ready(); !status.is_ok()) return status;
  if (Status status = check_sizes(to.bytes, from.bytes); !status.is_ok() || to.empty()) return status;
  const Current in(*this);
  return to_status(
      in([&](const Api& api) { return api.memcpy_dtod_async(to.address, from.address, to.bytes, stream_of(stream)); }),
      "cuMemcpyDtoDAsync", std::to_string(to.bytes) + " bytes");
}

Status CudaDevice::load_kernels() {
  if (kernels_.back() != nullptr) return Status::ok();
  if (driver_->version() < Driver::kKernelsVersion) {
    return {Code::kUnavailable, description_ + ": Herring's kernels need a driver for CUDA 11.8 or newer"};
  }
  const Current in(*this);
  Status status;
  if (module_ == nullptr) {
    status =
        to_status(in([&](const Api& api) { return api.module_load_data(&module_, kKernelsPtx); }), "cuModuleLoadData");
  }
  for (std::size_t i = 0; i < kKernels && status.is_ok(); ++i) {
    status =
        to_status(in([&](const Api& api) { return api.module_get_function(&kernels_[i], module_, kKernelNames[i]); }),
                  "cuModuleGetFunction", kKernelNames[i]);
  }
  return status;
}

Status CudaDevice::launch(StreamHandle stream, KernelId kernel, std::span<const std::byte> parameters,
                          std::uint32_t blocks) {
  if (Status status = ready(); !status.is_ok()) return status;
  const std::size_t size = kernel == KernelId::kSum ? sizeof(SumParameters) : sizeof(PackParameters);
  if (parameters.size() != size) {
    return {Code::kInvalidArgument, description_ + ": launch with " + std::to_string(parameters.size()) +
                                        " bytes of parameters; the kernel takes " + std::to_string(size)};
  }
  if (blocks == 0) return Status::ok();
  if (Status status = load_kernels(); !status.is_ok()) return status;
  const Current in(*this);
  // The driver copies the block of parameters before the call returns.
  void* block[] = {const_cast<std::byte*>(parameters.data())};
  const Function function = kernels_[static_cast<std::size_t>(kernel)];
  const std::uint32_t threads = kernel == KernelId::kSum ? kSumThreads : kThreads;
  return to_status(in([&](const Api& api) {
                     return api.launch_kernel(function, blocks, 1, 1, threads, 1, 1, 0, stream_of(stream), block,
                                              nullptr);
                   }),
                   "cuLaunchKernel", kKernelNames[static_cast<std::size_t>(kernel)]);
}

Status CudaDevice::record(StreamHandle stream, Ticket& ticket) {
  if (Status status = ready(); !status.is_ok()) return status;
  if (tickets_ == kMostTickets) return Status::again();
  const Current in(*this);
  if (free_events_.empty()) {
    Event event = nullptr;
    const Status status =
        to_status(in([&](const Api& api) { return api.event_create(&event, kEventDisableTiming); }), "cuEventCreate");
    if (!status.is_ok()) return status;
    free_events_.push_back(event);
  }
  const Event event = free_events_.back();
  Status status =
      to_status(in([&](const Api& api) { return api.event_record(event, stream_of(stream)); }), "cuEventRecord");
  if (!status.is_ok()) return status;
  free_events_.pop_back();
  ticket = {++last_ticket_};
  marks_[stream].push_back({ticket, event});
  ++tickets_;
  return status;
}

std::shared_ptr<void> CudaDevice::make_current() { return std::make_shared<Current>(*this); }

std::size_t CudaDevice::poll(std::span<TicketDone> done) {
  std::size_t count = 0;
  if (tickets_ == 0) return 0;
  if (health_.is_ok()) {
    if (const Status status = driver_->check_process(); !status.is_ok()) health_ = status;
  }
  if (health_.is_ok()) {
    const Current in(*this);
    for (auto& [stream, marks] : marks_) {
      while (!marks.empty() && count < done.size() && health_.is_ok()) {
        const Mark mark = marks.front();
        const Result result = in([&](const Api& api) { return api.event_query(mark.event); });
        if (result == kNotReady) break;
        if (result != kSuccess) {
          // Whatever it says: of this event nothing will be known.
          const Status status = to_status(result, "cuEventQuery");
          if (health_.is_ok()) health_ = status;
          break;
        }
        marks.pop_front();
        free_events_.push_back(mark.event);
        done[count++] = {mark.ticket, Status::ok()};
        --tickets_;
      }
    }
  }
  if (health_.is_ok()) return count;
  for (auto& [stream, marks] : marks_) {
    for (; !marks.empty() && count < done.size(); marks.pop_front(), --tickets_) {
      done[count++] = {marks.front().ticket, health_};
    }
  }
  return count;
}

Status CudaDevice::is_capturing(ForeignStream stream, bool& answer) {
  if (Status status = ready(); !status.is_ok()) return status;
  const Current in(*this);
  int state = kCaptureNone;
  Status status = to_status(
      in([&](const Api& api) { return api.stream_is_capturing(reinterpret_cast<Stream>(stream.value), &state); }),
      "cuStreamIsCapturing");
  answer = state != kCaptureNone;
  return status;
}

std::unique_ptr<Device> open_device(DeviceId id) { return std::make_unique<CudaDevice>(Driver::open(), id); }

PointerKind CudaDevice::kind_of(std::uint64_t address) {
  if (!ready().is_ok()) return PointerKind::kUnknown;
  const Current in(*this);
  unsigned type = 0;
  unsigned is_managed = 0;
  const auto attribute = [&](void* value, int which) {
    return in([&](const Api& api) { return api.pointer_get_attribute(value, which, address); });
  };
  if (attribute(&is_managed, kPointerIsManaged) == kSuccess && is_managed != 0) return PointerKind::kManaged;
  if (attribute(&type, kPointerMemoryType) != kSuccess) return PointerKind::kUnknown;
  if (type == kMemoryTypeDevice) return PointerKind::kDevice;
  return type == kMemoryTypeHost ? PointerKind::kPinned : PointerKind::kUnknown;
}

}  // namespace herring::cuda
