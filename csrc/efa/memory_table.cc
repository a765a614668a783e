#include "efa/memory_table.h"

#include <algorithm>
#include <tuple>

namespace herring::efa {

std::uint64_t MemoryTable::insert(std::span<const std::byte> memory, void* descriptor) {
  Region region;
  region.begin = reinterpret_cast<std::uintptr_t>(memory.data());
  region.end = region.begin + memory.size();
  region.descriptor = descriptor;
  region.id = next_id_++;
  const auto place = std::upper_bound(regions_.begin(), regions_.end(), region, [](const Region& a, const Region& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  longest_ = std::max(longest_, region.end - region.begin);
  regions_.insert(place, region);
  return region.id;
}

void MemoryTable::erase(std::uint64_t id) {
  std::erase_if(regions_, [id](const Region& region) { return region.id == id; });
}

const MemoryTable::Region* MemoryTable::find(std::span<const std::byte> memory) const noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const auto end = begin + memory.size();
  auto place = std::upper_bound(regions_.begin(), regions_.end(), begin,
                                [](std::uintptr_t value, const Region& region) { return value < region.begin; });
  // Regions may overlap, so the nearest one before may be too short where an earlier one is long enough.
  while (place != regions_.begin()) {
    --place;
    if (begin - place->begin > longest_) break;
    if (place->end >= end) return &*place;
  }
  return nullptr;
}

}  // namespace herring::efa
