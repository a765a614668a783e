#include <string>

#include "bindings/core/python.h"
#include "cuda/driver.h"
#include "cuda/open.h"

namespace herring::python {
namespace {

py::dict survey(const std::string& library) {
  const cuda::Survey found = [&] {
    const py::gil_scoped_release no_gil;
    return cuda::survey(library);
  }();
  py::list gpus;
  for (const cuda::GpuFacts& gpu : found.gpus) {
    py::dict entry;
    entry["number"] = gpu.number;
    entry["name"] = gpu.name;
    entry["pci_bus_id"] = gpu.pci_bus_id;
    entry["memory_bytes"] = gpu.memory_bytes;
    entry["capability"] = std::to_string(gpu.major) + "." + std::to_string(gpu.minor);
    entry["multiprocessors"] = gpu.multiprocessors;
    entry["copy_engines"] = gpu.copy_engines;
    entry["peers"] = gpu.peers;
    gpus.append(entry);
  }
  py::dict result;
  result["problem"] = found.problem;
  result["library"] = found.library;
  result["version"] = found.version;
  result["gpus"] = gpus;
  return result;
}

/// What NCCL there is: its description. Throws Error(kUnavailable).
std::string find_nccl(const std::string& library) {
  const py::gil_scoped_release no_gil;
  return cuda::open_nccl(library)->description();
}

}  // namespace

void bind_cuda(py::module_& module);

void bind_cuda(py::module_& module) {
  module.def("survey_cuda", &survey, py::arg("library") = std::string(cuda::Driver::kLibrary));
  module.def("find_nccl", &find_nccl, py::arg("library"));
}

}  // namespace herring::python
