#include "bindings/tensorflow/registry.h"

#include <atomic>

#include "bindings/tensorflow/status.h"
#include "core/status.h"

namespace herring::tensorflow_binding {
namespace {

std::atomic<StreamOf>& stream_of() {
  static std::atomic<StreamOf> one = nullptr;
  return one;
}

void infer_nothing(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

}  // namespace

void define(const char* op, bool is_stateful, std::initializer_list<const char*> inputs, const char* output,
            std::initializer_list<const char*> attrs) {
  TF_OpDefinitionBuilder* const builder = TF_NewOpDefinitionBuilder(op);
  for (const char* attr : attrs) TF_OpDefinitionBuilderAddAttr(builder, attr);
  for (const char* input : inputs) TF_OpDefinitionBuilderAddInput(builder, input);
  TF_OpDefinitionBuilderAddOutput(builder, output);
  if (is_stateful) TF_OpDefinitionBuilderSetIsStateful(builder, true);  // It does not look at its argument.
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, &infer_nothing);
  const TfStatus status = new_status();
  TF_RegisterOpDefinition(builder, status.get());
}

void register_kernel(const char* op, TF_KernelBuilder* builder, std::initializer_list<const char*> on_host) {
  for (const char* argument : on_host) TF_KernelBuilder_HostMemory(builder, argument);
  const TfStatus status = new_status();
  TF_RegisterKernelBuilder(op, builder, status.get());
}

void serve(const char* op, Create create, Compute compute, Destroy destroy) {
  register_kernel(op, TF_NewKernelBuilder(op, "CPU", create, compute, destroy));
}

void serve_gpu(const char* op, Create create, Compute compute, Destroy destroy,
               std::initializer_list<const char*> on_host) {
  register_kernel(op, TF_NewKernelBuilder(op, "GPU", create, compute, destroy), on_host);
}

void set_stream_of(StreamOf find) { stream_of() = find; }

GpuStream stream_of_kernel(TF_OpKernelContext* context) {
  GpuStream stream;
  if (stream_of().load()(context, &stream) != 0) return stream;
  throw Error(Code::kUnavailable,
              "Herring cannot find TensorFlow's stream on this device; set HERRING_TENSORFLOW_STREAM=off");
}

}  // namespace herring::tensorflow_binding
