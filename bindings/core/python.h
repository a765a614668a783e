#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>

#include "core/process.h"
#include "core/status.h"
#include "core/thread.h"
#include "core/types.h"

/// What every part of herring._core shares: lifetimes across fork, blocking calls that Ctrl-C ends, and deadlines.
namespace herring::python {

namespace py = pybind11;

void register_errors(py::module_& module);
void bind_config(py::module_& module);
void bind_hub(py::module_& module);
void bind_fabric(py::module_& module);
void bind_runtime(py::module_& module);
void bind_fusion(py::module_& module);
void bind_arrays(py::module_& module);
void bind_elastic(py::module_& module);
void bind_device_arrays(py::module_& module);

/// True once the interpreter no longer hands out its lock; Python objects are then left alone.
bool is_finalizing() noexcept;

/// Raises the class of herring._errors that stands for it.
void raise(const Error& error) noexcept;

/// What `call` returns, for a method as the interpreter has its own; null, with the exception set, where it throws.
template <class Call>
PyObject* guarded(const Call& call) noexcept {
  try {
    return call();
  } catch (py::error_already_set& raised) {
    raised.restore();
  } catch (const py::builtin_exception& raised) {
    raised.set_error();
  } catch (const Error& error) {
    raise(error);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

/// What a method is called on; without pybind11's search for the type, which took a tenth of a call, where it is
/// `type`.
template <class Native>
const Native& native_of(PyObject* self, const PyTypeObject* type) {
  if (Py_TYPE(self) != type) return py::cast<const Native&>(py::handle(self));
  const void* value = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr();
  if (value == nullptr) throw py::type_error("__init__() was not called");
  return *static_cast<const Native*>(value);
}

/// Adds a method as the interpreter has its own. `definition` lives as long as the type.
inline void add_method(py::object& type, PyMethodDef& definition) {
  PyObject* method = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition);
  if (method == nullptr) throw py::error_already_set();
  type.attr(definition.ml_name) = py::reinterpret_steal<py::object>(method);
}

/// A str's bytes, which live as long as it does. Throws py::error_already_set for anything else.
std::string_view text_of(py::handle text);

/// Runs `release` with the interpreter lock when the last copy goes; leaves the object alone where that is impossible.
template <class T, class Release>
std::shared_ptr<void> owner_of(T* resource, Release release) {
  return std::shared_ptr<void>(resource, [release, pid = process_id()](void* pointer) {
    if (is_finalizing() || process_id() != pid) return;
    py::gil_scoped_acquire locked;
    release(static_cast<T*>(pointer));
  });
}

/// Seconds from now, saturating. Throws Error(kInvalidArgument) for NaN or a value below zero.
Instant deadline_after(double seconds);

/// A shared reference to something with threads, which belongs to the process that made it. In a forked child the
/// threads do not exist and locks may be held for ever, so there the reference is abandoned instead of destroyed.
/// Destruction releases the interpreter lock, because it may join threads that want it.
template <class T>
class ProcessOwned final {
 public:
  explicit ProcessOwned(std::shared_ptr<T> object) : object_(std::move(object)), pid_(process_id()) {}
  ProcessOwned(const ProcessOwned&) = delete;
  ProcessOwned& operator=(const ProcessOwned&) = delete;
  ~ProcessOwned() {
    if (!object_) return;
    if (process_id() != pid_) {
      abandon();
      return;
    }
    reset();
  }

  /// Throws Error(kShutdown) after reset() and in a forked child, naming the process that owns it.
  std::shared_ptr<T> get() const {
    if (process_id() != pid_) {
      throw Error(Code::kShutdown, "this object belongs to process " + std::to_string(pid_) +
                                       " and cannot be used in its "
                                       "forked child " +
                                       std::to_string(process_id()) +
                                       "; start the child with spawn, and call herring.init() in it");
    }
    if (!object_) throw Error(Code::kShutdown, "this object was closed");
    return object_;
  }

  /// Drops the reference. Call with the interpreter lock held.
  void reset() {
    if (process_id() != pid_) return abandon();
    std::shared_ptr<T> last = std::move(object_);
    object_.reset();
    if (PyGILState_Check() != 0) {
      py::gil_scoped_release unlocked;
      last.reset();
    }
  }

 private:
  // Leaks one reference on purpose: see the class.
  void abandon() noexcept { static_cast<void>(new std::shared_ptr<T>(std::move(object_))); }

  std::shared_ptr<T> object_;
  std::int32_t pid_;
};

/// Longest time between two looks at Python's pending signals.
inline constexpr std::chrono::milliseconds kSignalPeriod{50};

/// Runs `function` (which must not touch Python) without the interpreter lock on a thread of its own, so that a signal
/// handler of Python runs meanwhile. Where the handler raises (Ctrl-C), `on_interrupt` may ask the function to end; the
/// exception goes to the caller at once and the thread is left to end at the deadline that every such function has.
/// Where no thread can be had it runs here, and signals wait: a job that is done shall end well on a host without
/// threads.
template <class Function, class OnInterrupt>
auto call_interruptibly(Function function, OnInterrupt on_interrupt) {
  using Result = std::invoke_result_t<Function&>;
  const auto task = std::make_shared<std::packaged_task<Result()>>(std::move(function));
  std::future<Result> future = task->get_future();
  std::thread thread;
  try {
    thread = start_thread("herring-call", [task] { (*task)(); });
  } catch (const Error&) {
    {
      py::gil_scoped_release unlocked;
      (*task)();
    }
    return future.get();
  }
  while (true) {
    std::future_status state;
    {
      py::gil_scoped_release unlocked;
      state = future.wait_for(kSignalPeriod);
    }
    if (state == std::future_status::ready) break;
    if (PyErr_CheckSignals() != 0) {
      on_interrupt();
      thread.detach();
      throw py::error_already_set();
    }
  }
  thread.join();
  return future.get();
}

template <class Function>
auto call_interruptibly(Function function) {
  return call_interruptibly(std::move(function), [] {});
}

}  // namespace herring::python
