#include "memory/regions.h"

#include <utility>

#include "core/status.h"

namespace herring::memory {

Regions::~Regions() {
  if (guard_.in_owner()) return;
  // The child leaks what the cards gave.
  for (auto& [key, region] : owned_) {
    for (auto& registration : region->registrations) static_cast<void>(registration.release());
  }
  static_cast<void>(new std::vector<std::shared_ptr<Nic>>(std::move(nics_)));
}

NicId Regions::add_nic(std::shared_ptr<Nic> nic) {
  if (is_used_.load()) {
    throw Error(Code::kInternal, "network card " + nic->description() + " comes after memory was registered");
  }
  nics_.push_back(std::move(nic));
  return NicId{static_cast<std::uint32_t>(nics_.size() - 1)};
}

Region* Regions::hold(std::span<std::byte> memory, MemoryPlace place, Reuse reuse) {
  if (nics_.empty() || memory.empty() || !guard_.in_owner()) return nullptr;
  is_used_.store(true);
  if (Region* known = take_known(memory); known != nullptr) return known;
  auto region = std::make_unique<Region>();
  region->begin = reinterpret_cast<std::uintptr_t>(memory.data());
  region->end = region->begin + memory.size();
  region->reuse = reuse;
  region->holds = 1;
  for (const auto& nic : nics_) {
    region->registrations.push_back(nic->takes(place.kind) ? nic->register_memory(memory, place) : nullptr);
  }
  const std::unique_lock lock(mutex_);
  if (is_closed_) throw Error(Code::kShutdown, "memory was to be registered after its domain had gone");
  Region& added = *region;
  owned_.emplace(&added, std::move(region));
  table_.insert(added);
  ++stats_.registered;
  stats_.bytes += added.bytes();
  return &added;
}

Region* Regions::take_known(std::span<const std::byte> memory) {
  const std::unique_lock lock(mutex_);
  Region* known = table_.find(memory);
  if (known == nullptr || known->is_stale) return nullptr;
  if (known->is_idle) stop_idling(*known);
  ++known->holds;
  ++stats_.reused;
  return known;
}

Region* Regions::borrow(std::span<const std::byte> memory) {
  const std::unique_lock lock(mutex_);
  Region* known = table_.find(memory);
  if (known == nullptr) return nullptr;
  if (known->is_idle) stop_idling(*known);
  ++known->holds;
  return known;
}

void Regions::own(Region* region) noexcept {
  if (!guard_.in_owner()) return;
  const std::unique_lock lock(mutex_);
  region->is_owned = true;
}

void Regions::let_go(Region* region, bool owns_memory) noexcept {
  if (!guard_.in_owner()) return;
  std::vector<Owned> gone;  // After the lock.
  const std::unique_lock lock(mutex_);
  // Somebody may hold it still; the memory goes all the same.
  if (owns_memory && region->reuse == Reuse::kNever) region->is_stale = true;
  if (--region->holds > 0) return;
  if (is_closed_ || region->is_stale || region->reuse == Reuse::kNever) {
    gone.push_back(remove(*region));
  } else {
    region->idle_place = idle_.insert(idle_.end(), region);
    region->is_idle = true;
    stats_.idle_bytes += region->bytes();
    gone = evict();
  }
}

void Regions::outlive(Region* region) noexcept {
  if (!guard_.in_owner()) return;
  const std::unique_lock lock(mutex_);
  // Where its owner says when it goes, the memory stays what it is until then.
  if (region->reuse == Reuse::kNever && !region->is_owned) region->is_stale = true;
}

void Regions::invalidate(std::span<const std::byte> memory) noexcept {
  if (nics_.empty() || memory.empty() || !guard_.in_owner()) return;
  std::vector<Owned> gone;  // After the lock.
  const std::unique_lock lock(mutex_);
  std::vector<Region*> found;
  table_.overlapping(memory, found);
  for (Region* region : found) {
    region->is_stale = true;
    if (region->holds > 0) continue;
    stop_idling(*region);
    gone.push_back(remove(*region));
  }
}

const Registration* Regions::find(NicId nic, std::span<const std::byte> memory) const noexcept {
  const std::shared_lock lock(mutex_);
  const Region* region = table_.find(memory);
  return region == nullptr ? nullptr : region->registrations[nic.value].get();
}

DomainStats Regions::stats() const {
  const std::shared_lock lock(mutex_);
  DomainStats stats = stats_;
  stats.regions = table_.size();
  stats.idle_regions = idle_.size();
  return stats;
}

/// Buffers and holds that are left keep their regions, which hold nothing of the cards any more.
void Regions::close() noexcept {
  if (!guard_.in_owner()) return;
  std::vector<std::unique_ptr<Registration>> gone;  // After the lock, and before the cards.
  std::vector<Owned> idle;
  {
    const std::unique_lock lock(mutex_);
    is_closed_ = true;
    while (!idle_.empty()) {
      Region& region = *idle_.front();
      stop_idling(region);
      idle.push_back(remove(region));
    }
    for (auto& [key, region] : owned_) {
      for (auto& registration : region->registrations) gone.push_back(std::move(registration));
    }
  }
  idle.clear();
  gone.clear();
  nics_.clear();
}

std::vector<Regions::Owned> Regions::evict() {
  std::vector<Owned> gone;
  while (idle_.size() > limits_.regions || stats_.idle_bytes > limits_.bytes) {
    Region& oldest = *idle_.front();
    stop_idling(oldest);
    gone.push_back(remove(oldest));
    ++stats_.evicted;
  }
  return gone;
}

Regions::Owned Regions::remove(Region& region) noexcept {
  table_.erase(region);
  stats_.bytes -= region.bytes();
  const auto found = owned_.find(&region);
  Owned owned = std::move(found->second);
  owned_.erase(found);
  return owned;
}

void Regions::stop_idling(Region& region) noexcept {
  idle_.erase(region.idle_place);
  region.is_idle = false;
  stats_.idle_bytes -= region.bytes();
}

}  // namespace herring::memory
