#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// Which registered region covers a span of memory. Knows nothing of libfabric, so that it can be tested without an
/// RDMA device.
namespace herring::efa {

class MemoryTable final {
 public:
  struct Region {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;      ///< One past the last byte.
    void* descriptor = nullptr;  ///< What a post of memory in this region carries. Borrowed.
    std::uint64_t id = 0;        ///< Names the region to erase().
  };

  /// Returns the new region's id. Regions may overlap.
  std::uint64_t insert(std::span<const std::byte> memory, void* descriptor);
  void erase(std::uint64_t id);
  /// The region that covers all of `memory`, or null. Valid until the next insert() or erase().
  const Region* find(std::span<const std::byte> memory) const noexcept;
  std::size_t size() const noexcept { return regions_.size(); }

 private:
  std::vector<Region> regions_;  // By begin, then end.
  std::uintptr_t longest_ = 0;   // No region reaches further than this from its begin: bounds the search.
  std::uint64_t next_id_ = 1;
};

}  // namespace herring::efa
