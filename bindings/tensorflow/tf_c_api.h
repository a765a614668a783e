#pragma once

#include <cstddef>
#include <cstdint>

/// What the binding uses of TensorFlow's stable C ABI for operations and kernels (tensorflow/c/{kernels,ops,tf_tensor,
/// tf_status}.h), declared by hand: one binary serves every release that has these functions, and is built where no
/// TensorFlow is.
extern "C" {

struct TF_AsyncOpKernelDoneCallback;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_ShapeInferenceContext;
struct TF_Status;
struct TF_Tensor;

enum TF_DataType : int {
  TF_FLOAT = 1,
  TF_DOUBLE = 2,
  TF_INT32 = 3,
  TF_UINT8 = 4,
  TF_INT16 = 5,
  TF_INT8 = 6,
  TF_INT64 = 9,
  TF_BOOL = 10,
  TF_BFLOAT16 = 14,
  TF_HALF = 19,
};

enum TF_Code : int {
  TF_OK = 0,
  TF_CANCELLED = 1,
  TF_INVALID_ARGUMENT = 3,
  TF_DEADLINE_EXCEEDED = 4,
  TF_RESOURCE_EXHAUSTED = 8,
  TF_FAILED_PRECONDITION = 9,
  TF_ABORTED = 10,
  TF_UNIMPLEMENTED = 12,
  TF_INTERNAL = 13,
  TF_DATA_LOSS = 15,
};

struct TF_AllocatorAttributes {
  std::size_t struct_size;
  unsigned char on_host;  ///< Where the kernel runs on a GPU.
};

TF_Status* TF_NewStatus();
void TF_DeleteStatus(TF_Status* status);
void TF_SetStatus(TF_Status* status, TF_Code code, const char* text);
TF_Code TF_GetCode(const TF_Status* status);
const char* TF_Message(const TF_Status* status);

TF_Tensor* TF_AllocateTensor(TF_DataType dtype, const std::int64_t* sizes, int dims, std::size_t bytes);
TF_Tensor* TF_NewTensor(TF_DataType dtype, const std::int64_t* sizes, int dims, void* data, std::size_t bytes,
                        void (*free)(void* data, std::size_t bytes, void* argument), void* argument);
void TF_DeleteTensor(TF_Tensor* tensor);
TF_DataType TF_TensorType(const TF_Tensor* tensor);
int TF_NumDims(const TF_Tensor* tensor);
std::int64_t TF_Dim(const TF_Tensor* tensor, int dim);
std::size_t TF_TensorByteSize(const TF_Tensor* tensor);
void* TF_TensorData(const TF_Tensor* tensor);

TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* name);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder* builder, const char* spec);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder* builder, const char* spec);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder* builder, const char* spec);
void TF_OpDefinitionBuilderSetIsStateful(TF_OpDefinitionBuilder* builder, bool is_stateful);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder* builder,
                                                     void (*infer)(TF_ShapeInferenceContext*, TF_Status*));
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder* builder, TF_Status* status);
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext* context, TF_Status* status);

TF_KernelBuilder* TF_NewKernelBuilder(const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),
                                      void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*));
TF_KernelBuilder* TF_NewAsyncKernelBuilder(const char* op, const char* device,
                                           void* (*create)(TF_OpKernelConstruction*),
                                           void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*),
                                           void (*destroy)(void*));
void TF_KernelBuilder_HostMemory(TF_KernelBuilder* builder, const char* argument);
void TF_KernelBuilder_TypeConstraint(TF_KernelBuilder* builder, const char* attr, TF_DataType type, TF_Status* status);
void TF_RegisterKernelBuilder(const char* name, TF_KernelBuilder* builder, TF_Status* status);
void TF_OpKernelConstruction_GetAttrSize(TF_OpKernelConstruction* context, const char* attr, std::int32_t* entries,
                                         std::int32_t* bytes, TF_Status* status);
void TF_OpKernelConstruction_GetAttrString(TF_OpKernelConstruction* context, const char* attr, char* value,
                                           std::size_t limit, TF_Status* status);
void TF_OpKernelConstruction_GetAttrInt64(TF_OpKernelConstruction* context, const char* attr, std::int64_t* value,
                                          TF_Status* status);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction* context, TF_Status* status);

int TF_NumInputs(TF_OpKernelContext* context);
int TF_NumOutputs(TF_OpKernelContext* context);
std::int64_t TF_GetIterId(TF_OpKernelContext* context);
void TF_GetInput(TF_OpKernelContext* context, int index, TF_Tensor** tensor, TF_Status* status);
void TF_SetOutput(TF_OpKernelContext* context, int index, const TF_Tensor* tensor, TF_Status* status);
TF_Tensor* TF_AllocateOutput(TF_OpKernelContext* context, int index, TF_DataType dtype, const std::int64_t* sizes,
                             int dims, std::size_t bytes, TF_Status* status);
TF_Tensor* TF_AllocateTemp(TF_OpKernelContext* context, TF_DataType dtype, const std::int64_t* sizes, int dims,
                           TF_AllocatorAttributes* attributes, TF_Status* status);
void TF_OpKernelContext_Failure(TF_OpKernelContext* context, TF_Status* status);
}
