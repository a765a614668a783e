#include "bindings/core/buffer.h"

#include <pybind11/numpy.h>

#include <string_view>

#include "bindings/core/dlpack.h"

namespace herring::python {
namespace {

/// numpy's masked array, or of a class derived from it, as numpy.ma.masked is.
bool is_masked(py::handle object) {
  // Masked arrays are classes written in Python; an ordinary array, asked about in each call, is not.
  if ((Py_TYPE(object.ptr())->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) return false;
  for (const PyTypeObject* type = Py_TYPE(object.ptr()); type != nullptr; type = type->tp_base) {
    if (std::string_view(type->tp_name) == "MaskedArray") return true;
  }
  return false;
}

/// The type that a buffer's format and item size describe; format characters are those of Python's struct module.
bool parse_format(std::string_view format, py::ssize_t item_bytes, DataType& dtype) {
  if (!format.empty() && (format.front() == '@' || format.front() == '=' || format.front() == '<'))
    format.remove_prefix(1);
  if (format.size() != 1) return false;
  const char kind = format.front();
  const bool is_signed = std::string_view("bhilqn").find(kind) != std::string_view::npos;
  if (kind == 'e')
    dtype = DataType::kFloat16;
  else if (kind == 'f')
    dtype = DataType::kFloat32;
  else if (kind == 'd')
    dtype = DataType::kFloat64;
  else if (kind == '?')
    dtype = DataType::kBool;
  else if (kind == 'B')
    dtype = DataType::kUInt8;
  else if (is_signed && item_bytes == 1)
    dtype = DataType::kInt8;
  else if (is_signed && item_bytes == 2)
    dtype = DataType::kInt16;
  else if (is_signed && item_bytes == 4)
    dtype = DataType::kInt32;
  else if (is_signed && item_bytes == 8)
    dtype = DataType::kInt64;
  else
    return false;
  return element_bytes(dtype) == static_cast<std::size_t>(item_bytes);
}

/// An object's dtype as its own library writes it; the format where it has none.
std::string dtype_of(py::handle object, const char* format) {
  if (py::hasattr(object, "dtype")) return py::str(object.attr("dtype"));
  return std::string("buffer format '") + (format == nullptr ? "B" : format) + "'";
}

/// Throws where the object does not export what is asked for; the caller releases it.
void export_to(Py_buffer& exported, py::handle object, const std::string& role) {
  if (PyObject_GetBuffer(object.ptr(), &exported, PyBUF_STRIDES | PyBUF_FORMAT) == 0) return;
  py::error_already_set raised;
  const std::string kind = py::hasattr(object, "dtype") ? " (dtype " + dtype_of(object, nullptr) + ")" : "";
  refuse(role, "cannot be read as memory" + kind + ": " + raised.what() + "; dtypes that work: " + kDtypes);
}

bool parse_numpy_type(int number, DataType& dtype) {
  using Numpy = py::detail::npy_api;
  if (number == Numpy::NPY_FLOAT_)
    dtype = DataType::kFloat32;
  else if (number == Numpy::NPY_DOUBLE_)
    dtype = DataType::kFloat64;
  else if (number == Numpy::NPY_INT32_)
    dtype = DataType::kInt32;
  else if (number == Numpy::NPY_INT64_)
    dtype = DataType::kInt64;
  else if (number == Numpy::NPY_UINT8_)
    dtype = DataType::kUInt8;
  else
    return false;
  return true;
}

/// A plain array of a common dtype, past the buffer protocol: numpy writes down the format as text for every export.
/// False for all others, whatever is wrong with them; nothing is said about this one then.
bool view_plain_array(py::handle object, Access access, View& view) {
  using Numpy = py::detail::npy_api;
  if (Py_TYPE(object.ptr()) != Numpy::get().PyArray_Type_) return false;
  const auto& array = *py::detail::array_proxy(object.ptr());
  const auto& dtype = *py::detail::array_descriptor_proxy(array.descr);
  const int needed = Numpy::NPY_ARRAY_C_CONTIGUOUS_ | Numpy::NPY_ARRAY_ALIGNED_ |
                     (access == Access::kWrite ? Numpy::NPY_ARRAY_WRITEABLE_ : 0);
  const bool is_native = dtype.byteorder == '=' || dtype.byteorder == '|';
  if ((array.flags & needed) != needed || !is_native || !parse_numpy_type(dtype.type_num, view.dtype)) return false;
  std::size_t bytes = element_bytes(view.dtype);
  for (const auto size : std::span(array.dimensions, static_cast<std::size_t>(array.nd))) {
    view.shape.append(static_cast<std::uint64_t>(size));
    bytes *= static_cast<std::size_t>(size);
  }
  view.bytes = {reinterpret_cast<std::byte*>(array.data), bytes};
  return true;
}

View view_of(const Py_buffer& exported, py::handle object, Access access, const std::string& role) {
  View view;
  if (is_masked(object)) {
    refuse(role, "is a masked array, but its masked values would be used too; pass array.filled(0) or array.data");
  }
  if (!parse_format(exported.format == nullptr ? "B" : exported.format, exported.itemsize, view.dtype)) {
    refuse(role, "has dtype " + dtype_of(object, exported.format) +
                     ", which Herring does not take; dtypes that work: " + kDtypes);
  }
  if (access == Access::kWrite && exported.readonly != 0)
    refuse(role, "is read-only, but the result is written into it");
  if (PyBuffer_IsContiguous(&exported, 'C') == 0) {
    refuse(role, "is not contiguous (row-major); copy it first: numpy.ascontiguousarray(array)");
  }
  for (int i = 0; i < exported.ndim; ++i) view.shape.append(static_cast<std::uint64_t>(exported.shape[i]));
  view.bytes = {static_cast<std::byte*>(exported.buf), static_cast<std::size_t>(exported.len)};
  return view;
}

Buffer take_exported(py::handle object, Access access, const std::string& role) {
  auto exported = std::make_unique<Py_buffer>();
  export_to(*exported, object, role);
  const std::shared_ptr<void> owner = owner_of(exported.release(), [](Py_buffer* last) {
    PyBuffer_Release(last);
    delete last;
  });
  return {view_of(*static_cast<const Py_buffer*>(owner.get()), object, access, role), owner};
}

[[noreturn]] void refuse_cuda(const std::string& role) {
  refuse(role,
         "is on a CUDA device. Herring takes it there if its library exports it by DLPack (CuPy, torch and JAX do) and "
         "all "
         "arrays of the call are on GPUs; else copy it to the CPU first");
}

void check_device(py::handle object, const std::string& role) {
  if (!py::hasattr(object, "__dlpack_device__")) return;
  const std::int32_t type = place_of(object, role).type;
  if (type == dlpack::kCpu || type == dlpack::kCudaHost) return;
  if (type == dlpack::kCuda || type == dlpack::kCudaManaged) refuse_cuda(role);
  refuse(role, "is on a device of DLPack type " + std::to_string(type) +
                   "; herring's functions take CPU memory: copy it to the CPU first");
}

Buffer take_dlpack(py::handle object, Access access, const std::string& role) {
  check_device(object, role);
  const TakenTensor taken = take_tensor(object, access, role);
  if (taken.tensor->device.type != dlpack::kCpu && taken.tensor->device.type != dlpack::kCudaHost)
    refuse(role, "is not in CPU memory");
  Buffer buffer;
  buffer.owner = taken.owner;
  buffer.dtype = taken.dtype;
  std::uint64_t elements = 1;
  for (int i = 0; i < taken.tensor->dims; ++i) {
    buffer.shape.append(static_cast<std::uint64_t>(taken.tensor->shape[i]));
    elements *= static_cast<std::uint64_t>(taken.tensor->shape[i]);
  }
  auto* data = static_cast<std::byte*>(taken.tensor->data);
  if (data != nullptr) data += taken.tensor->byte_offset;
  buffer.bytes = {data, elements * element_bytes(buffer.dtype)};
  return buffer;
}

bool is_exporter(py::handle object) { return PyObject_CheckBuffer(object.ptr()) != 0; }

Buffer take_foreign(py::handle object, Access access, const std::string& role) {
  if (py::hasattr(object, "__dlpack__")) return take_dlpack(object, access, role);
  if (py::hasattr(object, "__cuda_array_interface__")) refuse_cuda(role);
  refuse(role, "is a " + std::string(Py_TYPE(object.ptr())->tp_name) +
                   "; it must be a numpy array, or have the buffer protocol or __dlpack__");
}

}  // namespace

void Buffer::take(py::handle object, Access access, const std::string& role) {
  *this = is_exporter(object) ? take_exported(object, access, role) : take_foreign(object, access, role);
}

View Holding::take(py::handle object, Access access, const std::string& role) {
  View view;
  if (view_plain_array(object, access, view)) {
    array_ = py::reinterpret_borrow<py::object>(object);
    return view;
  }
  Buffer buffer;
  buffer.take(object, access, role);
  owner_ = std::move(buffer.owner);
  return buffer;
}

std::shared_ptr<void> Holding::share() && {
  if (!array_) return std::move(owner_);
  return owner_of(array_.release().ptr(), [](PyObject* last) { Py_DECREF(last); });
}

void Loan::take(py::handle object, Access access, const std::string& role) {
  if (view_plain_array(object, access, *this)) {
    array_ = py::reinterpret_borrow<py::object>(object);
  } else if (is_exporter(object)) {
    export_to(exported_, object, role);
    static_cast<View&>(*this) = view_of(exported_, object, access, role);
  } else {
    Buffer buffer = take_foreign(object, access, role);
    static_cast<View&>(*this) = buffer;
    owner_ = std::move(buffer.owner);
  }
}

std::shared_ptr<void> Loan::prolong() const {
  PyObject* const object = array_ ? array_.ptr() : exported_.obj;
  if (object == nullptr) return owner_;
  try {
    return take_exported(object, Access::kRead, "the array").owner;
  } catch (const std::exception&) {
    Py_INCREF(object);  // No memory for it: better never freed than freed under the runtime.
    return nullptr;
  }
}

}  // namespace herring::python
