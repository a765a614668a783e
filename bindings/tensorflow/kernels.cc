#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/tensorflow/pending.h"
#include "bindings/tensorflow/tf_c_api.h"

/// TensorFlow's operations of Herring.
///
///   token = HerringBegin()               stateful: a call in a graph is in its place, and nothing after it is constant
///   handle = HerringSubmit(value, token) starts one operation and does not wait
///   results = HerringWait(handles)       stateful: waits for all of them
///
/// TensorFlow runs stateful operations of a graph one after the other, in the order of the program, and others when
/// their inputs are there. So gradients are submitted as they come out of the backward pass, and calls end in the same
/// order on every rank, which one inter-op thread can keep up with.
namespace herring::tensorflow_binding {
namespace {

struct DeleteStatus {
  void operator()(TF_Status* status) const { TF_DeleteStatus(status); }
};
using TfStatus = std::unique_ptr<TF_Status, DeleteStatus>;

TfStatus new_status() { return TfStatus(TF_NewStatus()); }
bool is_ok(const TfStatus& status) { return TF_GetCode(status.get()) == TF_OK; }

std::optional<DataType> dtype_of(TF_DataType dtype) {
  switch (dtype) {
    case TF_FLOAT:
      return DataType::kFloat32;
    case TF_DOUBLE:
      return DataType::kFloat64;
    case TF_HALF:
      return DataType::kFloat16;
    case TF_BFLOAT16:
      return DataType::kBFloat16;
    case TF_INT8:
      return DataType::kInt8;
    case TF_INT16:
      return DataType::kInt16;
    case TF_INT32:
      return DataType::kInt32;
    case TF_INT64:
      return DataType::kInt64;
    case TF_UINT8:
      return DataType::kUInt8;
    case TF_BOOL:
      return DataType::kBool;
  }
  return std::nullopt;
}

TF_Code code_of(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return TF_INVALID_ARGUMENT;
    case Code::kMismatch:
    case Code::kShutdown:
    case Code::kNotFinite:
      return TF_FAILED_PRECONDITION;
    case Code::kTimeout:
      return TF_DEADLINE_EXCEEDED;
    case Code::kPeerLost:
    case Code::kTransport:
      return TF_ABORTED;  // TensorFlow makes Unavailable, of operations that it does not know, an internal error.
    case Code::kCancelled:
      return TF_CANCELLED;
    case Code::kCorrupted:
      return TF_DATA_LOSS;
    default:
      return TF_INTERNAL;
  }
}

void fail(TF_OpKernelContext* context, TF_Code code, const std::string& text) {
  const TfStatus status = new_status();
  TF_SetStatus(status.get(), code, text.c_str());
  TF_OpKernelContext_Failure(context, status.get());
}

/// The node's attributes.
struct Settings {
  std::string name;
  Collective collective = Collective::kAllReduce;
  ReduceOp reduce = ReduceOp::kSum;
  std::uint32_t root = 0;
};

std::string string_attr(TF_OpKernelConstruction* context, const char* attr, TF_Status* status) {
  std::int32_t entries = 0;
  std::int32_t bytes = 0;
  TF_OpKernelConstruction_GetAttrSize(context, attr, &entries, &bytes, status);
  if (TF_GetCode(status) != TF_OK || bytes <= 0) return {};
  std::string value(static_cast<std::size_t>(bytes), '\0');
  TF_OpKernelConstruction_GetAttrString(context, attr, value.data(), value.size(), status);
  return value;
}

std::int64_t number_attr(TF_OpKernelConstruction* context, const char* attr, TF_Status* status) {
  std::int64_t value = 0;
  TF_OpKernelConstruction_GetAttrInt64(context, attr, &value, status);
  return value;
}

void* create_submit(TF_OpKernelConstruction* context) {
  auto settings = std::make_unique<Settings>();
  const TfStatus status = new_status();
  settings->name = string_attr(context, "tensor_name", status.get());
  if (is_ok(status)) {
    settings->collective = static_cast<Collective>(number_attr(context, "collective", status.get()));
  }
  if (is_ok(status)) settings->reduce = static_cast<ReduceOp>(number_attr(context, "reduce", status.get()));
  if (is_ok(status)) settings->root = static_cast<std::uint32_t>(number_attr(context, "root", status.get()));
  if (!is_ok(status)) TF_OpKernelConstruction_Failure(context, status.get());
  return settings.release();
}

void delete_submit(void* settings) { delete static_cast<Settings*>(settings); }

/// The operation that a node asks for, from the tensor that it has.
runtime::Request request_of(const Settings& settings, const Pending& pending, DataType dtype) {
  const TF_Tensor* input = pending.input.get();
  const std::size_t bytes = TF_TensorByteSize(input);
  runtime::Request request;
  if (!settings.name.empty()) request.name = settings.name;
  request.descriptor.collective = settings.collective;
  request.descriptor.dtype = dtype;
  request.descriptor.reduce = settings.reduce;
  request.descriptor.root = settings.root;
  request.descriptor.op_bytes = bytes;
  const int dims = TF_NumDims(input);
  if (dims <= static_cast<int>(kMaxDims)) {
    request.descriptor.dims = static_cast<std::uint8_t>(dims);
    for (int i = 0; i < dims; ++i) request.descriptor.shape[i] = static_cast<std::uint64_t>(TF_Dim(input, i));
  } else {
    request.descriptor.dims = 1;
    request.descriptor.shape[0] = bytes / element_bytes(dtype);
  }
  request.input = {static_cast<const std::byte*>(TF_TensorData(input)), bytes};
  request.output = {static_cast<std::byte*>(TF_TensorData(pending.output.get())), bytes};
  return request;
}

void submit(void* kernel, TF_OpKernelContext* context) {
  const Settings& settings = *static_cast<Settings*>(kernel);
  const TfStatus status = new_status();
  const auto pending = std::make_shared<Pending>();
  TF_Tensor* input = nullptr;
  TF_GetInput(context, 0, &input, status.get());
  if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
  pending->input.reset(input);
  pending->name = settings.name;
  const std::optional<DataType> dtype = dtype_of(TF_TensorType(input));
  if (!dtype) {
    return fail(context, TF_UNIMPLEMENTED,
                "herring: " + std::string(name(settings.collective)) + " \"" + settings.name + "\": dtype " +
                    std::to_string(TF_TensorType(input)) + " of TensorFlow is not served");
  }
  const std::shared_ptr<runtime::Communicator> job = Process::instance().job();
  if (!job) {
    return fail(context, TF_FAILED_PRECONDITION,
                "herring: this process is in no job; call herring.tensorflow.init() before, in this process");
  }
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(TF_NumDims(input)));
  for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = TF_Dim(input, static_cast<int>(i));
  pending->output.reset(
      TF_AllocateTensor(TF_TensorType(input), sizes.data(), static_cast<int>(sizes.size()), TF_TensorByteSize(input)));
  if (!pending->output) {
    return fail(context, TF_RESOURCE_EXHAUSTED,
                "herring: no memory for a result of " + std::to_string(TF_TensorByteSize(input)) + " bytes");
  }
  TF_Tensor* const handle = TF_AllocateOutput(context, 0, TF_INT64, nullptr, 0, sizeof(std::int64_t), status.get());
  if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
  const Tensor owned(handle);
  pending->work = job->submit(request_of(settings, *pending, *dtype));
  const std::int64_t number = Process::instance().add(pending);
  std::memcpy(TF_TensorData(handle), &number, sizeof(number));
}

void* create_nothing(TF_OpKernelConstruction*) { return nullptr; }
void delete_nothing(void*) {}

void wait(void*, TF_OpKernelContext* context) {
  const TfStatus status = new_status();
  const int count = TF_NumInputs(context);
  std::vector<std::shared_ptr<Pending>> all(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    TF_Tensor* handle = nullptr;
    TF_GetInput(context, i, &handle, status.get());
    if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
    const Tensor owned(handle);
    std::int64_t number = 0;
    std::memcpy(&number, TF_TensorData(handle), sizeof(number));
    all[static_cast<std::size_t>(i)] = Process::instance().take(number);
  }
  std::string failed;
  TF_Code code = TF_OK;
  for (int i = 0; i < count; ++i) {
    const std::shared_ptr<Pending>& pending = all[static_cast<std::size_t>(i)];
    if (!pending) {
      if (failed.empty()) failed = "herring: this operation was waited for before, or belonged to another job";
      code = code == TF_OK ? TF_FAILED_PRECONDITION : code;
      continue;
    }
    if (code != TF_OK) {  // The first failure ends the step.
      drop(pending);
      continue;
    }
    pending->work->wait(Instant::max());
    if (const Status outcome = pending->work->status(); !outcome.is_ok()) {
      code = code_of(outcome.code());
      failed = "herring: " + (pending->name.empty() ? "" : "\"" + pending->name + "\": ") + outcome.to_string();
      continue;
    }
    TF_SetOutput(context, i, pending->output.get(), status.get());
    if (!is_ok(status)) {
      code = TF_GetCode(status.get());
      failed = TF_Message(status.get());
    }
  }
  if (code != TF_OK) fail(context, code, failed);
}

void begin(void*, TF_OpKernelContext* context) {
  const TfStatus status = new_status();
  const Tensor token(TF_AllocateOutput(context, 0, TF_INT64, nullptr, 0, sizeof(std::int64_t), status.get()));
  if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
  std::memset(TF_TensorData(token.get()), 0, sizeof(std::int64_t));
}

void infer_nothing(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

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

void serve(const char* op, void* (*create)(TF_OpKernelConstruction*), void (*compute)(void*, TF_OpKernelContext*),
           void (*destroy)(void*)) {
  const TfStatus status = new_status();
  TF_RegisterKernelBuilder(op, TF_NewKernelBuilder(op, "CPU", create, compute, destroy), status.get());
}

/// When the library is loaded, which is what tf.load_op_library asks for.
[[maybe_unused]] const bool kIsRegistered = [] {
  define("HerringBegin", true, {}, "token: int64", {});
  define("HerringSubmit", false, {"value: T", "token: int64"}, "handle: int64",
         {"T: type", "tensor_name: string", "collective: int", "reduce: int", "root: int"});
  define("HerringWait", true, {"handles: N * int64"}, "results: T", {"N: int >= 1", "T: list(type) >= 1"});
  serve("HerringBegin", &create_nothing, &begin, &delete_nothing);
  serve("HerringSubmit", &create_submit, &submit, &delete_submit);
  serve("HerringWait", &create_nothing, &wait, &delete_nothing);
  return true;
}();

}  // namespace
}  // namespace herring::tensorflow_binding

extern "C" {

/// `job` points to a std::shared_ptr<herring::runtime::Communicator>: what the capsule of _core.Runtime holds.
__attribute__((visibility("default"))) void herring_tensorflow_attach(void* job) {
  using herring::runtime::Communicator;
  herring::tensorflow_binding::Process::instance().attach(*static_cast<std::shared_ptr<Communicator>*>(job));
}

/// Operations that were submitted and not waited for.
__attribute__((visibility("default"))) std::uint64_t herring_tensorflow_pending() {
  return herring::tensorflow_binding::Process::instance().size();
}
}
