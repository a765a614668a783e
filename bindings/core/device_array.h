#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bindings/core/python.h"
#include "core/device.h"
#include "core/types.h"
#include "runtime/device_copies.h"

namespace herring::python {

/// An array in a GPU's memory, as DLPack gives it, and copies of it to memory of the host and back.
class DeviceArray final {
 public:
  /// Its copies come after what its library has submitted by now. Throws Error that says what `role` is and why it
  /// cannot be used; py::error_already_set.
  DeviceArray(py::handle array, bool is_written, const std::string& role);
  ~DeviceArray();
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  const std::vector<std::int64_t>& shape() const { return shape_; }
  DataType dtype() const { return dtype_; }
  std::size_t bytes() const { return span_.bytes; }
  std::uint32_t device() const { return id_; }
  const std::shared_ptr<runtime::DeviceCopies>& copies() const { return copies_; }

  /// `host`: writable memory of so many bytes, with the buffer protocol. Kept until the copy ends.
  void start_to_host(const py::buffer& host);
  void start_to_device(const py::buffer& host);
  /// Whether the copies have ended; throws Error where one went wrong.
  bool has_ended();
  /// The same after so many seconds at most.
  bool wait(double seconds);

 private:
  std::shared_ptr<void> owner_with(const py::buffer& host, std::span<std::byte>& bytes, bool is_written) const;

  std::string role_;
  std::uint32_t id_ = 0;
  std::shared_ptr<runtime::DeviceCopies> copies_;
  std::unique_ptr<runtime::DeviceCopies::Queue> queue_;
  std::shared_ptr<void> owner_;
  std::vector<std::int64_t> shape_;
  DataType dtype_ = DataType::kFloat32;
  DeviceSpan span_;
};

/// One GPU's, of this process; made for the first array there. Throws Error.
std::shared_ptr<runtime::DeviceCopies> device_copies(std::uint32_t device);

}  // namespace herring::python
