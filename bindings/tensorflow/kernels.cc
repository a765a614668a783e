#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/tensorflow/composed.h"
#include "bindings/tensorflow/pending.h"
#include "bindings/tensorflow/tf_c_api.h"

/// TensorFlow's operations of Herring.
///
///   token = HerringBegin()               stateful: a call in a graph is in its place, and nothing after it is constant
///   handle = HerringSubmit(value, token) starts one operation and does not wait
///   results = HerringWait(handles)       stateful: waits for all of them, starts the further steps of those that have
///   results = HerringWaitAside(handles)  the same, and holds no thread
///   some number = HerringPlace()              stateful: rank, size and so on, when the graph runs
///
/// TensorFlow runs stateful operations of a graph one after the other, in the order of the program, and others when
/// their inputs are there. So gradients are submitted as they come out of the backward pass, and calls end in the same
/// order on every rank, which one inter-op thread can keep up with. In a session of TensorFlow 1 nothing has an order:
/// there, as many waits as TensorFlow has threads would keep it from submitting the rest, each rank another rest; so
/// they hold none.
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
  std::uint32_t root = 0;  ///< Within the group.
  std::uint32_t group = 0;
  bool has_key = false;           ///< Ranks find the operation by its key, also without a name (Horovod's).
  bool names_iterations = false;  ///< Of a loop that may run several at once, in any order.
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

void delete_submit(void* settings) { delete static_cast<Settings*>(settings); }

/// One step: what goes into the input's memory comes out in an output of its shape.
void start_simple(const Settings& settings, const Call& call, Pending& pending) {
  const std::vector<std::int64_t> shape = shape_of(pending.input.get());
  pending.outputs.push_back(allocate_result(*call.job, TF_TensorType(pending.input.get()), shape));
  runtime::Request request;
  request.group = call.group;
  if (!call.wire_name.empty()) request.name = call.wire_name;
  request.descriptor = describe(settings.collective, call.dtype, settings.reduce, settings.root, shape);
  request.input = bytes_of(pending.input);
  request.output = bytes_of(pending.outputs.back());
  pending.works = {call.job->submit(request)};
}

void start(const Settings& settings, const Call& call, Pending& pending) {
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

/// Takes the input tensors and starts the operation, which has pending->name.
void submit_into(const Settings& settings, DataType dtype, const std::shared_ptr<Pending>& pending) {
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
  start(settings, call, *pending);
  // Who has joined takes part when it hears of it; what starts meanwhile does not wait for that.
  if (pending->in_flight) Process::instance().keys().announce(pending->in_flight->announcement());
}

void fail_with(TF_OpKernelContext* context, const std::string& name, const std::exception& error, TF_Code code) {
  fail(context, code, "herring: " + (name.empty() ? "" : "\"" + name + "\": ") + error.what());
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
  TF_Tensor* const handle = TF_AllocateOutput(context, 0, TF_INT64, nullptr, 0, sizeof(std::int64_t), status.get());
  if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
  const Tensor owned(handle);
  try {
    submit_into(settings, *dtype, pending);
  } catch (const Error& error) {
    return fail_with(context, own_name, error, code_of(error.status().code()));
  } catch (const std::exception& error) {
    return fail_with(context, own_name, error, TF_RESOURCE_EXHAUSTED);
  }
  const std::int64_t number = Process::instance().add(pending);
  std::memcpy(TF_TensorData(handle), &number, sizeof(number));
}

void* create_nothing(TF_OpKernelConstruction*) { return nullptr; }
void delete_nothing(void*) {}

/// Why a call fails: the first reason ends all of it.
struct Failure {
  TF_Code code = TF_OK;
  std::string text;

  explicit operator bool() const { return code != TF_OK; }
  void set(TF_Code why, const Pending& pending, const std::string& what) {
    code = why;
    text = "herring: " + (pending.name.empty() ? "" : "\"" + pending.name + "\": ") + what;
  }
};

/// A call that waits for its operations: for one after the other, and then for the next steps of those that have some.
/// Where one has failed the others are let go.
class Waiting final {
 public:
  explicit Waiting(TF_OpKernelContext* context);

  /// What has to end before next() is called again; null: all is over.
  std::shared_ptr<runtime::Work> next();
  /// Gives TensorFlow the results, or why there are none.
  void answer();

 private:
  bool start_next_step(Pending& pending);

  TF_OpKernelContext* context_;
  std::vector<std::shared_ptr<Pending>> all_;
  std::vector<std::shared_ptr<Pending>> open_;
  std::size_t place_ = 0;  ///< In open_.
  std::vector<std::shared_ptr<Pending>> further_;
  Failure failure_;
};

Waiting::Waiting(TF_OpKernelContext* context) : context_(context) {
  const TfStatus status = new_status();
  for (int i = 0; i < TF_NumInputs(context); ++i) {
    TF_Tensor* handle = nullptr;
    TF_GetInput(context, i, &handle, status.get());
    if (!is_ok(status)) {
      failure_ = {TF_GetCode(status.get()), TF_Message(status.get())};
      break;
    }
    const Tensor owned(handle);
    std::int64_t number = 0;
    std::memcpy(&number, TF_TensorData(handle), sizeof(number));
    if (auto pending = Process::instance().take(number)) {
      if (all_.empty() || all_.back()->call != pending->call) Process::instance().end_call(pending->call);
      all_.push_back(std::move(pending));
    } else {
      failure_.set(TF_FAILED_PRECONDITION, {}, "this operation was already waited for, or it belongs to another job");
    }
  }
  open_ = all_;
}

std::shared_ptr<runtime::Work> Waiting::next() {
  while (!open_.empty()) {
    for (; place_ < open_.size(); ++place_) {
      const std::shared_ptr<Pending>& pending = open_[place_];
      if (failure_) {
        drop(pending);
        continue;
      }
      const auto& works = pending->works;
      const auto work = std::find_if(works.begin(), works.end(), [](const auto& each) { return !each->is_done(); });
      if (work != works.end()) return *work;
      if (start_next_step(*pending)) further_.push_back(pending);
    }
    open_ = std::exchange(further_, {});
    place_ = 0;
  }
  return nullptr;
}

/// False where there is none.
bool Waiting::start_next_step(Pending& pending) {
  for (const auto& work : pending.works) {
    const Status outcome = work->status();
    if (!outcome.is_ok()) {
      failure_.set(code_of(outcome.code()), pending, outcome.to_string());
      return false;
    }
  }
  if (!pending.next) return false;
  pending.works.clear();
  try {
    std::exchange(pending.next, nullptr)(pending);
  } catch (const Error& error) {
    failure_.set(code_of(error.status().code()), pending, error.status().to_string());
  } catch (const std::exception& error) {
    failure_.set(TF_RESOURCE_EXHAUSTED, pending, error.what());
  }
  return !failure_;
}

void Waiting::answer() {
  const TfStatus status = new_status();
  int place = 0;
  for (const auto& pending : all_) {
    for (const Tensor& output : pending->outputs) {
      if (failure_) break;
      TF_SetOutput(context_, place++, output.get(), status.get());
      if (!is_ok(status)) failure_.set(TF_GetCode(status.get()), *pending, TF_Message(status.get()));
    }
  }
  if (failure_) fail(context_, failure_.code, failure_.text);
}

// A call blocks for either of these: the program's threads wait for the graph, so nothing else is called before it
// ends.

void wait(void*, TF_OpKernelContext* context) {
  Waiting waiting(context);
  while (const auto work = waiting.next()) {
    const std::shared_ptr<void> blocked = work->block(true);
    work->wait(Instant::max());
  }
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
  go_on(std::make_shared<Waiting>(context), *reinterpret_cast<std::function<void()>*>(done));
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
  const Tensor token(TF_AllocateOutput(context, 0, TF_INT64, nullptr, 0, sizeof(std::int64_t), status.get()));
  if (!is_ok(status)) return TF_OpKernelContext_Failure(context, status.get());
  const std::int64_t call = Process::instance().begin_call();
  std::memcpy(TF_TensorData(token.get()), &call, sizeof(call));
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

void serve_aside(const char* op, void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*)) {
  const TfStatus status = new_status();
  TF_KernelBuilder* const builder = TF_NewAsyncKernelBuilder(op, "CPU", &create_nothing, compute, &delete_nothing);
  TF_RegisterKernelBuilder(op, builder, status.get());
}

/// When the library is loaded, which is what tf.load_op_library asks for.
[[maybe_unused]] const bool kIsRegistered = [] {
  define("HerringBegin", true, {}, "token: int64", {});
  define("HerringSubmit", false, {"value: T", "token: int64"}, "handle: int64",
         {"T: type", "tensor_name: string", "collective: int", "reduce: int", "root: int", "group: int = 0",
          "has_key: int = 0", "names_iterations: int = 0"});
  define("HerringSubmitSplits", false, {"value: T", "splits: S", "token: int64"}, "handle: int64",
         {"T: type", "S: {int32, int64}", "tensor_name: string", "collective: int", "reduce: int", "root: int",
          "group: int = 0", "has_key: int = 0", "names_iterations: int = 0"});
  define("HerringPlace", true, {}, "number: int32", {"place: int", "group: int = 0"});
  define("HerringWait", true, {"handles: N * int64"}, "results: T", {"N: int >= 1", "T: list(type) >= 1"});
  define("HerringWaitAside", true, {"handles: N * int64"}, "results: T", {"N: int >= 1", "T: list(type) >= 1"});
  serve("HerringBegin", &create_nothing, &begin, &delete_nothing);
  serve("HerringSubmit", &create_submit, &submit, &delete_submit);
  serve("HerringSubmitSplits", &create_submit, &submit, &delete_submit);
  serve("HerringPlace", &create_place, &place, &delete_place);
  serve("HerringWait", &create_nothing, &wait, &delete_nothing);
  serve_aside("HerringWaitAside", &wait_aside);
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
