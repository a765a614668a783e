#include "runtime/memory_in_use.h"

#include <algorithm>

namespace herring::runtime {
namespace {

std::uintptr_t begin_of(std::span<const std::byte> bytes) { return reinterpret_cast<std::uintptr_t>(bytes.data()); }
std::uintptr_t end_of(std::span<const std::byte> bytes) { return begin_of(bytes) + bytes.size(); }

}  // namespace

bool MemoryInUse::is_free(std::span<const std::byte> reads, std::span<const std::byte> writes) const {
  return pieces_.empty() || (!any(writes, false) && !any(reads, true));
}

void MemoryInUse::add(std::span<const std::byte> reads, std::span<const std::byte> writes) {
  add(reads, 1, 0);
  add(writes, 0, 1);
}

void MemoryInUse::remove(std::span<const std::byte> reads, std::span<const std::byte> writes) {
  remove(reads, 1, 0);
  remove(writes, 0, 1);
}

/// Of the first piece that ends above it.
std::size_t MemoryInUse::first_above(std::uintptr_t address) const {
  const auto found = std::partition_point(pieces_.begin(), pieces_.end(),
                                          [address](const Piece& piece) { return piece.end <= address; });
  return static_cast<std::size_t>(found - pieces_.begin());
}

bool MemoryInUse::any(std::span<const std::byte> bytes, bool writers_only) const {
  if (bytes.empty()) return false;
  for (std::size_t i = first_above(begin_of(bytes)); i < pieces_.size() && pieces_[i].begin < end_of(bytes); ++i) {
    if (!writers_only || pieces_[i].writers > 0) return true;
  }
  return false;
}

/// No piece lies on both sides of it afterwards.
void MemoryInUse::cut(std::uintptr_t address) {
  const std::size_t i = first_above(address);
  if (i == pieces_.size() || pieces_[i].begin >= address) return;
  Piece upper = pieces_[i];
  pieces_[i].end = upper.begin = address;
  pieces_.insert(pieces_.begin() + static_cast<std::ptrdiff_t>(i + 1), upper);
}

void MemoryInUse::add(std::span<const std::byte> bytes, std::uint32_t readers, std::uint32_t writers) {
  if (bytes.empty()) return;
  const std::uintptr_t end = end_of(bytes);
  cut(begin_of(bytes));
  cut(end);
  std::size_t i = first_above(begin_of(bytes));
  for (std::uintptr_t at = begin_of(bytes); at < end; ++i) {
    const std::uintptr_t next = i < pieces_.size() ? std::min(pieces_[i].begin, end) : end;
    if (next > at) {
      pieces_.insert(pieces_.begin() + static_cast<std::ptrdiff_t>(i), Piece{at, next, readers, writers});
    } else {
      pieces_[i].readers += readers;
      pieces_[i].writers += writers;
    }
    at = pieces_[i].end;
  }
}

void MemoryInUse::remove(std::span<const std::byte> bytes, std::uint32_t readers, std::uint32_t writers) {
  if (bytes.empty()) return;
  const std::size_t first = first_above(begin_of(bytes));
  std::size_t last = first;
  for (; last < pieces_.size() && pieces_[last].begin < end_of(bytes); ++last) {
    pieces_[last].readers -= readers;
    pieces_[last].writers -= writers;
  }
  const auto begin = pieces_.begin() + static_cast<std::ptrdiff_t>(first);
  const auto end = pieces_.begin() + static_cast<std::ptrdiff_t>(last);
  pieces_.erase(std::remove_if(begin, end, [](const Piece& piece) { return piece.readers == 0 && piece.writers == 0; }),
                end);
}

}  // namespace herring::runtime
