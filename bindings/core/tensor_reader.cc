#include "bindings/core/tensor_reader.h"

#include <algorithm>

namespace herring::python {

void bind_tensor_reader(py::module_& module);

namespace {

constexpr const char* kExchangeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";

const dlpack::ExchangeApi* api_of(py::handle type) {
  const py::object capsule = py::getattr(type, kExchangeAttribute, py::none());
  if (PyCapsule_IsValid(capsule.ptr(), kExchangeCapsule) == 0) return nullptr;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kExchangeCapsule));
  while (api != nullptr && api->version.major != 1) api = api->previous;
  return api != nullptr && api->describe != nullptr ? api : nullptr;
}

const PyTypeObject* reader_type = nullptr;

}  // namespace

TensorReader::TensorReader(const py::tuple& classes, const py::str& veto) : classes_(classes), veto_(veto) {
  if (classes.empty() || classes.size() > kMostClasses) throw py::type_error("a TensorReader is for 1 to 4 classes");
  for (std::size_t i = 0; i < classes.size(); ++i) {
    const py::object each = classes[i];
    const dlpack::ExchangeApi* const api = PyType_Check(each.ptr()) != 0 ? api_of(each) : nullptr;
    if (api == nullptr || (api_ != nullptr && api != api_)) {
      throw py::type_error(std::string(py::repr(each)) + " exports no functions for DLPack 1.3, or others");
    }
    api_ = api;
    types_[i] = reinterpret_cast<const PyTypeObject*>(each.ptr());
  }
}

bool TensorReader::read(PyObject* tensor, View& view) const {
  if (std::ranges::find(types_, Py_TYPE(tensor)) == types_.end()) return false;
  const auto vetoed = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, veto_.ptr()));
  if (!vetoed) throw py::error_already_set();
  if (vetoed.ptr() != Py_False) return false;
  dlpack::Tensor described{};
  if (api_->describe(tensor, &described) != 0) {  // Sparse ones, for example. Who reads it otherwise says why.
    PyErr_Clear();
    return false;
  }
  if (described.device.type != dlpack::kCpu || described.dims > static_cast<std::int32_t>(kMaxDims)) return false;
  if (!parse_dtype(described.dtype, view.dtype) || !is_contiguous(described)) return false;
  std::size_t bytes = element_bytes(view.dtype);
  for (std::int32_t i = 0; i < described.dims; ++i) {
    view.shape.append(static_cast<std::uint64_t>(described.shape[i]));
    bytes *= static_cast<std::size_t>(described.shape[i]);
  }
  auto* data = static_cast<std::byte*>(described.data);
  if (data == nullptr && bytes > 0) return false;
  view.bytes = {data == nullptr ? nullptr : data + described.byte_offset, bytes};
  return true;
}

const PyTypeObject* tensor_reader_type() noexcept { return reader_type; }

void bind_tensor_reader(py::module_& module) {
  py::class_<TensorReader> type(module, "TensorReader");
  type.def(py::init<const py::tuple&, const py::str&>(), py::arg("classes"), py::arg("veto"));
  reader_type = reinterpret_cast<const PyTypeObject*>(type.ptr());
}

}  // namespace herring::python
