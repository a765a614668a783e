#include "bindings/core/work.h"

#include <array>
#include <utility>

#include "bindings/core/buffer.h"

namespace herring::python {

std::optional<Duration> to_duration(const std::optional<double>& seconds) {
  if (!seconds) return std::nullopt;
  return deadline_after(*seconds) - std::chrono::steady_clock::now();
}

namespace {

using runtime::Communicator;
using runtime::Work;

ReduceOp parse_op(py::handle text) {
  constexpr std::array kOps = {ReduceOp::kSum,     ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                               ReduceOp::kProduct, ReduceOp::kBand,    ReduceOp::kBor, ReduceOp::kBxor};
  if (PyUnicode_Check(text.ptr()) != 0) {
    const std::string_view given = text_of(text);
    for (const ReduceOp op : kOps) {
      if (name(op) == given) return op;
    }
  }
  std::string known;
  for (const ReduceOp op : kOps) known += (known.empty() ? "" : ", ") + std::string(name(op));
  throw Error(Code::kInvalidArgument, "op is " + std::string(py::repr(text)) + "; it must be one of " + known);
}

Collective parse_collective(std::string_view text) {
  constexpr std::array kCollectives = {Collective::kAllReduce, Collective::kBroadcast, Collective::kAllGather,
                                       Collective::kBarrier};
  for (const Collective collective : kCollectives) {
    if (name(collective) == text) return collective;
  }
  throw Error(Code::kInvalidArgument, "'" + std::string(text) + "' names no collective");
}

/// Says what this rank does.
OpDescriptor describe(Collective collective, const View& argument, ReduceOp op, std::uint32_t root) {
  OpDescriptor descriptor;
  descriptor.collective = collective;
  descriptor.dtype = argument.dtype;
  descriptor.reduce = collective == Collective::kAllReduce ? op : ReduceOp::kSum;
  descriptor.root = root;
  descriptor.op_bytes = argument.bytes.size();
  descriptor.shape = argument.shape.sizes;
  descriptor.dims = argument.shape.dims;
  return descriptor;
}

void check_output(Collective collective, const View& input, const View& output) {
  if (input.dtype != output.dtype) {
    throw Error(Code::kInvalidArgument, "the input is " + std::string(name(input.dtype)) + " but the output is " +
                                            std::string(name(output.dtype)) + "; they must have the same dtype");
  }
  if (collective != Collective::kAllGather && input.bytes.size() != output.bytes.size()) {
    throw Error(Code::kInvalidArgument, "the input has " + std::to_string(input.bytes.size()) +
                                            " bytes but the output " + std::to_string(output.bytes.size()) +
                                            "; they must be equal");
  }
  const std::byte* const first = input.bytes.data();
  const std::byte* const other = output.bytes.data();
  const bool is_same = first == other && input.bytes.size() == output.bytes.size();
  const bool overlaps = first < other + output.bytes.size() && other < first + input.bytes.size();
  if (overlaps && !is_same) {
    throw Error(Code::kInvalidArgument,
                "the input and the output overlap; use separate memory, or the same memory for both");
  }
}

/// Calls `callback` on a thread of the runtime, once, when the operation has ended. What it raises is reported as
/// Python reports exceptions in destructors.
void call_when_done(const PyWork& self, const py::function& callback) {
  const std::int32_t pid = process_id();
  const std::shared_ptr<py::function> kept(new py::function(callback), [pid](py::function* function) {
    if (is_finalizing() || process_id() != pid) return;
    py::gil_scoped_acquire locked;
    delete function;
  });
  const std::shared_ptr<Work> work = self.owned.get();
  py::gil_scoped_release unlocked;
  work->on_done([kept, pid](const Status&) {
    if (is_finalizing() || process_id() != pid) return;
    py::gil_scoped_acquire locked;
    try {
      (*kept)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a callback of herring._core.Work.on_done");
    }
  });
}

/// Group rank whose message a finished receive() has got.
std::uint32_t source_of(const PyWork& self) {
  const auto received = std::dynamic_pointer_cast<runtime::ReceiveWork>(self.owned.get());
  if (!received) throw Error(Code::kInvalidArgument, "only a receive has a source");
  if (!received->is_done()) throw Error(Code::kInvalidArgument, "the message has not arrived yet; wait() first");
  received->status().or_throw();
  return received->received().source;
}

/// Waits without the interpreter lock, looking at Python's signals now and then; false at the deadline. `blocks`: the
/// deadline is later than the operation's own, so the thread does nothing else before that ends.
bool wait_interruptibly(Work& work, Instant deadline, bool blocks) {
  std::shared_ptr<void> blocked;
  for (bool is_first = true; !work.is_done(); is_first = false) {
    const Instant now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    if (blocks && !is_first && !blocked) blocked = work.block();
    {
      py::gil_scoped_release unlocked;
      if (work.wait(std::min(deadline, now + kSignalPeriod))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  return true;
}

/// Above this an operation's own time is the larger part.
constexpr std::size_t kSmallBytes = 1 << 20;

/// A View with what keeps it.
struct Held : View {
  Holding holding;
  void take(py::handle object, Access access, const std::string& role) {
    static_cast<View&>(*this) = holding.take(object, access, role);
  }
};

/// What a request borrows its memory from: Helds or Loans.
template <class Array>
struct Arrays {
  Array input;  ///< Nothing where the input is the output.
  Array output;
};

template <class Array>
runtime::Request make_request(const SubmitArguments& arguments, Arrays<Array>& arrays) {
  runtime::Request request;
  const Collective collective = parse_collective(arguments.collective);
  const ReduceOp op = parse_op(arguments.op);
  if (collective == Collective::kBarrier) {
    request.descriptor.collective = collective;
    request.descriptor.dtype = DataType::kUInt8;
  } else {
    // The input goes first: an output that was made like it is wrong in the same way, and nobody gave that.
    const bool in_place = arguments.input.is_none() || arguments.input.is(arguments.output);
    if (!in_place) arrays.input.take(arguments.input, Access::kRead, "the array");
    arrays.output.take(arguments.output, Access::kWrite, in_place ? "the array" : "the output");
    const View& input = in_place ? arrays.output : arrays.input;
    check_output(collective, input, arrays.output);
    request.descriptor = describe(collective, input, op, arguments.root);
    request.input = input.bytes;
    request.output = arrays.output.bytes;
  }
  OpDescriptor& descriptor = request.descriptor;
  if (arguments.digest != 0 && descriptor.dims < kMaxDims) {
    descriptor.shape[descriptor.dims++] = arguments.digest | kListDigest;
  }
  request.group = GroupId{arguments.group};
  request.name = arguments.name;
  request.timeout = to_duration(arguments.timeout);
  request.is_waited_for = arguments.is_waited_for;
  request.has_backup = arguments.has_backup;
  return request;
}

void finish(Work& work, const SubmitArguments& arguments, double default_timeout) {
  // An operation ends by itself at its deadline, and what reports it adds a little; past this much more it never will.
  constexpr double kGrace = 60;
  const Instant deadline = deadline_after(arguments.timeout.value_or(default_timeout) + kGrace);
  if (wait_interruptibly(work, deadline, true)) return;
  const std::string what = std::string(arguments.collective) + (arguments.name ? " '" + *arguments.name + "'" : "");
  throw Error(Code::kInternal, what + " did not end at its deadline: this is a bug in Herring, please report it");
}

/// Its arrays, by a callback.
void keep_until_done(PyWork& work) {
  const std::array kept = {std::move(work.arrays[0]).share(), std::move(work.arrays[1]).share()};
  const std::shared_ptr<Work> running = work.owned.get();
  py::gil_scoped_release unlocked;
  running->on_done([kept](const Status&) {});
}

PyTypeObject* work_type = nullptr;

/// Work.finish(): whether it has ended; raises why it failed.
PyObject* finish_method(PyObject* self, PyObject*) noexcept {
  return guarded([&] { return py::bool_(finish(native_of<PyWork>(self, work_type))).release().ptr(); });
}

}  // namespace

bool finish(const PyWork& self) {
  const std::shared_ptr<Work> work = self.owned.get();
  if (!work->is_done()) return false;
  work->status().or_throw();
  return true;
}

bool wait(const PyWork& self, double seconds, bool blocks) {
  return wait_interruptibly(*self.owned.get(), deadline_after(seconds), blocks);
}

std::unique_ptr<PyWork> submit(const PyRuntime& runtime, const SubmitArguments& arguments) {
  Arrays<Held> arrays;
  const runtime::Request request = make_request(arguments, arrays);
  // Its Work keeps the arrays where somebody is going to wait: a callback costs more than a small operation.
  const bool is_kept_by_work = request.is_waited_for || arguments.may_travel;
  std::shared_ptr<Work> work;
  if (arguments.may_travel && request.output.size() <= kSmallBytes) {
    work = runtime.operations.get()->submit(request);  // It never blocks; to let go of the lock costs as much.
  } else {
    py::gil_scoped_release unlocked;
    work = arguments.may_travel ? runtime.operations.get()->submit(request) : runtime.owned.get()->submit(request);
  }
  auto result = std::make_unique<PyWork>(std::move(work));
  result->arrays = {std::move(arrays.input.holding), std::move(arrays.output.holding)};
  // The callback is what keeps the arrays: it goes when the operation is done, whoever still holds the Work.
  if (!is_kept_by_work) keep_until_done(*result);
  return result;
}

void run(const PyRuntime& runtime, const SubmitArguments& arguments) {
  Arrays<Loan> arrays;
  const runtime::Request request = make_request(arguments, arrays);
  std::shared_ptr<Work> work;
  Status status;
  {
    py::gil_scoped_release unlocked;
    work = runtime.operations.get()->run(request, status);
    if (work) work->wait(std::chrono::steady_clock::now() + kSignalPeriod);
  }
  if (work) {
    try {
      finish(*work, arguments, runtime.timeout_s);
    } catch (...) {
      // It was left early (ctrl-C): the runtime still uses the arrays.
      const std::array kept = {arrays.input.prolong(), arrays.output.prolong()};
      work->on_done([kept](const Status&) {});
      throw;
    }
    status = work->status();
  }
  status.or_throw();
}

std::unique_ptr<PyWork> send(const std::shared_ptr<Communicator>& runtime, const MessageArguments& arguments) {
  if (!arguments.peer) throw Error(Code::kInvalidArgument, "a message is sent to one rank, but no rank was given");
  Buffer data;
  data.take(arguments.memory, Access::kRead, "the message");
  runtime::Send message;
  message.group = GroupId{arguments.group};
  message.to = *arguments.peer;
  message.tag = arguments.tag;
  message.data = data.bytes;
  message.timeout = to_duration(arguments.timeout);
  message.dtype = data.dtype;
  py::gil_scoped_release unlocked;
  std::shared_ptr<Work> work = runtime->send(message);
  work->on_done([data](const Status&) {});
  return std::make_unique<PyWork>(std::move(work));
}

std::unique_ptr<PyWork> receive(const std::shared_ptr<Communicator>& runtime, const MessageArguments& arguments) {
  Buffer memory;
  memory.take(arguments.memory, Access::kWrite, "the memory for the message");
  runtime::Receive message;
  message.group = GroupId{arguments.group};
  message.from = arguments.peer;
  message.tag = arguments.tag;
  message.memory = memory.bytes;
  message.timeout = to_duration(arguments.timeout);
  message.dtype = memory.dtype;
  py::gil_scoped_release unlocked;
  std::shared_ptr<Work> work = runtime->receive(message);
  work->on_done([memory](const Status&) {});
  return std::make_unique<PyWork>(std::move(work));
}

PyWork::~PyWork() {
  if (!arrays[0] && !arrays[1]) return;
  try {
    // A wait that was left early (ctrl-C): the runtime still uses the arrays.
    if (!owned.get()->is_done()) keep_until_done(*this);
  } catch (const Error&) {
    // A forked child: the parent's arrays are not in use here.
  }
}

void bind_work(py::module_& module) {
  py::class_<PyWork> type(module, "Work");
  type.def("done", [](const PyWork& self) { return self.owned.get()->is_done(); })
      .def(
          "wait", [](const PyWork& self, double timeout, bool blocks) { return python::wait(self, timeout, blocks); },
          py::arg("timeout"), py::kw_only(), py::arg("blocks") = false)
      .def("on_done", &call_when_done, py::arg("callback"))
      .def_property_readonly("source", &source_of)
      .def_property_readonly("contributors", [](const PyWork& self) { return self.owned.get()->contributors(); })
      .def("check", [](const PyWork& self) { self.owned.get()->status().or_throw(); });
  work_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  static PyMethodDef definition = {"finish", &finish_method, METH_NOARGS, nullptr};
  add_method(type, definition);
}

}  // namespace herring::python
