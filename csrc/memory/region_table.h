#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace herring::memory {

struct Region;

/// Which regions cover a span of memory, without looking at all of them. Regions may overlap.
class RegionTable final {
 public:
  void insert(Region& region);
  void erase(const Region& region) noexcept;
  /// Of the regions that cover all of `memory`: one that is not stale, or a stale one where there is no other, or null.
  Region* find(std::span<const std::byte> memory) const noexcept;
  /// Appends all that have some byte of `memory`.
  void overlapping(std::span<const std::byte> memory, std::vector<Region*>& found) const;
  std::size_t size() const noexcept { return regions_.size(); }

 private:
  std::vector<Region*> regions_;  // By begin.
  std::uintptr_t longest_ = 0;    // No region reaches further than this from its begin: bounds the search.
};

}  // namespace herring::memory
