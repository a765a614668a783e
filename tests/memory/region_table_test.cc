#include "memory/region_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "memory/regions.h"

namespace herring::memory {
namespace {

TEST(RegionTable, AgreesWithLookingAtAll) {
  // A post with another region's descriptor is data in the wrong place.
  std::vector<std::byte> memory(4096);
  std::mt19937 random(7);
  RegionTable table;
  std::vector<std::unique_ptr<Region>> all;
  const auto span = [&] {
    const std::size_t first = random() % memory.size();
    return std::span<const std::byte>(memory).subspan(first, 1 + random() % (memory.size() - first));
  };
  for (int i = 0; i < 5000; ++i) {
    if (all.size() < 12 || random() % 2 == 0) {
      auto region = std::make_unique<Region>();
      const auto of = span();
      region->begin = reinterpret_cast<std::uintptr_t>(of.data());
      region->end = region->begin + of.size();
      region->is_stale = random() % 4 == 0;
      table.insert(*region);
      all.push_back(std::move(region));
    } else {
      const std::size_t which = random() % all.size();
      table.erase(*all[which]);
      all.erase(all.begin() + static_cast<std::ptrdiff_t>(which));
    }
    const auto wanted = span();
    const auto begin = reinterpret_cast<std::uintptr_t>(wanted.data());
    const auto end = begin + wanted.size();
    const auto covers = [&](const auto& region) { return region->begin <= begin && region->end >= end; };
    const bool any = std::ranges::any_of(all, covers);
    const bool any_good = std::ranges::any_of(all, [&](const auto& r) { return covers(r) && !r->is_stale; });
    const Region* found = table.find(wanted);
    ASSERT_EQ(found != nullptr, any);
    if (found != nullptr) {
      ASSERT_TRUE(covers(found));
      ASSERT_EQ(!found->is_stale, any_good);
    }
    std::vector<Region*> touched;
    table.overlapping(wanted, touched);
    const auto meets = std::ranges::count_if(all, [&](const auto& r) { return r->begin < end && r->end > begin; });
    ASSERT_EQ(static_cast<std::ptrdiff_t>(touched.size()), meets);
  }
}

}  // namespace
}  // namespace herring::memory
