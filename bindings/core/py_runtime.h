#pragma once

#include <memory>
#include <string>
#include <utility>

#include "bindings/core/python.h"
#include "runtime/runtime.h"

namespace herring::python {

struct PyRuntime {
  PyRuntime(std::shared_ptr<runtime::Communicator> runtime, double timeout)
      : owned(std::move(runtime)), timeout_s(timeout) {}
  ProcessOwned<runtime::Communicator> owned;
  double timeout_s;  ///< Of operations that say none.
};

py::dict to_dict(const runtime::ServerCounters& counters);
/// Of this machine, for messages to people.
std::string host_name();

}  // namespace herring::python
