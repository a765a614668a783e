#pragma once

#include <memory>
#include <string>
#include <utility>

#include "bindings/core/python.h"
#include "collectives/operations.h"
#include "runtime/runtime.h"

namespace herring::python {

struct PyRuntime {
  PyRuntime(std::shared_ptr<runtime::Communicator> runtime, const Config& config)
      : owned(runtime),
        operations(std::make_shared<collectives::Operations>(std::move(runtime), config)),
        timeout_s(config.timeout_s) {}
  ProcessOwned<runtime::Communicator> owned;
  ProcessOwned<collectives::Operations>
      operations;    ///< The same, for a program's own calls: small ones may travel together.
  double timeout_s;  ///< Of operations that say none.
};

py::dict to_dict(const runtime::ServerCounters& counters);
/// Of this machine, for messages to people.
std::string host_name();

}  // namespace herring::python
