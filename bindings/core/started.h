#pragma once

#include <memory>

#include "bindings/core/python.h"
#include "bindings/core/work.h"

namespace herring::python {

/// A new object of `type`, which is herring._core.Started or derived from it. Throws py::type_error for another.
py::object make_started(py::handle type, std::unique_ptr<PyWork> work, py::handle result, py::handle name,
                        py::handle ranks, double timeout);

void bind_started(py::module_& module);

}  // namespace herring::python
