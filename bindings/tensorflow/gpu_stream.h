#pragma once

#include <cstdint>

/// How the binding learns on which stream TensorFlow's kernels on a GPU come one after the other. TensorFlow's stable C
/// interface does not say it, so this is asked of code that is built for the one release: gpu_stream.cc.
namespace herring::tensorflow_binding {

struct GpuStream {
  std::uint64_t stream = 0;     ///< As the driver names it: CUstream.
  std::int32_t device = 0;      ///< The driver's ordinal in this process.
  std::int32_t is_plug_in = 0;  ///< Not CUDA's: of a device that a plug-in brings (cuda/open.h).
};

/// `context`: a kernel's TF_OpKernelContext. 0: that kernel runs on no such device.
using StreamOf = int (*)(void* context, GpuStream* answer);

}  // namespace herring::tensorflow_binding
