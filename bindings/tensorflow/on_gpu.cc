#include "bindings/tensorflow/on_gpu.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "core/log.h"
#include "core/seconds_text.h"
#include "cuda/open.h"

namespace herring::tensorflow_binding {
namespace {

using runtime::DeviceCopies;

ForeignStream foreign(const GpuStream& stream) { return {stream.stream}; }

/// Of a copy that has not ended in time.
Status late(const std::string& what, const GpuStream& stream, Duration limit) {
  return {Code::kTimeout, what + " on GPU " + std::to_string(stream.device) + " was not ready after " +
                              round_seconds_text(limit) + ": a kernel that was submitted before it has not ended"};
}

}  // namespace

Logger& log() {
  static auto* const one = new Logger(LoggerOptions{});  // Never destroyed: kernels may run while the process exits.
  return *one;
}

std::shared_ptr<DeviceCopies> copies_of(const GpuStream& stream) {
  const DeviceId id{static_cast<std::uint32_t>(stream.device)};
  if (stream.is_plug_in != 0) return DeviceCopies::of("plug-in", id, &cuda::open_plug_in);
  return DeviceCopies::of("cuda", id, &cuda::open_device);
}

std::shared_ptr<std::byte> take_pinned(runtime::PinnedMemory& memory, std::size_t bytes,
                                       const std::shared_ptr<DeviceCopies>& device) {
  Status why_not;
  std::shared_ptr<std::byte> host = memory.take(bytes, device, why_not);
  if (!why_not.is_ok()) log().log(LogLevel::kWarning, why_not.message() + "; copies from and to GPUs are slower");
  return host;
}

OnGpu::OnGpu(const GpuStream& stream, runtime::PinnedMemory& memory, Tensor input, Tensor output, Duration limit)
    : stream_(stream), device_(copies_of(stream)), bytes_(TF_TensorByteSize(input.get())), limit_(limit) {
  held_->input = std::move(input);
  held_->output = std::move(output);
  if (bytes_ == 0) return;
  held_->host = take_pinned(memory, bytes_, device_);
  if (held_->host) {
    way_ = DeviceCopies::Way::kOut;
  } else {
    held_->host = std::shared_ptr<std::byte>(new std::byte[bytes_], std::default_delete<std::byte[]>());
  }
  out_.emplace(device_, way_);
  Status status;
  if (is_out(status)) status.or_throw();
  deadline_.reset();
}

DeviceSpan OnGpu::span_of(const Tensor& tensor) const {
  return {reinterpret_cast<std::uint64_t>(TF_TensorData(tensor.get())), bytes_};
}

bool OnGpu::is_late(Instant now) {
  if (!deadline_) deadline_ = deadline_after(now, limit_);
  return now >= *deadline_;
}

bool OnGpu::is_out(Status& status) {
  if (bytes_ == 0) return true;
  const bool is_over_time = is_late(std::chrono::steady_clock::now());
  if (stage_ == Stage::kFirst) {
    status = out_->after(foreign(stream_));
    if (status.is_ok()) status = out_->to_host(host(), span_of(held_->input), held_);
    if (status.is_ok()) stage_ = Stage::kOut;
    if (!status.is_ok() && !status.is_again()) return true;
  }
  if (stage_ == Stage::kOut && out_->has_ended(status)) {
    stage_ = Stage::kHost;
    held_->input.reset();
    deadline_.reset();
  }
  if (stage_ > Stage::kOut) return true;
  if (is_over_time) status = late("the tensor", stream_, limit_);
  return is_over_time;
}

bool OnGpu::is_back(Status& status) {
  if (bytes_ == 0 || stage_ == Stage::kLast) return true;
  const bool is_over_time = is_late(std::chrono::steady_clock::now());
  status = stage_ == Stage::kHost ? start_back() : Status::ok();
  // Where it is not pinned, looking begins the copy.
  const bool is_there = way_ == DeviceCopies::Way::kOut || !status.is_ok() || back_->has_ended(status);
  if (is_there && status.is_ok()) status = back_->before(foreign(stream_));
  if (is_there && !status.is_again()) {
    if (status.is_ok()) output_ = std::move(held_->output);
    stage_ = Stage::kLast;
    return true;
  }
  if (is_over_time) status = late("the result", stream_, limit_);
  return is_over_time;
}

Status OnGpu::start_back() {
  try {
    back_.emplace(device_, is_in_line() ? DeviceCopies::Way::kBack : DeviceCopies::Way::kOwn);
  } catch (const Error& error) {
    return error.status();
  }
  stage_ = Stage::kBack;
  return back_->to_device(span_of(held_->output), host(), held_);
}

Status put_on_gpu(const GpuStream& stream, std::span<std::byte> host, const TF_Tensor* there, Duration limit,
                  std::shared_ptr<void> owner) {
  if (host.empty()) return Status::ok();
  constexpr std::chrono::microseconds kNap(20);
  const Instant deadline = deadline_after(std::chrono::steady_clock::now(), limit);
  DeviceCopies::Queue queue(copies_of(stream));
  Status status = queue.after(foreign(stream));
  while (status.is_again() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kNap);
    status = queue.after(foreign(stream));
  }
  if (status.is_again()) return late("a result", stream, limit);
  if (!status.is_ok()) return status;
  const DeviceSpan to{reinterpret_cast<std::uint64_t>(TF_TensorData(there)), host.size()};
  status = queue.to_device(to, host, std::move(owner));
  if (status.is_ok() && !queue.wait(deadline, status)) status = late("a result", stream, limit);
  return status;
}

}  // namespace herring::tensorflow_binding
