#include "peers.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

#include "backend.h"
#include "core/operation.h"
#include "cuda/open.h"
#include "work.h"

namespace herring::torch_binding {

PeerSeat::PeerSeat(std::shared_ptr<runtime::Communicator> runtime, std::shared_ptr<HostMemory> memory,
                   PeerSettings settings, GroupId group, std::string name, std::vector<std::uint32_t> ranks)
    : runtime_(std::move(runtime)),
      memory_(std::move(memory)),
      settings_(std::move(settings)),
      group_id_(group),
      name_(std::move(name)),
      ranks_(std::move(ranks)) {
  if (settings_.mode == PeerSettings::Mode::kHost) return;
  if (!has_peer_groups(group_id_)) obstacle_ = "the job has too many process groups";
  places_ = runtime::peer_places(ranks_, runtime_->worker_hosts(), runtime_->rank(), obstacle_);
  if (obstacle_.empty()) groups_ = std::make_shared<runtime::PeerGroups>(runtime_, group_id_, places_, is_nccl());
}

PeerSeat::~PeerSeat() = default;

bool PeerSeat::takes(const OpDescriptor& descriptor, c10::Device device, std::chrono::milliseconds timeout) {
  // What a mean of integers is, NCCL decides.
  const bool is_integer = descriptor.dtype == DataType::kInt32 || descriptor.dtype == DataType::kInt64;
  if (is_nccl() && is_integer && descriptor.reduce == ReduceOp::kAverage) return false;
  return runtime::PeerGroup::takes(descriptor, false) && open(device, timeout) &&
         runtime::PeerGroup::takes(descriptor, has_network_);
}

bool PeerSeat::open(c10::Device device, std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kNever) return false;
  if (state_ == State::kOpen) {
    TORCH_CHECK_VALUE(device.index() == device_, "herring: process group '", name_, "' reduces on GPU ",
                      static_cast<int>(device_), " of this process (HERRING_ON_HOST), got a tensor on ", device);
    return true;
  }
  if (!obstacle_.empty()) {
    state_ = State::kNever;
    if (settings_.is_strict() && ranks_.size() > 1) {
      TORCH_WARN("herring: process group '", name_,
                 "' is not reduced on its GPUs as HERRING_ON_HOST=", is_nccl() ? "nccl" : "device",
                 " asks: ", obstacle_, "; it is reduced on the host");
    }
    return false;
  }
  runtime::PeerGroup::Options options;
  options.runtime = runtime_;
  options.group = group_id_;
  options.places = places_;
  options.groups = groups_;
  options.memory_bytes = settings_.memory_bytes;
  options.blocks = settings_.blocks;
  options.timeout = timeout;
  options.host_memory = [this, device](std::size_t bytes) {
    return memory_->take(std::max(bytes, HostMemory::kLeastBytes), device);
  };
  options.open = [device](StreamHandle& in, StreamHandle& back) {
    const DeviceId id{static_cast<std::uint32_t>(device.index())};
    std::unique_ptr<Device> gpu = device.is_cuda() ? cuda::open_device(id) : cuda::open_plug_in(id);
    const CopyStreams streams = CopyStreams::of(device);
    in = gpu->adopt_stream(native_stream(streams.out));
    back = gpu->adopt_stream(native_stream(streams.back));
    return gpu;
  };
  const OnDevice on_device(device);
  try {
    if (is_nccl()) options.library = cuda::open_nccl(settings_.nccl);
    group_ = runtime::PeerGroup::open(std::move(options));
  } catch (const Error& error) {
    if (settings_.is_strict() || error.status().code() != Code::kUnavailable) {
      std::rethrow_exception(to_exception("HERRING_ON_HOST", error.status()));
    }
    TORCH_WARN("herring: process group '", name_, "' is reduced on the host: ", error.status().message());
    state_ = State::kNever;
    return false;
  }
  device_ = device.index();
  has_network_ = places_.others.size() > 1;
  state_ = State::kOpen;
  return true;
}

Status PeerSeat::submit(Instant now, runtime::PeerGroup::Job job) {
  const std::lock_guard lock(mutex_);
  return group_->submit(now, std::move(job));
}

bool PeerSeat::run(Instant now) {
  const std::lock_guard lock(mutex_);
  return group_ && group_->run(now);
}

runtime::Awaited PeerSeat::awaited() {
  const std::lock_guard lock(mutex_);
  return group_ ? group_->awaited() : runtime::Awaited{};
}

void PeerSeat::close(const Status& why) {
  const std::lock_guard lock(mutex_);
  if (group_) group_->close(why);
}

void PeerSeat::leave() {
  const std::lock_guard lock(mutex_);
  if (groups_) groups_->leave();
  state_ = State::kNever;
}

PeerWork::PeerWork(std::shared_ptr<runtime::Communicator> runtime, int rank, const char* title,
                   const at::Tensor& tensor, const OpDescriptor& descriptor, std::chrono::milliseconds timeout,
                   std::shared_ptr<PeerSeat> seat, std::shared_ptr<void> ticket)
    : DeviceWork(std::move(runtime), rank, c10d::OpType::ALLREDUCE, title, tensor.device(), {tensor},
                 std::move(ticket)),
      tensor_(tensor.detach()),
      dense_(tensor_.contiguous()),
      descriptor_(descriptor),
      timeout_(timeout),
      seat_(std::move(seat)),
      ready_(tensor.device().type()) {
  ready_.record(current_stream(tensor.device(), title));
}

bool PeerWork::try_start(std::chrono::steady_clock::time_point now) {
  const OnDevice on_device(device());
  const auto end_with = [this](const Status& status) {
    const std::lock_guard lock(end_mutex_);
    end_ = status;
  };
  const auto release = [this] {
    const std::lock_guard lock(end_mutex_);
    is_released_ = true;
  };
  runtime::PeerGroup::Job job;
  job.descriptor = descriptor_;
  job.tensor = {reinterpret_cast<std::uint64_t>(dense_.data_ptr()), dense_.nbytes()};
  job.timeout = timeout_;
  job.before = [this] { ready_.block(streams().out); };
  job.complete = end_with;
  job.release = release;
  if (const Status status = seat_->submit(now, std::move(job)); !status.is_ok()) {
    end_with(status);
    release();
  }
  tell_end();
  return true;
}

bool PeerWork::turn(std::chrono::steady_clock::time_point now) {
  const OnDevice on_device(device());
  const bool has_moved = !is_released() && seat_->run(now);
  return tell_end() || has_moved;
}

bool PeerWork::is_released() {
  const std::lock_guard lock(end_mutex_);
  return is_released_;
}

bool PeerWork::tell_end() {
  std::optional<Status> end;
  {
    const std::lock_guard lock(end_mutex_);
    end = end_;
  }
  if (!end || is_submitted()) return false;
  std::exception_ptr error;
  try {
    if (!end->is_ok()) std::rethrow_exception(to_exception(title(), *end));
    if (!dense_.is_same(tensor_)) {
      const c10::StreamGuard on_stream(streams().back);
      tensor_.copy_(dense_, true);
    }
    written_.emplace(device().type());
    written_->record(streams().back);
  } catch (...) {
    error = std::current_exception();
  }
  finish_with(std::move(error));
  return true;
}

bool PeerWork::is_written() {
  const OnDevice on_device(device());
  try {
    return !written_ || written_->query();
  } catch (...) {
    return true;  // The device failed: nothing is copied any more.
  }
}

bool PeerWork::is_over() { return is_released() && is_submitted() && is_written(); }

void PeerWork::synchronize() {
  if (written_) written_->block(c10::impl::VirtualGuardImpl(device().type()).getStream(device()));
}

Backend::WorkPtr Backend::peer_allreduce(c10::Device device, const Tensors& tensors,
                                         const c10d::AllreduceOptions& options) {
  constexpr const char* kTitle = "herring:all_reduce";
  if (tensors.size() != 1 || process_->peers.mode == PeerSettings::Mode::kHost) return nullptr;
  check_accelerator(device, kTitle);
  const std::optional<OpDescriptor> descriptor = describe_reduction(tensors[0], options.reduceOp);
  if (!descriptor) return nullptr;
  const Millis timeout = time_limit(options.timeout);
  static_cast<void>(current_stream(device, kTitle));  // Refuses a capture.
  if (!peers_->takes(*descriptor, device, timeout)) return nullptr;
  ++sequence_;
  return hand_to_stager(c10::make_intrusive<PeerWork>(process_->runtime, rank_, kTitle, tensors[0], *descriptor,
                                                      timeout, peers_, take_ticket()));
}

}  // namespace herring::torch_binding
