#include "bindings/core/dlpack.h"

#include <string>

#include "bindings/core/buffer.h"

namespace herring::python {
namespace {

std::string describe(dlpack::DataType dtype) {
  const char* kind = dtype.code == dlpack::kInt       ? "int"
                     : dtype.code == dlpack::kUInt    ? "uint"
                     : dtype.code == dlpack::kFloat   ? "float"
                     : dtype.code == dlpack::kBfloat  ? "bfloat"
                     : dtype.code == dlpack::kComplex ? "complex"
                     : dtype.code == dlpack::kBool    ? "bool"
                                                      : "dtype code ";
  const bool is_named = dtype.code <= dlpack::kBool && dtype.code != 3;
  const std::string lanes = dtype.lanes == 1 ? "" : "x" + std::to_string(dtype.lanes);
  return kind + std::to_string(is_named ? dtype.bits : dtype.code) + lanes;
}

/// For what its library has raised, but for Ctrl-C. In a handler of that.
[[noreturn]] void refuse_raised(const std::string& role, const std::string& what, const py::error_already_set& raised) {
  if (!raised.matches(PyExc_Exception)) throw;
  refuse(role, what + ": " + py::str(raised.type().attr("__name__")).cast<std::string>() + ": " +
                   py::str(raised.value()).cast<std::string>());
}

py::object call_dlpack(py::handle object, const std::string& role, std::optional<std::uint64_t> stream) {
  py::dict arguments;
  if (stream) arguments["stream"] = *stream;
  try {
    try {
      return object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0), **arguments);
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
    }
    return object.attr("__dlpack__")(**arguments);
  } catch (const py::error_already_set& error) {
    refuse_raised(role, "was not exported by its library", error);
  }
}

/// Takes the tensor out of a capsule, as the protocol asks: the name says who must call the deleter.
template <class Managed>
std::shared_ptr<void> consume(const py::object& capsule, const char* name, const char* used_name) {
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (managed == nullptr || PyCapsule_SetName(capsule.ptr(), used_name) != 0) throw py::error_already_set();
  return owner_of(managed, [](Managed* taken) {
    if (taken->deleter != nullptr) taken->deleter(taken);
  });
}

}  // namespace

dlpack::Device place_of(py::handle object, const std::string& role) {
  constexpr const char* kWhat = "does not say where it is";
  try {
    const auto place = object.attr("__dlpack_device__")().cast<py::tuple>();
    return {py::int_(place[0]).cast<std::int32_t>(), py::int_(place[1]).cast<std::int32_t>()};
  } catch (const py::error_already_set& error) {
    refuse_raised(role, kWhat, error);
  } catch (const py::cast_error&) {
    refuse(role, std::string(kWhat) + ": __dlpack_device__() gives no pair of whole numbers");
  }
}

bool parse_dtype(dlpack::DataType from, DataType& dtype) {
  if (from.lanes != 1) return false;
  switch (from.code << 8 | from.bits) {
    case dlpack::kFloat << 8 | 16:
      dtype = DataType::kFloat16;
      return true;
    case dlpack::kFloat << 8 | 32:
      dtype = DataType::kFloat32;
      return true;
    case dlpack::kFloat << 8 | 64:
      dtype = DataType::kFloat64;
      return true;
    case dlpack::kBfloat << 8 | 16:
      dtype = DataType::kBFloat16;
      return true;
    case dlpack::kInt << 8 | 8:
      dtype = DataType::kInt8;
      return true;
    case dlpack::kInt << 8 | 16:
      dtype = DataType::kInt16;
      return true;
    case dlpack::kInt << 8 | 32:
      dtype = DataType::kInt32;
      return true;
    case dlpack::kInt << 8 | 64:
      dtype = DataType::kInt64;
      return true;
    case dlpack::kUInt << 8 | 8:
      dtype = DataType::kUInt8;
      return true;
    case dlpack::kBool << 8 | 8:
      dtype = DataType::kBool;
      return true;
    default:
      return false;
  }
}

bool is_contiguous(const dlpack::Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  for (int i = tensor.dims - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

TakenTensor take_tensor(py::handle object, Access access, const std::string& role,
                        std::optional<std::uint64_t> stream) {
  const py::object capsule = call_dlpack(object, role, stream);
  TakenTensor taken;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    taken.owner = consume<dlpack::ManagedTensorVersioned>(capsule, "dltensor_versioned", "used_dltensor_versioned");
    const auto* managed = static_cast<const dlpack::ManagedTensorVersioned*>(taken.owner.get());
    if (managed->version.major != 1)
      refuse(role, "uses DLPack version " + std::to_string(managed->version.major) + "; Herring takes version 1.x");
    if (access == Access::kWrite && (managed->flags & (dlpack::kReadOnly | dlpack::kIsCopied)) != 0) {
      refuse(role, "is read-only (or its library exported a copy), but the result is written into it");
    }
    taken.tensor = &managed->tensor;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
    taken.owner = consume<dlpack::ManagedTensor>(capsule, "dltensor", "used_dltensor");
    taken.tensor = &static_cast<const dlpack::ManagedTensor*>(taken.owner.get())->tensor;
  } else {
    refuse(role, "of type " + std::string(Py_TYPE(object.ptr())->tp_name) + " did not return a DLPack capsule");
  }
  if (!parse_dtype(taken.tensor->dtype, taken.dtype)) {
    refuse(role, "has dtype " + describe(taken.tensor->dtype) +
                     ", which Herring does not take; dtypes that work: " + kDtypes);
  }
  if (!is_contiguous(*taken.tensor))
    refuse(role, "is not contiguous (row-major); copy it first, for example with .contiguous()");
  return taken;
}

}  // namespace herring::python
