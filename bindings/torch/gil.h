#pragma once

#include <Python.h>

namespace herring::torch_binding {

/// Lets go of the GIL, where this thread holds it, for as long as this lives: for destructors, which Python may run
/// with the GIL held and which wait for threads that may need it.
class GilRelease final {
 public:
  GilRelease() : state_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~GilRelease() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace herring::torch_binding
