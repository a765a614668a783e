// The binding's one translation unit: torch's headers cost most of the compile time, so they are read once.
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "backend.cc"
#include "composed.cc"
#include "device.cc"
#include "messages.cc"
#include "monitored.cc"
#include "sparse.cc"
#include "staged.cc"
#include "tensors.cc"
#include "work.cc"

namespace herring::torch_binding {
namespace {

constexpr const char* kCapsuleName = "herring.runtime";

/// herring._core has another pybind11, whose types this module cannot see: the runtime comes in a capsule that holds a
/// std::shared_ptr<runtime::Communicator>*.
std::shared_ptr<Process> make_process(const py::capsule& capsule, bool takes_accelerators) {
  const char* const name = capsule.name();
  TORCH_CHECK_VALUE(name != nullptr && std::string_view(name) == kCapsuleName, "herring: expected a capsule named '",
                    kCapsuleName, "', got '", name == nullptr ? "" : name, "'");
  return std::make_shared<Process>(*capsule.get_pointer<std::shared_ptr<runtime::Communicator>>(), takes_accelerators);
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
      error.discard_as_unraisable("herring: while a process group was being destroyed");
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

}  // namespace
}  // namespace herring::torch_binding

PYBIND11_MODULE(HERRING_TORCH_MODULE, m) {
  namespace binding = herring::torch_binding;
  // Makes c10d's Python types known before the first Backend is returned.
  py::module_::import("torch._C._distributed_c10d");
  m.attr("torch_version") = TORCH_VERSION;
  m.attr("stamp") = HERRING_TORCH_STAMP;  // Also read from the file, without loading it.
  py::class_<binding::Process, std::shared_ptr<binding::Process>>(m, "Process")
      .def(py::init(&binding::make_process), py::arg("runtime_capsule"), py::arg("takes_accelerators"));
  m.def("create_backend", &binding::create_backend, py::arg("process"), py::arg("group_id"), py::arg("name"),
        py::arg("rank"), py::arg("job_ranks"), py::arg("timeout_ms"), py::arg("is_world"), py::arg("released"));
}
