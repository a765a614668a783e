#include "bindings/core/python.h"

namespace herring::python {
void bind_cuda(py::module_& module);           // cuda.cc
void bind_job_needs(py::module_& module);      // job_needs.cc
void bind_row_exchange(py::module_& module);   // row_exchange.cc
void bind_tensor_reader(py::module_& module);  // tensor_reader.cc
}  // namespace herring::python

PYBIND11_MODULE(_core, module) {
  module.doc() = "Herring's C++ runtime. Private: use the functions of the herring package.";
  herring::python::register_errors(module);
  herring::python::bind_config(module);
  herring::python::bind_hub(module);
  herring::python::bind_fabric(module);
  herring::python::bind_job_needs(module);
  herring::python::bind_cuda(module);
  herring::python::bind_device_arrays(module);
  herring::python::bind_runtime(module);
  herring::python::bind_tensor_reader(module);
  herring::python::bind_fusion(module);
  herring::python::bind_arrays(module);
  herring::python::bind_row_exchange(module);
  herring::python::bind_elastic(module);
}
