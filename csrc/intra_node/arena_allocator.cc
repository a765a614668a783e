#include "intra_node/arena_allocator.h"

#include <algorithm>
#include <iterator>

namespace herring::intra_node {
namespace {

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

ArenaAllocator::ArenaAllocator(std::uint64_t arena_bytes, std::uint64_t warm_limit_bytes, Discard discard)
    : usable_(arena_bytes / kAlignment * kAlignment), warm_limit_(warm_limit_bytes), discard_(std::move(discard)) {
  if (usable_ > 0) insert_clean(0, usable_);
}

std::optional<std::uint64_t> ArenaAllocator::allocate(std::uint64_t bytes, std::uint64_t leave_bytes) {
  if (bytes > UINT64_MAX - kAlignment) return std::nullopt;
  const std::uint64_t need = round_up(std::max<std::uint64_t>(bytes, 1), kAlignment);
  const std::scoped_lock lock(mutex_);
  const std::uint64_t left = usable_ - live_total_;
  if (leave_bytes > 0 && (need > left || left - need < leave_bytes)) return std::nullopt;
  std::optional<std::uint64_t> offset = take_warm(need);
  if (!offset) offset = take_clean(need);
  // Warm ranges of other sizes may hold what is needed once they are merged.
  while (!offset && !warm_.empty()) {
    cool_oldest();
    offset = take_clean(need);
  }
  return offset;
}

bool ArenaAllocator::deallocate(std::uint64_t offset) {
  const std::scoped_lock lock(mutex_);
  const auto found = live_.find(offset);
  if (found == live_.end()) return false;
  const std::uint64_t bytes = found->second;
  live_.erase(found);
  live_total_ -= bytes;
  warm_.push_back({offset, bytes, {}});
  warm_.back().by_size = warm_by_size_.emplace(bytes, std::prev(warm_.end()));
  warm_total_ += bytes;
  while (warm_total_ > warm_limit_) cool_oldest();
  return true;
}

std::optional<std::uint64_t> ArenaAllocator::take_warm(std::uint64_t bytes) {
  // The smallest that fits and wastes at most a quarter; of equal ones the last freed.
  const auto fit = warm_by_size_.lower_bound(bytes);
  if (fit == warm_by_size_.end() || fit->first > bytes + bytes / 4) return std::nullopt;
  const auto last = std::prev(warm_by_size_.upper_bound(fit->first));
  const WarmList::iterator block = last->second;
  const std::uint64_t offset = block->offset;
  live_.emplace(offset, block->bytes);
  live_total_ += block->bytes;
  warm_total_ -= block->bytes;
  warm_by_size_.erase(last);
  warm_.erase(block);
  return offset;
}

std::optional<std::uint64_t> ArenaAllocator::take_clean(std::uint64_t bytes) {
  const std::uint64_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  for (auto it = clean_by_size_.lower_bound({bytes, 0}); it != clean_by_size_.end(); ++it) {
    const auto [extent_bytes, extent_offset] = *it;
    const std::uint64_t offset = round_up(extent_offset, alignment);
    const std::uint64_t lead = offset - extent_offset;
    if (extent_bytes < lead || extent_bytes - lead < bytes) continue;
    erase_clean(clean_.find(extent_offset));
    if (lead > 0) insert_clean(extent_offset, lead);
    if (extent_bytes - lead > bytes) insert_clean(offset + bytes, extent_bytes - lead - bytes);
    live_.emplace(offset, bytes);
    live_total_ += bytes;
    return offset;
  }
  return std::nullopt;
}

void ArenaAllocator::cool_oldest() {
  const auto [offset, bytes, by_size] = warm_.front();
  warm_by_size_.erase(by_size);
  warm_.pop_front();
  warm_total_ -= bytes;
  discard_(offset, bytes);
  insert_clean(offset, bytes);
}

void ArenaAllocator::insert_clean(std::uint64_t offset, std::uint64_t bytes) {
  const auto next = clean_.lower_bound(offset);
  if (next != clean_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      erase_clean(before);
    }
  }
  if (next != clean_.end() && offset + bytes == next->first) {
    bytes += next->second;
    erase_clean(next);
  }
  clean_.emplace(offset, bytes);
  clean_by_size_.emplace(bytes, offset);
}

void ArenaAllocator::erase_clean(std::map<std::uint64_t, std::uint64_t>::iterator extent) {
  clean_by_size_.erase({extent->second, extent->first});
  clean_.erase(extent);
}

std::uint64_t ArenaAllocator::bytes_in_use() const {
  const std::scoped_lock lock(mutex_);
  return live_total_;
}

std::uint64_t ArenaAllocator::warm_bytes() const {
  const std::scoped_lock lock(mutex_);
  return warm_total_;
}

}  // namespace herring::intra_node
