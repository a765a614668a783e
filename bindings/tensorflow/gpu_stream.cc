// Built by herring/tensorflow/_gpu_stream.py against the headers of the TensorFlow that it is for: what a kernel's
// context and a stream look like in memory differs by release, and so does what TensorFlow's own headers call of its
// library.
#include "gpu_stream.h"

#include <tensorflow/core/framework/device_base.h>
#include <tensorflow/core/framework/op_kernel.h>
#include <xla/stream_executor/stream.h>
#include <xla/stream_executor/stream_executor.h>

extern "C" __attribute__((visibility("default"))) int herring_stream_of(
    void* context, herring::tensorflow_binding::GpuStream* answer) {
  auto* const kernel = static_cast<tensorflow::OpKernelContext*>(context);
  tensorflow::DeviceContext* const device = kernel->op_device_context();
  if (device == nullptr) return 0;  // The CPU.
  stream_executor::Stream* const stream = device->stream();
  if (stream == nullptr) return 0;
  void* const handle = stream->platform_specific_handle().stream;
  if (handle == nullptr) return 0;  // A plug-in's device.
  *answer = {};
  answer->stream = reinterpret_cast<std::uint64_t>(handle);
  answer->device = stream->parent()->device_ordinal();
  return 1;
}
