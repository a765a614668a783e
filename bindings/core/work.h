#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/core/buffer.h"
#include "bindings/core/py_runtime.h"
#include "bindings/core/python.h"
#include "runtime/runtime.h"

namespace herring::python {

/// Python's Work. Safe to drop at any time: the operation goes on and holds what it needs.
struct PyWork {
  explicit PyWork(std::shared_ptr<runtime::Work> started) : owned(std::move(started)) {}
  ~PyWork();
  PyWork(const PyWork&) = delete;
  PyWork& operator=(const PyWork&) = delete;

  ProcessOwned<runtime::Work> owned;
  /// The arrays of a call that is waited for at once, or may travel with others. Those of the rest are held by a
  /// callback.
  std::array<Holding, 2> arrays;
};

/// What Python says in Runtime.submit() and Runtime.run(), before it is checked. Borrowed for the time of the call.
struct SubmitArguments {
  std::string_view collective;  ///< "all_reduce", "broadcast", "all_gather", "barrier"
  py::handle input;             ///< None: the output.
  py::handle output;
  py::handle op;
  std::uint32_t root = 0;
  std::uint32_t group = 0;
  std::optional<std::string> name;
  std::optional<double> timeout;
  bool is_waited_for = false;
  bool has_backup = false;
  std::uint64_t digest = 0;  ///< Of the list to which its arrays belong; 0: no list.
  bool may_travel = false;   ///< A call of the program's own, by whose name others may know it.
};

/// A message to or from one rank of a group; see runtime::Send and runtime::Receive.
struct MessageArguments {
  py::handle memory;
  std::optional<std::uint32_t> peer;  ///< None: from any rank.
  std::uint64_t tag = 0;
  std::uint32_t group = 0;
  std::optional<double> timeout;
};

std::optional<Duration> to_duration(const std::optional<double>& seconds);

/// Checks the arguments (throws Error(kInvalidArgument)), starts the operation, and keeps both arrays alive until it is
/// done, whether or not anybody holds the result.
std::unique_ptr<PyWork> submit(const PyRuntime& runtime, const SubmitArguments& arguments);
/// submit() and wait in one, without what only a call that goes on needs: for small arrays that is most of the time.
/// Throws what the operation failed with.
void run(const PyRuntime& runtime, const SubmitArguments& arguments);
/// Likewise.
std::unique_ptr<PyWork> send(const std::shared_ptr<runtime::Communicator>& runtime, const MessageArguments& arguments);
std::unique_ptr<PyWork> receive(const std::shared_ptr<runtime::Communicator>& runtime,
                                const MessageArguments& arguments);

/// Whether it has ended; throws why it failed.
bool finish(const PyWork& self);
/// Waits without the interpreter lock; false after so many seconds. `blocks`: the operation ends before that by itself.
bool wait(const PyWork& self, double seconds, bool blocks);

void bind_work(py::module_& module);

}  // namespace herring::python
