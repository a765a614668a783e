#pragma once

#include <cstdint>
#include <span>

#include "core/operation.h"
#include "core/status.h"
#include "runtime/placement.h"
#include "runtime/runtime.h"

namespace herring::runtime {

/// An operation that may be small enough to be done at once, by the thread that calls it.
struct SmallOperation {
  OpKey key;
  OpDescriptor descriptor;
  const GroupRoute* route = nullptr;
  std::span<const std::byte> input;
  std::span<std::byte> output;
  Status status;  ///< Where it is over.
};
SmallOperation small_operation(const Request& request, std::uint64_t op, const GroupRoute& route);

enum class Shortcut : std::uint8_t {
  kNotTaken,   ///< Nothing has been done.
  kAnnounced,  ///< This rank's message to the others is out; the rest is to be submitted.
  kDone,
};

}  // namespace herring::runtime
