#pragma once

#include <memory>
#include <string>
#include <utility>

#include "bindings/core/python.h"
#include "runtime/runtime.h"

namespace herring::python {

struct PyRuntime {
  explicit PyRuntime(std::shared_ptr<runtime::Communicator> runtime) : owned(std::move(runtime)) {}
  ProcessOwned<runtime::Communicator> owned;
};

py::dict to_dict(const runtime::ServerCounters& counters);
/// Of this machine, for messages to people.
std::string host_name();

}  // namespace herring::python
