#pragma once

#include "cuda/device.h"

namespace herring::cuda {

/// The device's context for as long as it lives. Whatever this thread asks of the driver meanwhile does not disturb
/// another thread's capture of a graph.
class CudaDevice::Current final {
 public:
  explicit Current(const CudaDevice& device) : api_(device.driver_->api()) {
    result_ = api_.ctx_push_current(device.context_);
    if (result_ == kSuccess) static_cast<void>(api_.exchange_capture_mode(&mode_));
  }
  ~Current() {
    if (result_ != kSuccess) return;
    static_cast<void>(api_.exchange_capture_mode(&mode_));
    Context popped = nullptr;
    static_cast<void>(api_.ctx_pop_current(&popped));
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  /// What `call` gives, in the context; what pushing gave where that failed.
  template <class Call>
  Result operator()(Call call) const {
    return result_ == kSuccess ? call(api_) : result_;
  }

 private:
  const Api& api_;
  Result result_ = kSuccess;
  int mode_ = kCaptureModeRelaxed;
};

}  // namespace herring::cuda
