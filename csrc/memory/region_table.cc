#include "memory/region_table.h"

#include <algorithm>

#include "memory/regions.h"

namespace herring::memory {
namespace {

std::uintptr_t address(std::span<const std::byte> memory) { return reinterpret_cast<std::uintptr_t>(memory.data()); }

bool begins_after(std::uintptr_t begin, const Region* region) { return begin < region->begin; }

}  // namespace

void RegionTable::insert(Region& region) {
  regions_.insert(std::upper_bound(regions_.begin(), regions_.end(), region.begin, begins_after), &region);
  longest_ = std::max(longest_, region.end - region.begin);
}

void RegionTable::erase(const Region& region) noexcept {
  auto place = std::upper_bound(regions_.begin(), regions_.end(), region.begin, begins_after);
  while (place != regions_.begin() && *--place != &region) {
  }
  if (place != regions_.end() && *place == &region) regions_.erase(place);
  if (regions_.empty()) longest_ = 0;
}

Region* RegionTable::find(std::span<const std::byte> memory) const noexcept {
  const std::uintptr_t begin = address(memory);
  const std::uintptr_t end = begin + memory.size();
  Region* stale = nullptr;
  auto place = std::upper_bound(regions_.begin(), regions_.end(), begin, begins_after);
  // Regions may overlap, so the nearest one before may be too short where an earlier one is long enough.
  while (place != regions_.begin()) {
    --place;
    if (begin - (*place)->begin > longest_) break;
    if ((*place)->end < end) continue;
    if (!(*place)->is_stale) return *place;
    stale = *place;
  }
  return stale;
}

void RegionTable::overlapping(std::span<const std::byte> memory, std::vector<Region*>& found) const {
  const std::uintptr_t begin = address(memory);
  const std::uintptr_t end = begin + memory.size();
  auto place = std::lower_bound(regions_.begin(), regions_.end(), end,
                                [](const Region* region, std::uintptr_t value) { return region->begin < value; });
  while (place != regions_.begin()) {
    --place;
    if ((*place)->end > begin) found.push_back(*place);
    if (begin > (*place)->begin && begin - (*place)->begin > longest_) break;
  }
}

}  // namespace herring::memory
