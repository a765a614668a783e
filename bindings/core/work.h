#pragma once

#include <memory>
#include <optional>
#include <string>

#include "bindings/core/python.h"
#include "runtime/runtime.h"

namespace herring::python {

/// Python's Work. Safe to drop at any time: the operation goes on and holds what it needs.
struct PyWork {
  explicit PyWork(std::shared_ptr<runtime::Work> started) : owned(std::move(started)) {}
  ProcessOwned<runtime::Work> owned;
};

/// What Python says in Runtime.submit(), before it is checked.
struct SubmitArguments {
  std::string collective;  ///< "all_reduce", "broadcast", "all_gather", "barrier"
  py::object input;
  py::object output;
  std::string op;
  std::uint32_t root = 0;
  std::uint32_t group = 0;
  std::optional<std::string> name;
  std::optional<double> timeout;
};

/// Checks the arguments (throws Error(kInvalidArgument)), starts the operation, and keeps both arrays alive until it is
/// done, whether or not anybody holds the result.
std::unique_ptr<PyWork> submit(const std::shared_ptr<runtime::Runtime>& runtime, const SubmitArguments& arguments);

void bind_work(py::module_& module);

}  // namespace herring::python
