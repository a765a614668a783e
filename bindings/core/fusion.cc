#include "collectives/fusion.h"

#include <unordered_map>

#include "bindings/core/py_runtime.h"
#include "bindings/core/python.h"
#include "core/clock.h"

namespace herring::python {
namespace {

using collectives::Fusion;
using collectives::FusionSettings;
using collectives::TensorSpec;
using collectives::Ticket;

/// A Python function for threads of the runtime: called, and dropped, with the interpreter's lock, while there is one.
class Callback final {
 public:
  explicit Callback(const py::function& function)
      : pid_(process_id()), function_(new py::function(function), [pid = process_id()](py::function* last) {
          if (is_finalizing() || process_id() != pid) return;
          py::gil_scoped_acquire locked;
          delete last;
        }) {}

  /// Why it failed; what it raises is reported as Python reports exceptions in destructors.
  template <class Call>
  Status operator()(const Call& call) const {
    if (is_finalizing() || process_id() != pid_) return {Code::kShutdown, "Python is ending"};
    py::gil_scoped_acquire locked;
    try {
      call(*function_);
      return Status::ok();
    } catch (py::error_already_set& error) {
      const std::string text = error.what();
      error.discard_as_unraisable("a callback of herring._core.Fusion");
      return {Code::kInternal, text};
    }
  }

 private:
  std::int32_t pid_;
  std::shared_ptr<py::function> function_;
};

/// What Python says of tickets that have not been finished; touched with the interpreter's lock alone.
using Owners = std::unordered_map<Ticket, py::object>;

struct PyFusion {
  PyFusion(std::shared_ptr<Fusion> fusion, std::shared_ptr<Owners> kept)
      : owners(std::move(kept)), owned(std::move(fusion)) {}
  std::shared_ptr<Owners> owners;
  ProcessOwned<Fusion> owned;
};

Duration to_duration(double seconds) { return deadline_after(seconds) - std::chrono::steady_clock::now(); }

std::unique_ptr<PyFusion> make_fusion(const PyRuntime& runtime, std::uint32_t group,
                                      const std::vector<std::uint32_t>& ranks, std::uint32_t index,
                                      std::uint64_t bucket_bytes, std::uint64_t tensor_bytes, double cycle,
                                      double timeout, std::uint64_t series, const py::function& go_alone) {
  FusionSettings settings;
  settings.engine.index = index;
  settings.engine.bucket_bytes = bucket_bytes;
  settings.engine.cycle = duration_of(cycle);
  settings.tensor_bytes = tensor_bytes;
  settings.timeout = to_duration(timeout);
  settings.series = series;
  auto owners = std::make_shared<Owners>();
  const auto go = [callback = Callback(go_alone), weak = std::weak_ptr(owners)](Ticket ticket, const auto&) {
    return callback([&weak, ticket](const py::function& function) {
      const std::shared_ptr<Owners> all = weak.lock();
      if (all) function(ticket, all->at(ticket));
    });
  };
  return std::make_unique<PyFusion>(std::make_shared<Fusion>(runtime.owned.get(), GroupId{group}, ranks, settings, go),
                                    owners);
}

std::uint64_t number(PyObject* value) {
  const std::uint64_t result = PyLong_AsUnsignedLongLong(value);
  if (result == static_cast<std::uint64_t>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return result;
}

double factor(PyObject* value) {
  const double result = PyFloat_AsDouble(value);
  if (result == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return result;
}

/// None where the tensor has more dimensions than a message tells.
std::optional<TensorSpec> spec_of(PyObject* dtype, PyObject* op, PyObject* shape) {
  TensorSpec spec;
  OpDescriptor& descriptor = spec.descriptor;
  descriptor.dtype = static_cast<DataType>(number(dtype));
  descriptor.reduce = static_cast<ReduceOp>(number(op));
  if (!PyTuple_Check(shape)) throw py::type_error("the shape is no tuple");
  const Py_ssize_t dims = PyTuple_GET_SIZE(shape);
  if (dims > kMaxDims) return std::nullopt;
  descriptor.dims = static_cast<std::uint8_t>(dims);
  descriptor.op_bytes = element_bytes(descriptor.dtype);
  for (Py_ssize_t dim = 0; dim < dims; ++dim) {
    descriptor.shape[static_cast<std::size_t>(dim)] = number(PyTuple_GET_ITEM(shape, dim));
    descriptor.op_bytes *= descriptor.shape[static_cast<std::size_t>(dim)];
  }
  return spec;
}

/// Fusion.submit(name, source, result, dtype, op, shape, prescale, postscale, owner, /): the ticket, or 0.
Ticket submit(PyObject* self, std::span<PyObject* const> arguments) {
  if (arguments.size() != 9) throw py::type_error("submit() takes 9 arguments");
  std::optional<TensorSpec> spec = spec_of(arguments[3], arguments[4], arguments[5]);
  if (!spec) return 0;
  spec->prescale = factor(arguments[6]);
  spec->postscale = factor(arguments[7]);
  const std::size_t bytes = spec->descriptor.op_bytes;
  const auto memory = [&](PyObject* address) {
    return std::span(reinterpret_cast<std::byte*>(number(address)), bytes);
  };
  const auto& fusion = py::cast<const PyFusion&>(py::handle(self));
  const std::optional<Ticket> ticket =
      fusion.owned.get()->submit({text_of(arguments[0]), *spec, memory(arguments[1]), memory(arguments[2])});
  if (!ticket) return 0;
  fusion.owners->emplace(*ticket, py::reinterpret_borrow<py::object>(arguments[8]));
  return *ticket;
}

/// As the interpreter has its own methods: a tensor's whole cost is this call.
PyObject* submit_method(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return guarded([&] {
    return PyLong_FromUnsignedLongLong(submit(self, {arguments, static_cast<std::size_t>(count)}));
  });
}

/// True: it has ended. False: it went alone. None: at the time-out.
std::optional<bool> wait(const PyFusion& self, Ticket ticket, double timeout) {
  const std::shared_ptr<Fusion> fusion = self.owned.get();
  Fusion::State state = fusion->state(ticket);
  if (state == Fusion::State::kPending) {
    const Instant deadline = deadline_after(timeout);
    std::shared_ptr<void> blocked;
    for (bool is_first = true; state == Fusion::State::kPending; is_first = false) {
      const Instant now = std::chrono::steady_clock::now();
      if (now >= deadline) return std::nullopt;
      if (!is_first && !blocked) blocked = fusion->block(ticket);
      {
        py::gil_scoped_release unlocked;
        state = fusion->wait(ticket, std::min(deadline, now + kSignalPeriod));
      }
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }
  return state == Fusion::State::kDone;
}

/// The same; it is forgotten, and how it ended is raised where not well.
std::optional<bool> finish(const PyFusion& self, Ticket ticket, double timeout) {
  const std::optional<bool> ended = wait(self, ticket, timeout);
  if (!ended) return ended;
  const Status status = self.owned.get()->forget(ticket);
  self.owners->erase(ticket);
  status.or_throw();
  return ended;
}

void on_end(const PyFusion& self, Ticket ticket, const py::function& callback) {
  const Callback kept(callback);
  const std::shared_ptr<Fusion> fusion = self.owned.get();
  py::gil_scoped_release unlocked;
  fusion->on_end(ticket, [kept](Fusion::State state) {
    static_cast<void>(kept([state](const py::function& function) { function(state == Fusion::State::kDone); }));
  });
}

void bind_submit(py::class_<PyFusion>& type) {
  static PyMethodDef definition = {
      "submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&submit_method)), METH_FASTCALL, nullptr};
  add_method(type, definition);
}

}  // namespace

void bind_fusion(py::module_& module) {
  py::class_<PyFusion> type(module, "Fusion");
  type.def(py::init(&make_fusion), py::kw_only(), py::arg("runtime"), py::arg("group"), py::arg("ranks"),
           py::arg("index"), py::arg("bucket_bytes"), py::arg("tensor_bytes"), py::arg("cycle"), py::arg("timeout"),
           py::arg("series"), py::arg("go_alone"))
      .def("poll", [](const PyFusion& self,
                      Ticket ticket) { return self.owned.get()->poll(ticket) != Fusion::State::kPending; })
      .def("wait", &wait)
      .def("finish", &finish)
      .def("on_end", &on_end)
      .def("went_outside", [](const PyFusion& self, const std::string& name) { self.owned.get()->went_outside(name); })
      .def("came_back", [](const PyFusion& self, const std::string& name) { self.owned.get()->came_back(name); })
      .def("pause", [](const PyFusion& self) { self.owned.get()->pause(); })
      .def("resume", [](const PyFusion& self) { self.owned.get()->resume(); })
      .def("close", [](const PyFusion& self, double timeout) {
        const std::shared_ptr<Fusion> fusion = self.owned.get();
        py::gil_scoped_release unlocked;
        fusion->close(deadline_after(timeout));
      });
  bind_submit(type);
}

}  // namespace herring::python
