#pragma once

#include <initializer_list>

#include "bindings/tensorflow/gpu_stream.h"
#include "bindings/tensorflow/tf_c_api.h"

/// How operations and kernels are told to TensorFlow.
namespace herring::tensorflow_binding {

/// What is served.
inline constexpr TF_DataType kTypes[] = {TF_FLOAT, TF_DOUBLE, TF_HALF,  TF_BFLOAT16, TF_INT8,
                                         TF_INT16, TF_INT32,  TF_INT64, TF_UINT8,    TF_BOOL};

/// The same, as an operation says it.
inline constexpr const char* kTypesAttr = "T: {float, double, half, bfloat16, int8, int16, int32, int64, uint8, bool}";

using Create = void* (*)(TF_OpKernelConstruction*);
using Compute = void (*)(void*, TF_OpKernelContext*);
using Destroy = void (*)(void*);

/// Of kernels without settings.
inline void* create_nothing(TF_OpKernelConstruction*) { return nullptr; }
inline void delete_nothing(void*) {}

void define(const char* op, bool is_stateful, std::initializer_list<const char*> inputs, const char* output,
            std::initializer_list<const char*> attrs);
void register_kernel(const char* op, TF_KernelBuilder* builder, std::initializer_list<const char*> on_host = {});
void serve(const char* op, Create create, Compute compute, Destroy destroy);
/// On a GPU: arguments and results in memory of the host, but for those that are not named.
void serve_gpu(const char* op, Create create, Compute compute, Destroy destroy,
               std::initializer_list<const char*> on_host);

/// Where TensorFlow's tensors on GPUs are taken as they are: how to find the stream. Null: they are not.
void set_stream_of(StreamOf find);
/// Of a kernel on a GPU. Throws Error.
GpuStream stream_of_kernel(TF_OpKernelContext* context);

}  // namespace herring::tensorflow_binding
