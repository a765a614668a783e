#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "bindings/core/dlpack.h"
#include "bindings/core/python.h"
#include "core/operation.h"
#include "core/types.h"

namespace herring::python {

enum class Access { kRead, kWrite };

/// Sizes of an array. More dimensions than the wire carries are folded into the last one.
struct Shape {
  std::array<std::uint64_t, kMaxDims> sizes{};
  std::uint8_t dims = 0;

  void append(std::uint64_t size) {
    if (dims < kMaxDims) {
      sizes[dims++] = size;
    } else {
      sizes[kMaxDims - 1] *= size;
    }
  }
};

/// Contiguous CPU memory of a Python object.
struct View {
  std::span<std::byte> bytes;
  DataType dtype = DataType::kFloat32;
  Shape shape;
};

/// Throws Error(kInvalidArgument) of what `role` ("the input") is.
[[noreturn]] inline void refuse(const std::string& role, const std::string& why) {
  throw Error(Code::kInvalidArgument, role + " " + why);
}

inline constexpr const char* kDtypes = "float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8, bool";

/// Where it says that it is. Throws Error(kInvalidArgument) that says what `role` is where it raises.
dlpack::Device place_of(py::handle object, const std::string& role);
/// False for a type that Herring does not reduce.
bool parse_dtype(dlpack::DataType from, DataType& dtype);
/// Row-major, without gaps.
bool is_contiguous(const dlpack::Tensor& tensor);

/// A tensor that its library exported by DLPack, contiguous and of a type that Herring reduces.
struct TakenTensor {
  std::shared_ptr<void> owner;  ///< Of what `tensor` is in: its last copy may go on any thread.
  const dlpack::Tensor* tensor = nullptr;
  DataType dtype = DataType::kFloat32;
};
/// `stream`: of a GPU, which the library makes wait for what it has submitted. Throws Error(kInvalidArgument) that says
/// what `role` is and why it cannot be used.
TakenTensor take_tensor(py::handle object, Access access, const std::string& role,
                        std::optional<std::uint64_t> stream = {});

/// Memory that is kept alive (and, for the buffer protocol, exported) until the last copy of `owner` goes, which may
/// happen on any thread.
struct Buffer : View {
  std::shared_ptr<void> owner;

  /// Takes an object with the buffer protocol (numpy arrays, bytearray, ...) or with __dlpack__ (torch, jax, ...
  /// tensors) without a copy. Throws Error(kInvalidArgument) that says what `role` ("the input") is and why it cannot
  /// be used: not on the CPU, not contiguous, read-only where it is written, a dtype Herring does not reduce, or no
  /// array at all.
  void take(py::handle object, Access access, const std::string& role);
};

/// Memory that is kept while this lives, for a call that ends before its work does. Moved and dropped with the
/// interpreter's lock.
class Holding final {
 public:
  Holding() = default;
  explicit Holding(std::shared_ptr<void> owner) : owner_(std::move(owner)) {}
  /// Once; as Buffer's.
  View take(py::handle object, Access access, const std::string& role);
  explicit operator bool() const { return array_ || owner_; }
  /// The same for a thread without the lock.
  std::shared_ptr<void> share() &&;

 private:
  // One of them keeps the memory.
  py::object array_;
  std::shared_ptr<void> owner_;
};

/// Memory that is kept as long as this lives, which is one call from Python: nothing is allocated for it.
class Loan final : public View {
 public:
  Loan() = default;
  ~Loan() { PyBuffer_Release(&exported_); }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  /// Once; as Buffer's.
  void take(py::handle object, Access access, const std::string& role);
  /// For a call that ends before its work does: keeps the memory as a Buffer's owner.
  std::shared_ptr<void> prolong() const;

 private:
  // One of them keeps the memory.
  py::object array_;
  Py_buffer exported_{};
  std::shared_ptr<void> owner_;  ///< Where the object has no buffer protocol.
};

}  // namespace herring::python
