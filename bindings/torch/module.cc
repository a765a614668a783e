// The first of the binding's two translation units (process_group.cc): the module, and collectives made of messages.
// torch's headers cost nearly half of the compile time. So there are two, which are compiled at once and take equally
// long, and not one for each file.
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "backend.h"
#include "batch.h"
#include "device.h"
#include "gil.h"
#include "handed.h"
#include "host_memory.h"
#include "pack.h"
#include "parted.h"
#include "peers.h"
#include "tensors.h"
#include "work.h"

#include "composed.cc"
#include "messages.cc"
#include "monitored.cc"
#include "sparse.cc"

namespace herring::torch_binding {
namespace {

constexpr const char* kCapsuleName = "herring.runtime";

/// herring._core has another pybind11, whose types this module cannot see: the runtime comes in a capsule that holds a
/// std::shared_ptr<runtime::Communicator>*.
const std::shared_ptr<runtime::Communicator>& runtime_of(const py::capsule& capsule) {
  const char* const name = capsule.name();
  TORCH_CHECK_VALUE(name != nullptr && std::string_view(name) == kCapsuleName, "herring: expected a capsule named '",
                    kCapsuleName, "', got '", name == nullptr ? "" : name, "'");
  return *capsule.get_pointer<std::shared_ptr<runtime::Communicator>>();
}

std::shared_ptr<Process> make_process(const py::capsule& capsule, bool takes_accelerators, const std::string& on_host,
                                      std::uint64_t device_memory_bytes, std::uint32_t device_blocks,
                                      const std::string& nccl, const std::string& gpudirect,
                                      std::uint64_t eager_bytes) {
  PeerSettings peers;
  peers.mode = on_host == "device" ? PeerSettings::Mode::kDevice
               : on_host == "nccl" ? PeerSettings::Mode::kNccl
               : on_host == "auto" ? PeerSettings::Mode::kAuto
                                   : PeerSettings::Mode::kHost;
  peers.memory_bytes = device_memory_bytes;
  peers.blocks = device_blocks;
  peers.nccl = nccl;
  DirectSettings direct;
  direct.mode = gpudirect == "on"     ? DirectSettings::Mode::kOn
                : gpudirect == "auto" ? DirectSettings::Mode::kAuto
                                      : DirectSettings::Mode::kOff;
  direct.least_bytes = eager_bytes;
  return std::make_shared<Process>(runtime_of(capsule), takes_accelerators, peers, direct);
}

/// A Python callable that may be called and dropped on any thread, with or without the GIL.
std::function<void()> on_any_thread(py::function function) {
  const std::shared_ptr<py::function> shared(new py::function(std::move(function)), [](py::function* owned) {
    if (Py_IsInitialized() == 0) {
      static_cast<void>(owned->release());  // The interpreter took the object with it.
    } else {
      const py::gil_scoped_acquire gil;
      owned->dec_ref();
      static_cast<void>(owned->release());
    }
    delete owned;
  });
  return [shared] {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    try {
      (*shared)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("herring: in a callback");
    }
  };
}

c10::intrusive_ptr<c10d::Backend> create_backend(std::shared_ptr<Process> process, std::uint32_t group_id,
                                                 std::string name, int rank, std::vector<std::uint32_t> job_ranks,
                                                 std::int64_t timeout_ms, bool is_world, py::function released) {
  GroupOptions options;
  options.id = GroupId{group_id};
  options.name = std::move(name);
  options.rank = rank;
  options.size = static_cast<int>(job_ranks.size());
  options.job_ranks = std::move(job_ranks);
  options.timeout = std::chrono::milliseconds(timeout_ms);
  options.is_world = is_world;
  options.released = on_any_thread(std::move(released));
  return c10::make_intrusive<Backend>(std::move(process), std::move(options));
}

/// As Process keeps one: a forked child has the memory, but not the thread that a destructor would wait for.
std::shared_ptr<Stager> make_stager() {
  return {new Stager(), [pid = getpid()](Stager* stager) {
            if (getpid() == pid) delete stager;
          }};
}

std::shared_ptr<HostMemory> make_host_memory(const py::capsule& capsule) {
  return {new HostMemory(runtime_of(capsule)), [pid = getpid()](HostMemory* memory) {
            if (getpid() != pid) return;
            const GilRelease no_gil;
            delete memory;
          }};
}

std::shared_ptr<Handed> hand(const std::shared_ptr<Stager>& stager, std::shared_ptr<HostMemory> memory,
                             at::Device device, const std::string& call, double timeout_s) {
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1e3));
  return std::make_shared<Handed>(stager, std::move(memory), device, call, timeout);
}

std::shared_ptr<Batch> make_batch(const std::shared_ptr<Stager>& stager, std::shared_ptr<HostMemory> memory,
                                  at::Device device, const std::string& call, double timeout_s) {
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1e3));
  return std::make_shared<Batch>(stager, std::move(memory), device, call, timeout);
}

/// What Handed and Batch say of their copies to the host.
template <class Type>
void define_arrival(Type& type) {
  using Self = typename Type::type;
  type.def("is_read", [](Self& self) { return self.arrival().is_there(); })
      .def(
          "wait",
          [](Self& self, double limit_s) { return self.arrival().wait(std::chrono::duration<double>(limit_s)); },
          py::call_guard<py::gil_scoped_release>())
      .def("on_read", [](Self& self, py::function then) { self.arrival().on_there(on_any_thread(std::move(then))); })
      .def("failure", [](Self& self) -> std::optional<std::pair<std::string, bool>> {
        const auto failure = self.arrival().failure();
        if (!failure) return std::nullopt;
        return std::pair(failure->text, failure->is_timeout);
      });
}

/// For herring.horovod.torch, whose operations are put together in Python. Torch's errors become Python's.
void define_handed(py::module_& m) {
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;
  py::class_<Stager, std::shared_ptr<Stager>>(m, "Stager")
      .def(py::init(&make_stager))
      .def("wait_until_started", &Stager::wait_until_started, py::call_guard<py::gil_scoped_release>())
      .def("stop", &Stager::stop, py::call_guard<py::gil_scoped_release>());
  py::class_<HostMemory, std::shared_ptr<HostMemory>>(m, "HostMemory")
      .def(py::init(&make_host_memory), py::arg("runtime_capsule"));
  py::class_<Handed, std::shared_ptr<Handed>> handed(m, "Handed");
  define_arrival(handed);
  handed
      .def("read",
           wrap_pybind_function_no_gil([](Handed& self, const at::Tensor& tensor) { return self.read(tensor); }))
      .def("write", wrap_pybind_function([](Handed& self, const at::Tensor& tensor) { return self.write(tensor); }))
      .def("update", wrap_pybind_function_no_gil(
                         [](Handed& self, const std::vector<at::Tensor>& sources,
                            const std::vector<at::Tensor>& targets) { return self.update(sources, targets); }))
      .def("write_from", wrap_pybind_function([](Handed& self, const at::Tensor& tensor, const at::Tensor& host) {
             self.write_from(tensor, host);
           }))
      .def("host_like", wrap_pybind_function([](Handed& self, const at::Tensor& like, std::vector<std::int64_t> sizes) {
             return self.host_memory(sizes, like.scalar_type());
           }))
      .def("start", wrap_pybind_function_no_gil([](Handed& self) { self.start(); }))
      .def("write_back", wrap_pybind_function_no_gil([](Handed& self) { self.write_back(); }))
      .def("is_written", wrap_pybind_function([](Handed& self) { return self.is_written(); }))
      .def("block_current_stream", wrap_pybind_function([](Handed& self) { self.block_current_stream(); }))
      .def("place", wrap_pybind_function_no_gil([](Handed& self, const at::Tensor& host) { return self.place(host); }));
  m.def("hand", wrap_pybind_function(&hand));
  py::class_<Batch, std::shared_ptr<Batch>> batch(m, "Batch");
  define_arrival(batch);
  batch
      .def("add", wrap_pybind_function([](Batch& self, const at::Tensor& source, const at::Tensor& target) {
             return self.add(source, target);
           }))
      .def("close", wrap_pybind_function_no_gil([](Batch& self) { self.close(); }))
      .def("hosts", wrap_pybind_function([](Batch& self) { return self.hosts(); }))
      .def("write_back",
           wrap_pybind_function_no_gil([](Batch& self, std::vector<std::size_t> which) { self.write_back(which); }))
      .def("is_written", wrap_pybind_function([](Batch& self, std::size_t index) { return self.is_written(index); }))
      .def("block_current_stream",
           wrap_pybind_function([](Batch& self, std::size_t index) { self.block_current_stream(index); }));
  m.def("batch", wrap_pybind_function(&make_batch));
  m.def("takes", wrap_pybind_function(&Pack::takes));
  py::class_<Moment, std::shared_ptr<Moment>>(m, "Moment").def("block_current_stream", &Moment::block_current_stream);
  m.def("moment", wrap_pybind_function([](at::Device device) { return std::make_shared<Moment>(device); }));
}

}  // namespace
}  // namespace herring::torch_binding

PYBIND11_MODULE(HERRING_TORCH_MODULE, m) {
  namespace binding = herring::torch_binding;
  // Makes c10d's Python types known before the first Backend is returned.
  py::module_::import("torch._C._distributed_c10d");
  m.attr("torch_version") = TORCH_VERSION;
  m.attr("stamp") = HERRING_TORCH_STAMP;  // Also read from the file, without loading it.
  py::class_<binding::Process, std::shared_ptr<binding::Process>>(m, "Process")
      .def(py::init(&binding::make_process), py::arg("runtime_capsule"), py::arg("takes_accelerators"),
           py::arg("on_host"), py::arg("device_memory_bytes"), py::arg("device_blocks"), py::arg("nccl"),
           py::arg("gpudirect"), py::arg("eager_bytes"))
      .def(
          "stop", [](binding::Process& self) { self.stager->stop(); }, py::call_guard<py::gil_scoped_release>());
  m.def("create_backend", &binding::create_backend, py::arg("process"), py::arg("group_id"), py::arg("name"),
        py::arg("rank"), py::arg("job_ranks"), py::arg("timeout_ms"), py::arg("is_world"), py::arg("released"));
  binding::define_handed(m);
}
