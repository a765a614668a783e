#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/pending_operations.h"

namespace herring::runtime {

/// By so many parts another rank may be ahead of this one in an operation: the largest window.
inline constexpr std::uint32_t kMostAhead = 4;

/// One part of a pending operation, in flight. Private to pending_operations*.cc.
struct PendingOperations::Part {
  std::shared_ptr<PendingOperation> operation;
  OpKey key;
  OpDescriptor descriptor;
  std::span<std::byte> memory;   ///< The caller's bytes of this part.
  std::span<std::byte> results;  ///< Of an operation in a device, where they are not to lie in `memory`.
  bool local = false;            ///< The host's engine completes it.
  enum class Network : std::uint8_t { kNotBegun, kUnderWay, kOver };
  Network network = Network::kNotBegun;  ///< What the servers' engine has of it.
  bool aborted = false;
  bool is_join = false;  ///< No data: asks who is in.
  memory::Hold hold;     ///< Of staging memory; the operation holds its own.
  std::span<std::byte> held;
};

}  // namespace herring::runtime
