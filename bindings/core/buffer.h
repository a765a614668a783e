#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bindings/core/python.h"
#include "core/types.h"

namespace herring::python {

enum class Access { kRead, kWrite };

/// Contiguous CPU memory of a Python object, kept alive (and, for the buffer protocol, exported) until the last copy of
/// `owner` goes, which may happen on any thread.
struct Buffer {
  std::span<std::byte> bytes;
  DataType dtype = DataType::kFloat32;
  std::vector<std::uint64_t> shape;
  std::shared_ptr<void> owner;
};

/// Takes an object with the buffer protocol (numpy arrays, bytearray, ...) or with __dlpack__ (torch, jax, ... tensors)
/// without a copy. Throws Error(kInvalidArgument) that says what `role` ("the input") is and why it cannot be used: not
/// on the CPU, not contiguous, read-only where it is written, a dtype Herring does not reduce, or no array at all.
Buffer take_buffer(const py::object& object, Access access, const std::string& role);

}  // namespace herring::python
