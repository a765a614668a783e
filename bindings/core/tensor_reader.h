#pragma once

#include <array>

#include "bindings/core/buffer.h"
#include "bindings/core/dlpack.h"
#include "bindings/core/python.h"

namespace herring::python {

/// Reads the memory of one framework's tensors by the C functions that its class exports, in a fraction of the time of
/// calls from Python. Only of exactly the classes it was made for: one derived from them may have no memory of its own.
class TensorReader final {
 public:
  /// `classes` share one set of functions. Throws py::type_error where they export none, or too few, or too many.
  /// `veto`: a method without arguments; a tensor for which it is true is not what its memory says.
  TensorReader(const py::tuple& classes, const py::str& veto);

  /// False where the tensor has to be read otherwise, or cannot be used: no contiguous CPU memory of a type that
  /// Herring reduces, or too many dimensions for a message. `view` is borrowed from it.
  bool read(PyObject* tensor, View& view) const;

 private:
  static constexpr std::size_t kMostClasses = 4;

  py::tuple classes_;
  std::array<const PyTypeObject*, kMostClasses> types_{};  // as in classes_
  py::str veto_;
  const dlpack::ExchangeApi* api_ = nullptr;  // lives as long as the framework does, which is for ever
};

/// The type that it has in Python.
const PyTypeObject* tensor_reader_type() noexcept;

}  // namespace herring::python
