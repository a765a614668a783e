#include "collectives/fusion.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/core/py_runtime.h"
#include "bindings/core/python.h"
#include "bindings/core/tensor_reader.h"
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

/// What a ticket that has not been finished is about.
struct Owner {
  py::object source;
  py::object result;
  py::object name;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1;
  double postscale = 1;
};

/// Not Python's tuples, of which its garbage collector would look at thousands in each step. Touched with the
/// interpreter's lock alone.
using Owners = std::unordered_map<Ticket, Owner>;

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
                                      double timeout, std::uint64_t series, bool checks_finite,
                                      const py::function& go_alone) {
  FusionSettings settings;
  settings.engine.index = index;
  settings.engine.bucket_bytes = bucket_bytes;
  settings.engine.cycle = duration_of(cycle);
  settings.tensor_bytes = tensor_bytes;
  settings.timeout = to_duration(timeout);
  settings.series = series;
  settings.checks_finite = checks_finite;
  auto owners = std::make_shared<Owners>();
  const auto go = [callback = Callback(go_alone), weak = std::weak_ptr(owners)](Ticket ticket, const auto&) {
    return callback([&weak, ticket](const py::function& function) {
      const std::shared_ptr<Owners> all = weak.lock();
      if (!all) return;
      const Owner owner = all->at(ticket);  // It may be finished meanwhile.
      function(ticket, owner.source, owner.result, owner.name, static_cast<unsigned>(owner.op), owner.prescale,
               owner.postscale);
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

PyTypeObject* fusion_type = nullptr;

Ticket start(const PyFusion& fusion, const TensorSpec& spec, std::span<const std::byte> source,
             std::span<std::byte> result, Owner owner) {
  const std::optional<Ticket> ticket = fusion.owned.get()->submit({text_of(owner.name), spec, source, result});
  if (!ticket) return 0;
  fusion.owners->emplace(*ticket, std::move(owner));
  return *ticket;
}

Owner owner_of(PyObject* source, PyObject* result, PyObject* name, const TensorSpec& spec) {
  return {py::reinterpret_borrow<py::object>(source),
          py::reinterpret_borrow<py::object>(result),
          py::reinterpret_borrow<py::object>(name),
          spec.descriptor.reduce,
          spec.prescale,
          spec.postscale};
}

/// Fusion.submit(name, source, result, dtype, op, shape, prescale, postscale, tensor, output, /): the ticket, or 0.
std::optional<Ticket> submit(PyObject* self, std::span<PyObject* const> arguments) {
  if (arguments.size() != 10) throw py::type_error("submit() takes 10 arguments");
  std::optional<TensorSpec> spec = spec_of(arguments[3], arguments[4], arguments[5]);
  if (!spec) return 0;
  spec->prescale = factor(arguments[6]);
  spec->postscale = factor(arguments[7]);
  const std::size_t bytes = spec->descriptor.op_bytes;
  const auto memory = [&](PyObject* address) {
    return std::span(reinterpret_cast<std::byte*>(number(address)), bytes);
  };
  return start(native_of<PyFusion>(self, fusion_type), *spec, memory(arguments[1]), memory(arguments[2]),
               owner_of(arguments[8], arguments[9], arguments[0], *spec));
}

/// Fusion.submit_tensor(reader, tensor, output, name, op, prescale, postscale, /): the ticket, or 0. None where it
/// has to be read otherwise.
std::optional<Ticket> submit_tensor(PyObject* self, std::span<PyObject* const> arguments) {
  if (arguments.size() != 7) throw py::type_error("submit_tensor() takes 7 arguments");
  const auto& reader = native_of<TensorReader>(arguments[0], tensor_reader_type());
  View source;
  View result;
  if (!reader.read(arguments[1], source)) return std::nullopt;
  if (arguments[2] == arguments[1]) {
    result = source;
  } else if (!reader.read(arguments[2], result) || result.dtype != source.dtype ||
             result.bytes.size() != source.bytes.size()) {
    return std::nullopt;
  }
  TensorSpec spec;
  spec.descriptor.dtype = source.dtype;
  spec.descriptor.reduce = static_cast<ReduceOp>(number(arguments[4]));
  spec.descriptor.shape = source.shape.sizes;
  spec.descriptor.dims = source.shape.dims;
  spec.descriptor.op_bytes = source.bytes.size();
  spec.prescale = factor(arguments[5]);
  spec.postscale = factor(arguments[6]);
  return start(native_of<PyFusion>(self, fusion_type), spec, source.bytes, result.bytes,
               owner_of(arguments[1], arguments[2], arguments[3], spec));
}

/// As the interpreter has its own methods: a tensor's whole cost is these calls.
template <std::optional<Ticket> (*Submit)(PyObject*, std::span<PyObject* const>)>
PyObject* submit_method(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return guarded([&] {
    const std::optional<Ticket> ticket = Submit(self, {arguments, static_cast<std::size_t>(count)});
    return ticket ? PyLong_FromUnsignedLongLong(*ticket) : py::none().release().ptr();
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

/// Fusion.finish(ticket, timeout, /): its result, or False where it went alone. None: no ticket of a tensor that is in
/// flight. It is forgotten then. Raises how it ended, where not well; drop() follows.
PyObject* finish_method(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return guarded([&]() -> PyObject* {
    if (count != 2) throw py::type_error("finish() takes 2 arguments");
    const auto& fusion = native_of<PyFusion>(self, fusion_type);
    const Ticket ticket = number(arguments[0]);
    if (!fusion.owners->contains(ticket)) return py::none().release().ptr();
    const std::optional<bool> ended = wait(fusion, ticket, factor(arguments[1]));
    if (!ended) {
      throw Error(Code::kInternal, "it did not end at its deadline: this is a bug in Herring, please report it");
    }
    fusion.owned.get()->forget(ticket).or_throw();
    const auto owner = fusion.owners->extract(ticket);  // Another thread may have been faster.
    if (owner.empty()) return py::none().release().ptr();
    return *ended ? owner.mapped().result.inc_ref().ptr() : py::bool_(false).release().ptr();
  });
}

/// Which of them have ended with their sum in place, for one who is not their owner.
std::vector<bool> ended_well(const PyFusion& self, const std::vector<Ticket>& tickets) {
  const std::shared_ptr<Fusion> fusion = self.owned.get();
  std::vector<bool> well;
  for (const Ticket ticket : tickets) {
    const auto [state, status] = fusion->outcome(ticket);
    well.push_back(self.owners->contains(ticket) && state == Fusion::State::kDone && status.is_ok());
  }
  return well;
}

/// The name of one that has failed, which is forgotten.
py::object drop(const PyFusion& self, Ticket ticket) {
  const auto owner = self.owners->extract(ticket);
  return owner.empty() ? py::object(py::none()) : owner.mapped().name;
}

std::vector<std::pair<Ticket, py::object>> in_flight(const PyFusion& self) {
  std::vector<std::pair<Ticket, py::object>> found;
  found.reserve(self.owners->size());
  for (const auto& [ticket, owner] : *self.owners) found.emplace_back(ticket, owner.name);
  std::ranges::sort(found, {}, &std::pair<Ticket, py::object>::first);
  return found;
}

void on_end(const PyFusion& self, Ticket ticket, const py::function& callback) {
  const Callback kept(callback);
  const std::shared_ptr<Fusion> fusion = self.owned.get();
  py::gil_scoped_release unlocked;
  fusion->on_end(ticket, [kept](Fusion::State state) {
    static_cast<void>(kept([state](const py::function& function) { function(state == Fusion::State::kDone); }));
  });
}

PyCFunction as_function(PyObject* (*method)(PyObject*, PyObject* const*, Py_ssize_t) noexcept) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

void bind_methods(py::class_<PyFusion>& type) {
  static std::array<PyMethodDef, 3> definitions = {{
      {"submit", as_function(&submit_method<&submit>), METH_FASTCALL, nullptr},
      {"submit_tensor", as_function(&submit_method<&submit_tensor>), METH_FASTCALL, nullptr},
      {"finish", as_function(&finish_method), METH_FASTCALL, nullptr},
  }};
  fusion_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  for (PyMethodDef& definition : definitions) add_method(type, definition);
}

}  // namespace

void bind_fusion(py::module_& module) {
  py::class_<PyFusion> type(module, "Fusion");
  type.def(py::init(&make_fusion), py::kw_only(), py::arg("runtime"), py::arg("group"), py::arg("ranks"),
           py::arg("index"), py::arg("bucket_bytes"), py::arg("tensor_bytes"), py::arg("cycle"), py::arg("timeout"),
           py::arg("series"), py::arg("checks_finite"), py::arg("go_alone"))
      .def(
          "place",
          [](const PyFusion& self, const std::vector<std::string>& names, const std::vector<std::uint64_t>& sizes) {
            return place(names, sizes, [&](const std::vector<collectives::NamedBytes>& tensors) {
              return self.owned.get()->place(tensors);
            });
          },
          py::arg("names"), py::arg("sizes"))
      .def("counters",
           [](const PyFusion& self) {
             const Fusion::Counters counters = self.owned.get()->counters();
             return std::pair(counters.buckets, counters.in_place);
           })
      .def("poll", [](const PyFusion& self,
                      Ticket ticket) { return self.owned.get()->poll(ticket) != Fusion::State::kPending; })
      .def("wait", &wait)
      .def("ended_well", &ended_well, py::arg("tickets"))
      .def("drop", &drop)
      .def("in_flight", &in_flight)
      .def("has_pending",
           [](const PyFusion& self, const std::string& name) { return self.owned.get()->has_pending(name); })
      .def("__contains__", [](const PyFusion& self, Ticket ticket) { return self.owners->contains(ticket); })
      .def("on_end", &on_end)
      .def("went_outside", [](const PyFusion& self, const std::string& name) { self.owned.get()->went_outside(name); })
      .def("came_back", [](const PyFusion& self, const std::string& name) { self.owned.get()->came_back(name); })
      .def("pause", [](const PyFusion& self) { self.owned.get()->pause(); })
      .def("resume", [](const PyFusion& self) { self.owned.get()->resume(); })
      .def(
          "close",
          [](const PyFusion& self, double timeout, bool leaves_job) {
            const std::shared_ptr<Fusion> fusion = self.owned.get();
            py::gil_scoped_release unlocked;
            fusion->close(deadline_after(timeout), leaves_job ? Fusion::Leaving::kJob : Fusion::Leaving::kGroup);
          },
          py::arg("timeout"), py::arg("leaves_job"));
  bind_methods(type);
}

}  // namespace herring::python
