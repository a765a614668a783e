#include "bindings/core/started.h"

#include <structmember.h>

#include <array>
#include <chrono>
#include <utility>

namespace herring::python {
namespace {

/// A Work, and what Python's handle knows of it. As the interpreter has its own types: of a thousand small arrays the
/// objects that stand for them are a third of the time.
struct Started {
  PyObject_HEAD PyWork* work;
  PyObject* result;
  PyObject* name;
  PyObject* ranks;
  double timeout;
  double begun;  ///< Seconds, as time.monotonic() counts them.
};

PyTypeObject* started_type = nullptr;

Started* of(PyObject* self) { return reinterpret_cast<Started*>(self); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(of(self)->result);
  Py_VISIT(of(self)->name);
  Py_VISIT(of(self)->ranks);
  return 0;
}

/// The work keeps the arrays that it needs.
int clear(PyObject* self) {
  Py_CLEAR(of(self)->result);
  Py_CLEAR(of(self)->name);
  Py_CLEAR(of(self)->ranks);
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete std::exchange(of(self)->work, nullptr);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* refuse_new(PyTypeObject*, PyObject*, PyObject*) {
  PyErr_SetString(PyExc_TypeError, "handles are made by calls with async_op=True");
  return nullptr;
}

PyWork& work_of(PyObject* self) { return *of(self)->work; }

/// _finish(): whether it has ended; raises why it failed.
PyObject* started_finish(PyObject* self, PyObject*) noexcept {
  return guarded([&] { return py::bool_(finish(work_of(self))).release().ptr(); });
}

PyObject* started_is_done(PyObject* self, PyObject*) noexcept {
  return guarded([&] { return py::bool_(work_of(self).owned.get()->is_done()).release().ptr(); });
}

/// _wait(seconds, blocks): false at the deadline.
PyObject* started_wait(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return guarded([&] {
    if (count != 2) throw py::type_error("_wait() takes 2 arguments");
    const double seconds = py::cast<double>(py::handle(arguments[0]));
    return py::bool_(wait(work_of(self), seconds, arguments[1] == Py_True)).release().ptr();
  });
}

PyObject* contributors(PyObject* self, void*) noexcept {
  return guarded([&] { return py::cast(work_of(self).owned.get()->contributors()).release().ptr(); });
}

PyCFunction as_function(PyObject* (*method)(PyObject*, PyObject* const*, Py_ssize_t) noexcept) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

PyObject* make_type() {
  static std::array<PyMethodDef, 4> methods = {{
      {"_finish", &started_finish, METH_NOARGS, nullptr},
      {"_is_done", &started_is_done, METH_NOARGS, nullptr},
      {"_wait", as_function(&started_wait), METH_FASTCALL, nullptr},
      {},
  }};
  static std::array<PyMemberDef, 6> members = {{
      {"_result", T_OBJECT, offsetof(Started, result), READONLY, nullptr},
      {"_name", T_OBJECT, offsetof(Started, name), READONLY, nullptr},
      {"_ranks", T_OBJECT, offsetof(Started, ranks), READONLY, nullptr},
      {"_timeout", T_DOUBLE, offsetof(Started, timeout), READONLY, nullptr},
      {"_begun", T_DOUBLE, offsetof(Started, begun), READONLY, nullptr},
      {},
  }};
  static std::array<PyGetSetDef, 2> properties = {{{"_contributors", &contributors, nullptr, nullptr, nullptr}, {}}};
  std::array slots = {
      PyType_Slot{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
      PyType_Slot{Py_tp_clear, reinterpret_cast<void*>(&clear)},
      PyType_Slot{Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
      PyType_Slot{Py_tp_new, reinterpret_cast<void*>(&refuse_new)},
      PyType_Slot{Py_tp_methods, methods.data()},
      PyType_Slot{Py_tp_members, members.data()},
      PyType_Slot{Py_tp_getset, properties.data()},
      PyType_Slot{},
  };
  PyType_Spec spec{"herring._core.Started", sizeof(Started), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots.data()};
  return PyType_FromSpec(&spec);
}

}  // namespace

py::object make_started(py::handle type, std::unique_ptr<PyWork> work, py::handle result, py::handle name,
                        py::handle ranks, double timeout) {
  auto* const of_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (PyType_Check(type.ptr()) == 0 || PyType_IsSubtype(of_type, started_type) == 0) {
    throw py::type_error("the type of a handle is not derived from herring._core.Started");
  }
  auto made = py::reinterpret_steal<py::object>(of_type->tp_alloc(of_type, 0));
  if (!made) throw py::error_already_set();
  Started& started = *of(made.ptr());
  started.work = work.release();
  started.result = result.inc_ref().ptr();
  started.name = name.inc_ref().ptr();
  started.ranks = ranks.inc_ref().ptr();
  started.timeout = timeout;
  started.begun = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  return made;
}

void bind_started(py::module_& module) {
  const auto type = py::reinterpret_steal<py::object>(make_type());
  if (!type) throw py::error_already_set();
  started_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());  // As long as the process.
  module.attr("Started") = type;
}

}  // namespace herring::python
