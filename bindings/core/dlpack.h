#pragma once

#include <cstdint>

/// The part of DLPack's C ABI that Herring reads (https://dmlc.github.io/dlpack, versions 0.x and 1.x). Layouts are
/// fixed by that specification.
namespace herring::python::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t dims;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  ///< In elements; null: contiguous, row-major.
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

inline constexpr std::uint64_t kReadOnly = 1;
inline constexpr std::uint64_t kIsCopied = 2;

struct ManagedTensorVersioned {
  Version version;
  void* manager_context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

/// What a class of tensors has as __dlpack_c_exchange_api__, from version 1.3 on: C functions instead of capsules. The
/// ones that Herring does not call are pointers without a type.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;  ///< Of another major version.
  void* allocate;
  void* export_managed;
  void* import_managed;
  int (*describe)(void* object, Tensor* out);  ///< Borrowed from the object. Not 0: a Python exception is set.
  void* current_stream;
};

static_assert(sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64 && sizeof(ManagedTensorVersioned) == 80 &&
              sizeof(ExchangeApi) == 56);

}  // namespace herring::python::dlpack
