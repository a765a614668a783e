#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/core/python.h"
#include "collectives/operations.h"
#include "runtime/device_copies.h"
#include "runtime/runtime.h"

namespace herring::python {

struct PyRuntime {
  PyRuntime(std::shared_ptr<runtime::Communicator> runtime, const Config& config)
      : owned(runtime),
        operations(std::make_shared<collectives::Operations>(std::move(runtime), config)),
        pinned(std::make_shared<runtime::PinnedMemory>(operations.get()->runtime())),
        timeout_s(config.timeout_s) {}
  ProcessOwned<runtime::Communicator> owned;
  ProcessOwned<collectives::Operations>
      operations;                              ///< The same, for a program's own calls: small ones may travel together.
  ProcessOwned<runtime::PinnedMemory> pinned;  ///< Of it, for arrays of GPUs.
  double timeout_s;                            ///< Of operations that say none.
};

/// Memory of the runtime's arena, or of the heap, as Python sees it (buffer protocol, uint8, writable).
struct PyMemory {
  PyMemory(std::shared_ptr<std::byte> memory, std::size_t size) : owned(memory), data(memory.get()), bytes(size) {}
  ProcessOwned<std::byte> owned;
  std::byte* data;
  std::size_t bytes;
};

/// For Python: the memory, and where each tensor begins.
using PyRow = std::pair<std::unique_ptr<PyMemory>, std::vector<std::uint64_t>>;
/// `place` gets the names with their bytes.
template <class Place>
PyRow place(const std::vector<std::string>& names, const std::vector<std::uint64_t>& sizes, const Place& place_all) {
  if (names.size() != sizes.size()) throw py::value_error("as many sizes as names");
  std::vector<collectives::NamedBytes> tensors;
  for (std::size_t i = 0; i < names.size(); ++i) tensors.push_back({names[i], sizes[i]});
  const collectives::TensorRow row = place_all(tensors);
  return {std::make_unique<PyMemory>(row.memory, row.bytes), row.offsets};
}

py::dict to_dict(const runtime::ServerCounters& counters);

}  // namespace herring::python
