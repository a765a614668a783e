#include "bindings/core/device_array.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "bindings/core/buffer.h"
#include "cuda/open.h"

namespace herring::python {
namespace {

using runtime::DeviceCopies;

/// Which GPU's memory it is. Throws Error(kInvalidArgument) for all other memory.
std::uint32_t device_of(py::handle array, const std::string& role) {
  const dlpack::Device place = place_of(array, role);
  if (place.type != dlpack::kCuda && place.type != dlpack::kCudaManaged) {
    refuse(role, "is not on a CUDA device, but others of the call are; pass all on one");
  }
  if (place.id < 0) refuse(role, "says that it is on CUDA device " + std::to_string(place.id));
  return static_cast<std::uint32_t>(place.id);
}

/// A library may have made a copy elsewhere.
void check_place(const dlpack::Device& place, std::uint32_t device, const std::string& role) {
  if ((place.type == dlpack::kCuda || place.type == dlpack::kCudaManaged) &&
      static_cast<std::uint32_t>(place.id) == device) {
    return;
  }
  refuse(role, "says that it is on CUDA device " + std::to_string(device) + ", but was exported from device " +
                   std::to_string(place.id) + " of DLPack type " + std::to_string(place.type));
}

}  // namespace

std::shared_ptr<DeviceCopies> device_copies(std::uint32_t device) {
  return DeviceCopies::of("cuda", DeviceId{device}, &cuda::open_device);
}

DeviceArray::DeviceArray(py::handle array, bool is_written, const std::string& role) : role_(role) {
  id_ = device_of(array, role);
  try {
    const py::gil_scoped_release unlocked;
    copies_ = device_copies(id_);
    queue_ = std::make_unique<DeviceCopies::Queue>(copies_);
  } catch (const Error& error) {
    throw Error(error.status().code(),
                role + " is on a CUDA device, which Herring cannot use: " + error.status().message());
  }
  const TakenTensor taken = take_tensor(array, is_written ? Access::kWrite : Access::kRead, role, queue_->stream());
  check_place(taken.tensor->device, id_, role);
  bool is_capturing = false;
  queue_->is_capturing(is_capturing).or_throw();
  if (is_capturing) {
    throw Error(Code::kInvalidArgument,
                role + ": the current stream is being captured into a CUDA graph, where Herring cannot work");
  }
  owner_ = taken.owner;
  dtype_ = taken.dtype;
  std::size_t elements = 1;
  for (int i = 0; i < taken.tensor->dims; ++i) {
    shape_.push_back(taken.tensor->shape[i]);
    elements *= static_cast<std::size_t>(taken.tensor->shape[i]);
  }
  span_ = {reinterpret_cast<std::uint64_t>(taken.tensor->data) + taken.tensor->byte_offset,
           elements * element_bytes(dtype_)};
}

DeviceArray::~DeviceArray() {
  // Another thread may be in a call of the driver that takes long.
  if (is_finalizing() || PyGILState_Check() == 0) return;
  const py::gil_scoped_release unlocked;
  queue_.reset();
}

std::shared_ptr<void> DeviceArray::owner_with(const py::buffer& host, std::span<std::byte>& bytes,
                                              bool is_written) const {
  Buffer memory;
  memory.take(host, is_written ? Access::kWrite : Access::kRead, "host memory");
  if (memory.bytes.size() != span_.bytes) {
    throw Error(Code::kInternal, "host memory of " + std::to_string(memory.bytes.size()) + " bytes for an array of " +
                                     std::to_string(span_.bytes));
  }
  bytes = memory.bytes;
  return std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(memory.owner, owner_);
}

void DeviceArray::start_to_host(const py::buffer& host) {
  std::span<std::byte> bytes;
  std::shared_ptr<void> owner = owner_with(host, bytes, true);
  const py::gil_scoped_release unlocked;
  queue_->to_host(bytes, span_, std::move(owner)).or_throw();
}

void DeviceArray::start_to_device(const py::buffer& host) {
  std::span<std::byte> bytes;
  std::shared_ptr<void> owner = owner_with(host, bytes, false);
  const py::gil_scoped_release unlocked;
  queue_->to_device(span_, bytes, std::move(owner)).or_throw();
}

bool DeviceArray::has_ended() {
  const py::gil_scoped_release unlocked;
  Status status;
  if (!queue_->has_ended(status)) return false;
  status.or_throw();
  return true;
}

bool DeviceArray::wait(double seconds) {
  const Instant deadline = deadline_after(seconds);
  while (true) {
    {
      const py::gil_scoped_release unlocked;
      Status status;
      const Instant now = std::chrono::steady_clock::now();
      if (queue_->wait(std::min(deadline, now + kSignalPeriod), status)) {
        status.or_throw();
        return true;
      }
      if (now >= deadline) return false;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

namespace {

py::tuple shape_of(const DeviceArray& array) {
  py::tuple result(array.shape().size());
  for (std::size_t i = 0; i < array.shape().size(); ++i) result[i] = array.shape()[i];
  return result;
}

}  // namespace

void bind_device_arrays(py::module_& module) {
  py::class_<DeviceArray>(module, "DeviceArray")
      .def(py::init<py::handle, bool, const std::string&>(), py::arg("array"), py::arg("is_written"), py::arg("role"))
      .def_property_readonly("shape", &shape_of)
      .def_property_readonly("dtype", [](const DeviceArray& self) { return std::string(name(self.dtype())); })
      .def_property_readonly("nbytes", &DeviceArray::bytes)
      .def_property_readonly("device", &DeviceArray::device)
      .def("start_to_host", &DeviceArray::start_to_host, py::arg("host"))
      .def("start_to_device", &DeviceArray::start_to_device, py::arg("host"))
      .def("has_ended", &DeviceArray::has_ended)
      .def("wait", &DeviceArray::wait, py::arg("seconds"));
}

}  // namespace herring::python
