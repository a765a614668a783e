#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "intra_node/engine.h"
#include "memory/domain.h"
#include "runtime/progress.h"
#include "worker/engine.h"

namespace herring::runtime {

/// Parts begin at multiples of it.
inline constexpr std::uint64_t kPartAlignment = 64;

/// By so many parts another rank may be ahead of this one in an operation: the largest window.
inline constexpr std::uint32_t kMostAhead = 4;

/// One part of a pending operation, in flight. Private to progress*.cc.
struct Progress::Part {
  std::shared_ptr<PendingOperation> operation;
  OpKey key;
  OpDescriptor descriptor;
  std::span<std::byte> memory;  ///< The caller's bytes of this part.
  bool local = false;           ///< The local engine completes it.
  enum class Network : std::uint8_t { kNotBegun, kUnderWay, kOver };
  Network network = Network::kNotBegun;  ///< What the network's engine has of it.
  bool aborted = false;
  bool is_join = false;  ///< No data: asks who is in.
  memory::Hold hold;     ///< Of staging memory; the operation holds its own.
  std::span<std::byte> held;
};

/// Largest part that may travel inside the messages between the ranks of a host.
inline std::uint32_t local_inline_bytes(std::size_t max_message_bytes) {
  constexpr std::size_t kMessageOverhead = 512;
  constexpr std::size_t kLargest = 64 << 10;
  return static_cast<std::uint32_t>(
      std::min(kLargest, max_message_bytes - std::min(max_message_bytes, kMessageOverhead)));
}

}  // namespace herring::runtime
