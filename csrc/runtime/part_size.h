#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace herring::runtime {

/// Parts of an operation begin at multiples of it.
inline constexpr std::uint64_t kPartAlignment = 64;

/// Largest part that may travel inside the messages between the ranks of a host.
inline std::uint32_t local_inline_bytes(std::size_t max_message_bytes) {
  constexpr std::size_t kMessageOverhead = 512;
  constexpr std::size_t kLargest = 64 << 10;
  return static_cast<std::uint32_t>(
      std::min(kLargest, max_message_bytes - std::min(max_message_bytes, kMessageOverhead)));
}

}  // namespace herring::runtime
