#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace herring::runtime {

/// Bytes that pending calls read and write. Many may read the same bytes; who writes some is apart from all others.
/// Only addresses are kept. Empty spans and null ones count for nothing.
class MemoryInUse final {
 public:
  /// Whether a call with these has to wait for none that is in.
  bool is_free(std::span<const std::byte> reads, std::span<const std::byte> writes) const;
  /// Also where it is not free: everybody is counted.
  void add(std::span<const std::byte> reads, std::span<const std::byte> writes);
  /// Exactly what was added.
  void remove(std::span<const std::byte> reads, std::span<const std::byte> writes);
  bool is_empty() const { return pieces_.empty(); }
  void clear() { pieces_.clear(); }

 private:
  struct Piece {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    std::uint32_t readers = 0;
    std::uint32_t writers = 0;
  };

  bool any(std::span<const std::byte> bytes, bool writers_only) const;
  void add(std::span<const std::byte> bytes, std::uint32_t readers, std::uint32_t writers);
  void remove(std::span<const std::byte> bytes, std::uint32_t readers, std::uint32_t writers);
  std::size_t first_above(std::uintptr_t address) const;
  void cut(std::uintptr_t address);

  std::vector<Piece> pieces_;  // By address, apart from each other, each used by somebody.
};

/// Whether the two have a byte in common.
inline bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  const auto first = reinterpret_cast<std::uintptr_t>(a.data());
  const auto other = reinterpret_cast<std::uintptr_t>(b.data());
  return !a.empty() && !b.empty() && first < other + b.size() && other < first + a.size();
}

}  // namespace herring::runtime
