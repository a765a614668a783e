#include "handed.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

namespace herring::torch_binding {

bool Arrival::is_there() const {
  const std::lock_guard lock(mutex_);
  return is_there_;
}

bool Arrival::wait(std::chrono::duration<double> limit) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return is_there_; });
}

void Arrival::on_there(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_there_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

std::optional<Arrival::Failure> Arrival::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Arrival::come(std::optional<Failure> failure) {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    is_there_ = true;
    failure_ = std::move(failure);
    callbacks.swap(callbacks_);
  }
  changed_.notify_all();
  for (const auto& callback : callbacks) callback();
}

template <class IsRead>
bool Arrival::try_come(c10::Device device, std::chrono::steady_clock::time_point now,
                       std::chrono::steady_clock::time_point deadline, std::chrono::milliseconds timeout,
                       IsRead is_read) {
  std::optional<Failure> failure;
  const OnDevice on_device(device);
  try {
    if (!is_read()) {
      if (now < deadline) return false;
      failure = Failure{c10::str("the tensors were not ready on ", device, " within ", timeout.count(),
                                 " ms: a kernel that writes them has not ended"),
                        true};
    }
  } catch (const std::exception& error) {
    failure = Failure{c10::str("the copy from ", device, " failed: ", error.what()), false};
  }
  come(std::move(failure));
  return true;
}

Handed::Handed(const std::shared_ptr<Stager>& stager, std::shared_ptr<HostMemory> memory, c10::Device device,
               const std::string& call, std::chrono::milliseconds timeout)
    : stager_(stager),
      timeout_(timeout),
      deadline_(std::chrono::steady_clock::now() + timeout),
      mirror_(device, call, std::move(memory)) {}

void Handed::start() {
  const std::shared_ptr<Stager> stager = stager_.lock();
  TORCH_CHECK(stager, "herring: the stager has gone");
  mirror_.seal();
  stager->add(shared_from_this());
}

bool Handed::try_start(std::chrono::steady_clock::time_point now) {
  // After a time-out an unfinished copy still writes to host memory: the stager holds this until is_over().
  return arrival_.try_come(mirror_.device(), now, deadline_, timeout_, [this] { return mirror_.is_read(); });
}

void Handed::write_back() {
  {
    const std::lock_guard lock(mutex_);
    mirror_.write_back();
    has_left_ = true;
  }
  Stager::keep(stager_, shared_from_this(), mirror_.streams().back);
}

bool Handed::is_written() const {
  const std::lock_guard lock(mutex_);
  return has_left_ && mirror_.is_written();
}

at::Tensor Handed::place(const at::Tensor& host) {
  at::Tensor tensor = at::empty(host.sizes(), host.options().device(mirror_.device()).pinned_memory(false));
  {
    const std::lock_guard lock(mutex_);
    tensor.copy_(host, true);
    placed_from_.push_back(host);
    placed_.emplace(mirror_.device().type());
    placed_->record(c10::impl::VirtualGuardImpl(mirror_.device().type()).getStream(mirror_.device()));
  }
  Stager::keep(stager_, shared_from_this(),
               c10::impl::VirtualGuardImpl(mirror_.device().type()).getStream(mirror_.device()));
  return tensor;
}

bool Handed::is_over() {
  const std::lock_guard lock(mutex_);
  const OnDevice on_device(mirror_.device());
  try {
    return mirror_.is_read() && mirror_.is_written() && (!placed_ || placed_->query());
  } catch (...) {
    return true;  // The device failed: nothing is copied any more.
  }
}

Moment::Moment(c10::Device device) : device_(device), event_(device.type()) {
  event_.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void Moment::block_current_stream() const {
  event_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

}  // namespace herring::torch_binding
