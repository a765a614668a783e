#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "core/copy.h"

/// Messages that are handed over in three pieces, of which the second is the large one; any may be empty.
namespace herring::intra_node {

/// One after the other; `to` has room for all. `streams`: `second` past the caches (copy_bytes()).
inline void write_pieces(std::byte* to, std::span<const std::byte> first, std::span<const std::byte> second,
                         std::span<const std::byte> third, bool streams) {
  if (!first.empty()) std::memcpy(to, first.data(), first.size());
  copy_bytes(second, std::span(to + first.size(), second.size()), streams);
  if (!third.empty()) std::memcpy(to + first.size() + second.size(), third.data(), third.size());
}

inline std::vector<std::byte> join_pieces(std::span<const std::byte> first, std::span<const std::byte> second,
                                          std::span<const std::byte> third) {
  std::vector<std::byte> bytes;
  bytes.reserve(first.size() + second.size() + third.size());
  for (const auto piece : {first, second, third}) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

}  // namespace herring::intra_node
