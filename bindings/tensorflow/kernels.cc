#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/tensorflow/composed.h"
#include "bindings/tensorflow/gpu_stream.h"
#include "bindings/tensorflow/pack.h"
#include "bindings/tensorflow/pending.h"
#include "bindings/tensorflow/registry.h"
#include "bindings/tensorflow/status.h"
#include "bindings/tensorflow/tf_c_api.h"
#include "bindings/tensorflow/waiting.h"
#include "runtime/callback_pool.h"

/// TensorFlow's operations of Herring.
///
///   token = HerringBegin()               stateful: a call in a graph is in its place, and nothing after it is constant
///   handle = HerringSubmit(value, token) starts one operation and does not wait
///   results = HerringWait(handles)       stateful: waits for all of them, starts the further steps of those that have
///   results = HerringWaitAside(handles)  the same, and holds no thread
///   packed = HerringPack(values), values = HerringUnpack(packed): many small ones as one (pack.h)
///   some number = HerringPlace()              stateful: rank, size and so on, when the graph runs
///
/// TensorFlow runs stateful operations of a graph one after the other, in the order of the program, and others when
/// their inputs are there. So gradients are submitted as they come out of the backward pass, and calls end in the same
/// order on every rank, which one inter-op thread can keep up with. In a session of TensorFlow 1 nothing has an order:
/// there, as many waits as TensorFlow has threads would keep it from submitting the rest, each rank another rest; so
/// they hold none.
///
/// Tokens and handles are of int32, which TensorFlow keeps in the host's memory wherever an operation runs.
///
/// On a GPU the same operations take and give memory of the host, which TensorFlow copies; or, where Herring is told
/// how to find TensorFlow's stream (gpu_stream.h), memory of the GPU: HerringSubmit starts the copy to the host then,
/// and HerringWait the operation when the copy has ended, and the copy back (on_gpu.h).
namespace herring::tensorflow_binding {
namespace {

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

/// The node's attributes.
struct Settings {
  std::string name;
  Collective collective = Collective::kAllReduce;
  ReduceOp reduce = ReduceOp::kSum;
  std::uint32_t root = 0;  ///< Within the group.
  std::uint32_t group = 0;
  bool has_key = false;           ///< Ranks find the operation by its key, also without a name (Horovod's).
  bool names_iterations = false;  ///< Of a loop that may run several at once, in any order.
  bool is_on_gpu = false;         ///< The tensor is in memory of the GPU.
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
  const auto number = [&](const char* attr) {
    return is_ok(status) ? number_attr(context, attr, status.get()) : std::int64_t{0};
  };
  settings->name = string_attr(context, "tensor_name", status.get());
  settings->collective = static_cast<Collective>(number("collective"));
  settings->reduce = static_cast<ReduceOp>(number("reduce"));
  settings->root = static_cast<std::uint32_t>(number("root"));
  settings->group = static_cast<std::uint32_t>(number("group"));
  settings->has_key = number("has_key") != 0;
  settings->names_iterations = number("names_iterations") != 0;
  if (!is_ok(status)) TF_OpKernelConstruction_Failure(context, status.get());
  return settings.release();
}

void* create_submit_on_gpu(TF_OpKernelConstruction* context) {
  void* const settings = create_submit(context);
  static_cast<Settings*>(settings)->is_on_gpu = true;
  return settings;
}

void delete_submit(void* settings) { delete static_cast<Settings*>(settings); }

/// One step: what goes into `input` comes out in `output`, both of this shape.
void start_one_step(const Settings& settings, const Call& call, const std::vector<std::int64_t>& shape,
                    std::span<const std::byte> input, std::span<std::byte> output, Pending& pending) {
  runtime::Request request;
  request.group = call.group;
  if (!call.wire_name.empty()) request.name = call.wire_name;
  request.descriptor = describe(settings.collective, call.dtype, settings.reduce, settings.root, shape);
  request.input = input;
  request.output = output;
  pending.works = {call.job->submit(request)};
}

void start_simple(const Settings& settings, const Call& call, Pending& pending) {
  const std::vector<std::int64_t> shape = shape_of(pending.input.get());
  pending.outputs.push_back(allocate_result(*call.job, TF_TensorType(pending.input.get()), shape));
  start_one_step(settings, call, shape, bytes_of(pending.input), bytes_of(pending.outputs.back()), pending);
}

void start_on_host(const Settings& settings, const Call& call, Pending& pending) {
  switch (settings.collective) {
    case Collective::kUnevenAllGather:
      return start_all_gather(call, pending);
    case Collective::kAllToAll:
      return start_all_to_all(call, pending);
    case Collective::kReduceScatter:
      return start_reduce_scatter(call, settings.reduce, pending);
    default:
      return start_simple(settings, call, pending);
  }
}

/// Of a tensor on a GPU: when what stands for it holds its bytes.
void start(const Settings& settings, const Call& call, Pending& pending) {
  if (const OnGpu* const gpu = pending.gpu.get()) {
    start_one_step(settings, call, shape_of(gpu->output()), gpu->host(), gpu->host(), pending);
  } else {
    start_on_host(settings, call, pending);
  }
  // Who has joined takes part when it hears of it; what starts meanwhile does not wait for that.
  if (pending.in_flight) Process::instance().keys().announce(pending.in_flight->announcement());
}

void find_members(Call& call, std::uint32_t group) {
  call.group = GroupId{group};
  call.ranks = Process::instance().group(group).value_or(std::vector<std::uint32_t>());
  const auto place = std::find(call.ranks.begin(), call.ranks.end(), call.job->rank());
  if (place == call.ranks.end()) {
    throw Error(Code::kInvalidArgument,
                "rank " + std::to_string(call.job->rank()) + " is not in process set " + std::to_string(group));
  }
  call.index = static_cast<std::uint32_t>(place - call.ranks.begin());
}

std::string name_of(const Settings& settings, TF_OpKernelContext* context) {
  constexpr std::int64_t kMost = 1 << 16;  // What the runtime remembers of names stays bounded.
  const std::int64_t iteration = settings.names_iterations ? TF_GetIterId(context) % kMost : 0;
  return iteration == 0 ? settings.name : settings.name + ".iteration." + std::to_string(iteration);
}

/// Starts the copy of the input to the host, and says what starts the operation after that.
void copy_from_gpu(const Settings& settings, const Call& call, TF_OpKernelContext* context, Pending& pending) {
  if (settings.collective != Collective::kAllReduce && settings.collective != Collective::kBroadcast) {
    throw Error(Code::kInvalidArgument, std::string(name(settings.collective)) + " takes no tensors on GPUs here");
  }
  const GpuStream stream = stream_of_kernel(context);
  const TfStatus status = new_status();
  const std::vector<std::int64_t> shape = shape_of(pending.input.get());
  TF_AllocatorAttributes attributes{sizeof(TF_AllocatorAttributes), 0};
  Tensor output(TF_AllocateTemp(context, TF_TensorType(pending.input.get()), shape.data(),
                                static_cast<int>(shape.size()), &attributes, status.get()));
  if (!is_ok(status)) throw std::runtime_error(TF_Message(status.get()));
  Process& process = Process::instance();
  pending.gpu = std::make_unique<OnGpu>(stream, *process.pinned_memory(), std::move(pending.input), std::move(output),
                                        process.limit());
  pending.next = [settings, call](Pending& now) { start(settings, call, now); };
}

/// Takes the input tensors and starts the operation, which has pending->name.
void submit_into(const Settings& settings, DataType dtype, TF_OpKernelContext* context,
                 const std::shared_ptr<Pending>& pending) {
  Call call;
  call.job = Process::instance().job();
  if (!call.job) {
    throw Error(Code::kShutdown, "this process has not joined a job; call herring.tensorflow.init() in it first");
  }
  call.dtype = dtype;
  call.wire_name = pending->name;
  if (settings.has_key) {
    find_members(call, settings.group);
    Keys& keys = Process::instance().keys();
    Announcement announcement = keys.take(settings.group, settings.collective, pending->name);
    announcement.reduce = settings.reduce;
    announcement.dtype = dtype;
    announcement.shape = shape_of(pending->input.get());
    pending->in_flight = std::make_unique<InFlight>(keys, std::move(announcement));
    pending->name = pending->in_flight->announcement().key;
    call.wire_name = pending->in_flight->wire_name();
    call.use = pending->in_flight->announcement().use;
  }
  if (settings.is_on_gpu) return copy_from_gpu(settings, call, context, *pending);
  start(settings, call, *pending);
}

void submit(void* kernel, TF_OpKernelContext* context) {
  const Settings& settings = *static_cast<Settings*>(kernel);
  const TfStatus status = new_status();
  const auto pending = std::make_shared<Pending>();
  // The value, then the splits where there are some; last comes what HerringBegin gave.
  for (int i = 0; i < TF_NumInputs(context); ++i) {
    TF_Tensor* input = nullptr;
    TF_GetInput(context, i, &input, status.get());
    if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
    Tensor owned(input);
    if (i + 1 == TF_NumInputs(context)) {
      std::memcpy(&pending->call, TF_TensorData(owned.get()), sizeof(pending->call));
    } else {
      (i == 0 ? pending->input : pending->splits) = std::move(owned);
    }
  }
  const std::string own_name = pending->name = name_of(settings, context);
  const TF_DataType type = TF_TensorType(pending->input.get());
  const std::optional<DataType> dtype = dtype_of(type);
  if (!dtype) {
    return fail(context, TF_UNIMPLEMENTED,
                "herring: " + std::string(name(settings.collective)) + " \"" + own_name + "\": dtype " +
                    std::to_string(type) + " of TensorFlow is not supported");
  }
  TF_Tensor* const handle = TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(Number), status.get());
  if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
  const Tensor owned(handle);
  const auto give_up = [&](const std::exception& error, TF_Code code) {
    Process::instance().give_up_call(pending->call);
    fail_with(context, own_name, error, code);
  };
  try {
    submit_into(settings, *dtype, context, pending);
  } catch (const Error& error) {
    return give_up(error, code_of(error.status().code()));
  } catch (const std::exception& error) {
    return give_up(error, TF_RESOURCE_EXHAUSTED);
  }
  const Number number = Process::instance().add(pending);
  std::memcpy(TF_TensorData(handle), &number, sizeof(number));
}

// A call blocks for either of these: the program's threads wait for the graph, so nothing else is called before it
// ends.

void wait(void*, TF_OpKernelContext* context) {
  Waiting waiting(context);
  waiting.wait();
  waiting.answer();
}

/// Here no thread waits: whatever runs when an operation has ended goes on with the next one.
void go_on(const std::shared_ptr<Waiting>& waiting, const std::function<void()>& end) {
  const std::shared_ptr<runtime::Work> work = waiting->next();
  if (!work) {
    waiting->answer();
    return end();
  }
  work->on_done([waiting, end, blocked = work->block(true)](const Status&) mutable {
    blocked.reset();
    go_on(waiting, end);
  });
}

/// `done` is TensorFlow's own std::function<void()>, on the stack of who calls this: it is copied, by what its class is
/// in the releases that herring/tensorflow/_ops.py names (tensorflow/core/framework/op_kernel.h, DoneCallback).
void wait_aside(void*, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const auto waiting = std::make_shared<Waiting>(context);
  if (waiting->has_gpu_tensors()) waiting->wait();  // Which herring/tensorflow/_ops.py does not let come here.
  go_on(waiting, *reinterpret_cast<std::function<void()>*>(done));
}

void wait_on_gpu(void*, TF_OpKernelContext* context) {
  try {
    Waiting waiting(context, stream_of_kernel(context));
    waiting.wait();
    waiting.answer();
  } catch (const Error& error) {
    fail_with(context, "", error, code_of(error.status().code()));
  }
}

/// On a GPU, TensorFlow calls kernels in the thread that launches all of the step's: no call may hold that up.
void wait_aside_on_gpu(void*, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  static auto* const threads = new runtime::CallbackPool();  // Never ended: calls may go on while the process exits.
  const std::function<void()> end = *reinterpret_cast<std::function<void()>*>(done);
  try {
    const auto waiting = std::make_shared<Waiting>(context, stream_of_kernel(context));
    if (!waiting->has_gpu_tensors()) return go_on(waiting, end);
    threads->run([waiting, end] {
      waiting->wait();
      waiting->answer();
      end();
    });
  } catch (const Error& error) {
    fail_with(context, "", error, code_of(error.status().code()));
    end();
  }
}

/// What HerringPlace tells. Numbers are those of herring/tensorflow/_ops.py.
enum class Place : std::int64_t { kRank = 0, kSize = 1, kLocalRank = 2, kLocalSize = 3, kIncluded = 4 };

struct PlaceSettings {
  Place place = Place::kRank;
  std::uint32_t group = 0;
};

void* create_place(TF_OpKernelConstruction* context) {
  auto settings = std::make_unique<PlaceSettings>();
  const TfStatus status = new_status();
  settings->place = static_cast<Place>(number_attr(context, "place", status.get()));
  if (is_ok(status)) settings->group = static_cast<std::uint32_t>(number_attr(context, "group", status.get()));
  if (!is_ok(status)) TF_OpKernelConstruction_Failure(context, status.get());
  return settings.release();
}

void delete_place(void* settings) { delete static_cast<PlaceSettings*>(settings); }

/// Horovod's numbers for process sets that cannot be asked.
constexpr std::int32_t kNotInitialized = -1;
constexpr std::int32_t kUnknownSet = -3;

std::int32_t place_of(const PlaceSettings& settings) {
  const auto job = Process::instance().job();
  const bool is_question = settings.place == Place::kIncluded;
  if (!job) {
    if (is_question) return kNotInitialized;
    throw Error(Code::kShutdown, "this process has not joined a job; call init() in it first");
  }
  const auto ranks = Process::instance().group(settings.group);
  if (!ranks) {
    if (is_question) return kUnknownSet;
    throw Error(Code::kInvalidArgument, "there is no process set " + std::to_string(settings.group));
  }
  const auto local = Process::instance().local();
  switch (settings.place) {
    case Place::kRank:
      return static_cast<std::int32_t>(job->rank());
    case Place::kSize:
      return static_cast<std::int32_t>(ranks->size());
    case Place::kLocalRank:
      return static_cast<std::int32_t>(local ? local->first : job->local_rank());
    case Place::kLocalSize:
      return static_cast<std::int32_t>(local ? local->second : job->local_size());
    case Place::kIncluded:
      break;
  }
  return std::find(ranks->begin(), ranks->end(), job->rank()) != ranks->end() ? 1 : 0;
}

void place(void* kernel, TF_OpKernelContext* context) {
  const TfStatus status = new_status();
  const Tensor result(TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(std::int32_t), status.get()));
  if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
  try {
    const std::int32_t value = place_of(*static_cast<PlaceSettings*>(kernel));
    std::memcpy(TF_TensorData(result.get()), &value, sizeof(value));
  } catch (const Error& error) {
    fail_with(context, "", error, code_of(error.status().code()));
  }
}

void begin(void*, TF_OpKernelContext* context) {
  const TfStatus status = new_status();
  const Tensor token(TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(Number), status.get()));
  if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
  const Number call = Process::instance().begin_call();
  std::memcpy(TF_TensorData(token.get()), &call, sizeof(call));
}

/// HerringSubmit, by TensorFlow's types: those of int32 lie in the host's memory, as its own operations have them.
void serve_submit_by_stream() {
  const TfStatus status = new_status();
  for (const TF_DataType type : kTypes) {
    const bool is_on_host = type == TF_INT32;
    TF_KernelBuilder* const builder = TF_NewKernelBuilder(
        "HerringSubmit", "GPU", is_on_host ? &create_submit : &create_submit_on_gpu, &submit, &delete_submit);
    TF_KernelBuilder_TypeConstraint(builder, "T", type, status.get());
    if (is_on_host) TF_KernelBuilder_HostMemory(builder, "value");
    register_kernel("HerringSubmit", builder, {"token", "handle"});
  }
}

/// When the library is loaded, which is what tf.load_op_library asks for.
[[maybe_unused]] const bool kIsRegistered = [] {
  define("HerringBegin", true, {}, "token: int32", {});
  define("HerringSubmit", false, {"value: T", "token: int32"}, "handle: int32",
         {"T: type", "tensor_name: string", "collective: int", "reduce: int", "root: int", "group: int = 0",
          "has_key: int = 0", "names_iterations: int = 0"});
  define("HerringSubmitSplits", false, {"value: T", "splits: S", "token: int32"}, "handle: int32",
         {"T: type", "S: {int32, int64}", "tensor_name: string", "collective: int", "reduce: int", "root: int",
          "group: int = 0", "has_key: int = 0", "names_iterations: int = 0"});
  define("HerringPlace", true, {}, "number: int32", {"place: int", "group: int = 0"});
  define("HerringWait", true, {"handles: N * int32"}, "results: T", {"N: int >= 1", "T: list(type) >= 1"});
  define("HerringWaitAside", true, {"handles: N * int32"}, "results: T", {"N: int >= 1", "T: list(type) >= 1"});
  serve("HerringBegin", &create_nothing, &begin, &delete_nothing);
  serve("HerringSubmit", &create_submit, &submit, &delete_submit);
  serve("HerringSubmitSplits", &create_submit, &submit, &delete_submit);
  serve("HerringPlace", &create_place, &place, &delete_place);
  serve("HerringWait", &create_nothing, &wait, &delete_nothing);
  register_kernel("HerringWaitAside",
                  TF_NewAsyncKernelBuilder("HerringWaitAside", "CPU", &create_nothing, &wait_aside, &delete_nothing));
  return true;
}();

}  // namespace
}  // namespace herring::tensorflow_binding

extern "C" {

/// `job` points to a std::shared_ptr<herring::runtime::Communicator>: what the capsule of _core.Runtime holds.
/// `limit_s`: its time limit of operations.
__attribute__((visibility("default"))) void herring_tensorflow_attach(void* job, double limit_s) {
  using herring::runtime::Communicator;
  herring::tensorflow_binding::Process::instance().attach(*static_cast<std::shared_ptr<Communicator>*>(job),
                                                          herring::duration_of(limit_s));
}

/// Registers the operations for GPUs as well, once in a process. `find`: how to find TensorFlow's stream there, and
/// Herring copies tensors itself; null: TensorFlow does. `waits_aside`: see wait_aside().
__attribute__((visibility("default"))) void herring_tensorflow_serve_gpus(herring::tensorflow_binding::StreamOf find,
                                                                          int waits_aside) {
  using namespace herring::tensorflow_binding;
  set_stream_of(find);
  const bool is_by_stream = find != nullptr;
  if (!is_by_stream && waits_aside == 0) return;  // They run on the CPU then, where they hold nothing up.
  const auto serve_wait_aside = [](const char* op, auto compute, std::initializer_list<const char*> on_host) {
    register_kernel(op, TF_NewAsyncKernelBuilder(op, "GPU", &create_nothing, compute, &delete_nothing), on_host);
  };
  serve_gpu("HerringBegin", &create_nothing, &begin, &delete_nothing, {"token"});
  serve_gpu("HerringPlace", &create_place, &place, &delete_place, {"number"});
  serve_gpu("HerringSubmitSplits", &create_submit, &submit, &delete_submit, {"value", "splits", "token", "handle"});
  if (waits_aside != 0) {
    serve_wait_aside("HerringWaitAside", &wait_aside, {"handles", "results"});
    if (is_by_stream) {
      serve_wait_aside("HerringWait", &wait_aside_on_gpu, {"handles"});
    } else {
      serve_wait_aside("HerringWait", &wait_aside, {"handles", "results"});
    }
  } else if (is_by_stream) {
    serve_gpu("HerringWait", &create_nothing, &wait_on_gpu, &delete_nothing, {"handles"});
  }
  if (is_by_stream) {
    serve_submit_by_stream();
    return serve_packs_by_stream();
  }
  serve_gpu("HerringSubmit", &create_submit, &submit, &delete_submit, {"value", "token", "handle"});
}

/// Another generation of the job, or another owner of its process sets: those, and what is pending, are forgotten.
__attribute__((visibility("default"))) void herring_tensorflow_begin_again() {
  herring::tensorflow_binding::Process::instance().begin_again();
}

/// Ranks of a process set, in order.
__attribute__((visibility("default"))) void herring_tensorflow_set_group(std::uint32_t group,
                                                                         const std::uint32_t* ranks,
                                                                         std::uint32_t count) {
  herring::tensorflow_binding::Process::instance().set_group(group, {ranks, ranks + count});
}

/// This process's place on its host.
__attribute__((visibility("default"))) void herring_tensorflow_set_local(std::uint32_t rank, std::uint32_t size) {
  herring::tensorflow_binding::Process::instance().set_local(rank, size);
}

/// See Keys::listen(). Null ends it.
__attribute__((visibility("default"))) void herring_tensorflow_listen(herring::tensorflow_binding::Tell tell) {
  herring::tensorflow_binding::Process::instance().keys().listen(tell);
}

/// Calls `take` with the group, the key and the number of its uses, for every key.
__attribute__((visibility("default"))) void herring_tensorflow_uses(void (*take)(std::uint32_t, const char*,
                                                                                 std::uint64_t)) {
  for (const auto& use : herring::tensorflow_binding::Process::instance().keys().uses()) {
    take(use.group, use.key.c_str(), use.use);
  }
}

/// See Keys::learn().
__attribute__((visibility("default"))) void herring_tensorflow_learn(std::uint32_t group, const char* key,
                                                                     std::uint64_t use) {
  herring::tensorflow_binding::Process::instance().keys().learn(group, key, use);
}

/// Operations that were submitted and not waited for.
__attribute__((visibility("default"))) std::uint64_t herring_tensorflow_pending() {
  return herring::tensorflow_binding::Process::instance().size();
}
}
