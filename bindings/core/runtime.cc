#include "runtime/runtime.h"

#include <array>

#include "bindings/core/buffer.h"
#include "bindings/core/device_array.h"
#include "bindings/core/py_config.h"
#include "bindings/core/py_hub.h"
#include "bindings/core/py_runtime.h"
#include "bindings/core/python.h"
#include "bindings/core/started.h"
#include "bindings/core/work.h"

namespace herring::python {

py::dict to_dict(const runtime::ServerCounters& counters) {
  py::dict entry;
  entry["server"] = counters.server;
  entry["place"] = counters.place;
  entry["bytes_received"] = counters.bytes_received;
  entry["bytes_sent"] = counters.bytes_sent;
  if (counters.messages) entry["messages"] = *counters.messages;
  if (counters.ops) entry["ops"] = *counters.ops;
  entry["memory_bound_bytes"] = counters.memory_bound_bytes;
  entry["record_bound_bytes"] = counters.record_bound_bytes;
  return entry;
}

namespace {

using runtime::Communicator;
using runtime::Runtime;
using runtime::ServerCounters;
using runtime::ServerProcess;

/// The name of the capsule, and the contract with every other extension that opens it: a heap
/// std::shared_ptr<herring::runtime::Communicator>*, which the capsule frees.
constexpr const char* kCapsuleName = "herring.runtime";

/// Seconds that small operations which are pending have at the end of a group or the job.
constexpr double kLongestClose = 30;

struct PyServerProcess {
  explicit PyServerProcess(std::shared_ptr<ServerProcess> server) : owned(std::move(server)) {}
  ProcessOwned<ServerProcess> owned;
};

std::unique_ptr<PyRuntime> make_runtime(const PyConfig& config, const PyHubClient& hub, std::uint32_t rank,
                                        std::vector<std::string> fabric_search, double timeout) {
  const runtime::RuntimeOptions options{config.result.config, hub.owned.get(), rank, std::move(fabric_search)};
  const Instant deadline = deadline_after(timeout);
  return std::make_unique<PyRuntime>(
      call_interruptibly([options, deadline] { return std::make_shared<Runtime>(options, deadline); }), options.config);
}

py::capsule make_capsule(const PyRuntime& self) {
  auto holder = std::make_unique<std::shared_ptr<Communicator>>(self.owned.get());
  py::capsule capsule(holder.get(), kCapsuleName, [](PyObject* object) {
    std::unique_ptr<std::shared_ptr<Communicator>> last(
        static_cast<std::shared_ptr<Communicator>*>(PyCapsule_GetPointer(object, kCapsuleName)));
    py::gil_scoped_release unlocked;
    last.reset();
  });
  static_cast<void>(holder.release());
  return capsule;
}

/// The memory, and why there is none where the system has just refused it.
std::pair<std::unique_ptr<PyMemory>, std::string> pinned(const PyRuntime& self, std::size_t bytes,
                                                         const DeviceArray& array) {
  std::shared_ptr<std::byte> memory;
  Status why_not;
  {
    const py::gil_scoped_release unlocked;
    memory = self.pinned.get()->take(bytes, array.copies(), why_not);
  }
  return {memory ? std::make_unique<PyMemory>(std::move(memory), bytes) : nullptr,
          why_not.is_ok() ? "" : why_not.message()};
}

std::unique_ptr<PyMemory> allocate(const PyRuntime& self, std::size_t bytes) {
  std::shared_ptr<std::byte> memory = self.owned.get()->allocate(bytes);
  return memory ? std::make_unique<PyMemory>(std::move(memory), bytes) : nullptr;
}

py::list server_counters(const PyRuntime& self) {
  const auto all = call_interruptibly([runtime = self.owned.get()] { return runtime->server_counters(); });
  py::list rows;
  for (const ServerCounters& counters : all) rows.append(to_dict(counters));
  return rows;
}

py::list stragglers(const PyRuntime& self) {
  const auto all = call_interruptibly([runtime = self.owned.get()] { return runtime->stragglers(); });
  py::list rows;
  for (const runtime::Straggler& one : all) {
    py::dict entry;
    entry["rank"] = one.rank;
    entry["announces"] = one.announces;
    entry["mean_late_s"] = one.mean_late_s;
    entry["last_share"] = one.last_share;
    rows.append(entry);
  }
  return rows;
}

py::dict stats(const PyRuntime& self) {
  const runtime::RuntimeStats now = self.owned.get()->stats();
  py::dict result;
  result["ops_completed"] = now.ops_completed;
  result["ops_failed"] = now.ops_failed;
  result["bytes_to_servers"] = now.bytes_to_servers;
  result["bytes_from_servers"] = now.bytes_from_servers;
  result["zero_copy_ops"] = now.zero_copy_ops;
  result["staged_ops"] = now.staged_ops;
  result["damaged_messages"] = now.damaged_messages;
  result["resent_messages"] = now.resent_messages;
  result["strangers"] = now.strangers;
  py::dict dropped;
  for (std::size_t rank = 0; rank < now.dropped_contributions.size(); ++rank) {
    if (now.dropped_contributions[rank] > 0) dropped[py::int_(rank)] = now.dropped_contributions[rank];
  }
  result["dropped_contributions"] = dropped;
  return result;
}

std::unique_ptr<PyServerProcess> make_server(const PyConfig& config, const PyHubClient& hub, std::uint32_t rank,
                                             std::vector<std::string> fabric_search, double timeout) {
  const ServerProcess::Options options{config.result.config, hub.owned.get(), rank, std::move(fabric_search)};
  const Instant deadline = deadline_after(timeout);
  return std::make_unique<PyServerProcess>(
      call_interruptibly([options, deadline] { return std::make_shared<ServerProcess>(options, deadline); }));
}

void run_server(const PyServerProcess& self) {
  const auto server = self.owned.get();
  call_interruptibly([server] { return server->run(); }, [server] { server->stop(); }).or_throw();
}

/// Of PyRuntime itself; set before any method can be called.
PyTypeObject* runtime_type = nullptr;

const PyRuntime& runtime_of(PyObject* self) { return native_of<PyRuntime>(self, runtime_type); }

/// None: the operation goes by the order of calls.
std::optional<std::string> name_of(py::handle name) {
  if (name.is_none()) return std::nullopt;
  const auto refuse = [name](const char* why) -> std::string {
    throw Error(Code::kInvalidArgument, "name is " + py::cast<std::string>(py::repr(name)) + "; " + why);
  };
  if (!py::isinstance<py::str>(name)) return refuse("it must be a string");
  try {
    return std::string(text_of(name));
  } catch (const py::error_already_set&) {
    return refuse("it must have UTF-8 characters only, no lone surrogate");
  }
}

/// Runtime.run(collective, input, output, op, root, name, timeout, backup, /).
void run(PyObject* self, std::span<PyObject* const> arguments) {
  if (arguments.size() != 8) throw py::type_error("run() takes 8 arguments, not " + std::to_string(arguments.size()));
  const PyRuntime& runtime = runtime_of(self);
  SubmitArguments given;
  given.collective = text_of(arguments[0]);
  given.input = arguments[1];
  given.output = arguments[2];
  given.op = arguments[3];
  given.root = py::cast<std::uint32_t>(py::handle(arguments[4]));
  given.name = name_of(arguments[5]);
  if (arguments[6] != Py_None) given.timeout = py::cast<double>(py::handle(arguments[6]));
  given.is_waited_for = true;
  given.has_backup = arguments[7] == Py_True;
  run(runtime, given);
}

/// A method as the interpreter has its own: for small arrays a third of a call's time went into the arguments.
PyObject* run_method(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return guarded([&] {
    run(self, {arguments, static_cast<std::size_t>(count)});
    return py::none().release().ptr();
  });
}

/// Runtime.start(type, input, output, op, name, group, ranks, timeout, /): an all_reduce by name that may travel with
/// others; a handle of this type.
py::object start(PyObject* self, std::span<PyObject* const> arguments) {
  if (arguments.size() != 8) throw py::type_error("start() takes 8 arguments, not " + std::to_string(arguments.size()));
  SubmitArguments given;
  given.collective = name(Collective::kAllReduce);
  given.input = arguments[1];
  given.output = arguments[2];
  given.op = arguments[3];
  given.name = name_of(arguments[4]);
  given.group = py::cast<std::uint32_t>(py::handle(arguments[5]));
  given.may_travel = true;
  const auto timeout = py::cast<double>(py::handle(arguments[7]));
  return make_started(arguments[0], submit(runtime_of(self), given), given.output, arguments[4], arguments[6], timeout);
}

PyObject* start_method(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return guarded([&] { return start(self, {arguments, static_cast<std::size_t>(count)}).release().ptr(); });
}

void bind_fast(py::class_<PyRuntime>& type) {
  runtime_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  static std::array<PyMethodDef, 2> definitions = {
      PyMethodDef{"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run_method)), METH_FASTCALL,
                  nullptr},
      PyMethodDef{"start", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&start_method)), METH_FASTCALL,
                  nullptr}};
  for (PyMethodDef& definition : definitions) add_method(type, definition);
}

void bind_operations(py::class_<PyRuntime>& type) {
  type.def(
          "submit",
          [](const PyRuntime& self, const std::string& collective, const py::object& input, const py::object& output,
             const py::object& op, std::uint32_t root, std::uint32_t group, const py::object& name,
             std::optional<double> timeout, bool is_waited_for, bool backup, std::uint64_t digest, bool may_travel) {
            return submit(self, {collective, input, output, op, root, group, name_of(name), timeout, is_waited_for,
                                 backup, digest, may_travel});
          },
          py::arg("collective"), py::arg("input") = py::none(), py::arg("output") = py::none(), py::kw_only(),
          py::arg("op") = "sum", py::arg("root") = 0, py::arg("group") = 0, py::arg("name") = py::none(),
          py::arg("timeout") = py::none(), py::arg("is_waited_for") = false, py::arg("backup") = false,
          py::arg("digest") = 0, py::arg("may_travel") = false)
      .def(
          "send",
          [](const PyRuntime& self, const py::object& data, std::uint32_t to, std::uint64_t tag, std::uint32_t group,
             std::optional<double> timeout) {
            return send(self.owned.get(), {data, to, tag, group, timeout});
          },
          py::arg("data"), py::kw_only(), py::arg("to"), py::arg("tag"), py::arg("group") = 0,
          py::arg("timeout") = py::none())
      .def(
          "receive",
          [](const PyRuntime& self, const py::object& memory, std::optional<std::uint32_t> source, std::uint64_t tag,
             std::uint32_t group, std::optional<double> timeout) {
            return receive(self.owned.get(), {memory, source, tag, group, timeout});
          },
          py::arg("memory"), py::kw_only(), py::arg("source") = py::none(), py::arg("tag"), py::arg("group") = 0,
          py::arg("timeout") = py::none());
}

void bind_runtime_class(py::module_& module) {
  py::class_<PyRuntime> type(module, "Runtime");
  type.def(py::init(&make_runtime), py::kw_only(), py::arg("config"), py::arg("hub"), py::arg("rank"),
           py::arg("fabric_search"), py::arg("timeout"))
      .def_property_readonly("rank", [](const PyRuntime& self) { return self.owned.get()->rank(); })
      .def_property_readonly("size", [](const PyRuntime& self) { return self.owned.get()->size(); })
      .def_property_readonly("local_rank", [](const PyRuntime& self) { return self.owned.get()->local_rank(); })
      .def_property_readonly("local_size", [](const PyRuntime& self) { return self.owned.get()->local_size(); })
      .def_property_readonly("servers", [](const PyRuntime& self) { return self.owned.get()->servers(); })
      .def("description", [](const PyRuntime& self) { return self.owned.get()->description(); })
      .def(
          "add_group",
          [](const PyRuntime& self, std::uint32_t id, const std::vector<std::uint32_t>& ranks, bool may_travel) {
            const auto operations = self.operations.get();
            py::gil_scoped_release unlocked;
            operations->runtime()->add_group(GroupId{id}, ranks);
            if (may_travel) operations->open(GroupId{id}, ranks);
          },
          py::arg("group"), py::arg("ranks"), py::arg("may_travel") = false)
      .def(
          "remove_group",
          [](const PyRuntime& self, std::uint32_t id) {
            const auto operations = self.operations.get();
            py::gil_scoped_release unlocked;
            operations->close(GroupId{id}, deadline_after(kLongestClose));
            operations->runtime()->remove_group(GroupId{id});
          },
          py::arg("group"))
      .def("allocate", &allocate, py::arg("bytes"))
      .def("pinned", &pinned, py::arg("bytes"), py::arg("array"))
      .def(
          "place",
          [](const PyRuntime& self, std::uint32_t group, const std::vector<std::string>& names,
             const std::vector<std::uint64_t>& sizes) {
            return place(names, sizes, [&](const std::vector<collectives::NamedBytes>& tensors) {
              return self.operations.get()->place(GroupId{group}, tensors);
            });
          },
          py::arg("group"), py::arg("names"), py::arg("sizes"))
      .def(
          "abort",
          [](const PyRuntime& self, const std::string& reason) {
            const auto runtime = self.owned.get();
            py::gil_scoped_release unlocked;
            runtime->abort(reason);
          },
          py::arg("reason"))
      .def("shutdown",
           [](const PyRuntime& self) {
             call_interruptibly([operations = self.operations.get()] {
               operations->close(deadline_after(kLongestClose));
               operations->runtime()->shutdown();
             });
           })
      .def("stats", &stats)
      .def("server_counters", &server_counters)
      .def("stragglers", &stragglers)
      .def("capsule", &make_capsule);
  bind_operations(type);
  bind_fast(type);
}

}  // namespace

void bind_runtime(py::module_& module) {
  py::class_<PyMemory>(module, "Memory", py::buffer_protocol())
      .def("__len__", [](const PyMemory& self) { return self.bytes; })
      .def_buffer([](PyMemory& self) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.data), static_cast<py::ssize_t>(self.bytes));
      });
  module.def(
      "check_name", [](py::handle name) { static_cast<void>(name_of(name)); }, py::arg("name").none(true));
  bind_work(module);
  bind_started(module);
  bind_runtime_class(module);
  py::class_<PyServerProcess>(module, "ServerProcess")
      .def(py::init(&make_server), py::kw_only(), py::arg("config"), py::arg("hub"), py::arg("rank"),
           py::arg("fabric_search"), py::arg("timeout"))
      .def("run", &run_server)
      .def("stop", [](const PyServerProcess& self) { self.owned.get()->stop(); })
      .def("counters", [](const PyServerProcess& self) { return to_dict(self.owned.get()->counters()); })
      .def("close", [](PyServerProcess& self) { self.owned.reset(); });
}

}  // namespace herring::python
