#include "memory/domain.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "core/status.h"
#include "memory/regions.h"

namespace herring::memory {

Hold& Hold::operator=(Hold&& other) noexcept {
  if (this == &other) return *this;
  reset();
  regions_ = std::move(other.regions_);
  region_ = std::exchange(other.region_, nullptr);
  owns_memory_ = other.owns_memory_;
  return *this;
}

void Hold::reset() noexcept {
  if (region_ != nullptr) regions_->let_go(std::exchange(region_, nullptr), owns_memory_);
  regions_.reset();
}

void Hold::outlive_memory() noexcept {
  if (region_ != nullptr) regions_->outlive(region_);
}

const Registration* Hold::registration(NicId nic) const noexcept {
  return region_ == nullptr ? nullptr : region_->registrations[nic.value].get();
}

Buffer map_host(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Code::kUnavailable, "no memory: mmap of " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  }
  madvise(memory, bytes, MADV_HUGEPAGE);  // Only a hint.
  return {{static_cast<std::byte*>(memory), bytes}, MemoryKind::kHost, {memory, [bytes](void* start) {
                                                                          munmap(start, bytes);
                                                                        }}};
}

Domain::Domain(IdleLimits limits) : regions_(std::make_shared<Regions>(limits)) {}
Domain::~Domain() { regions_->close(); }

NicId Domain::add_nic(std::shared_ptr<Nic> nic) { return regions_->add_nic(std::move(nic)); }
const std::vector<std::shared_ptr<Nic>>& Domain::nics() const noexcept { return regions_->nics(); }

Buffer Domain::allocate(std::size_t bytes) {
  Buffer mapped = map_host(bytes);
  const std::span<std::byte> memory = mapped.bytes();
  return adopt(memory, MemoryKind::kHost, std::make_shared<Buffer>(std::move(mapped)));
}

Buffer Domain::adopt(std::span<std::byte> memory, MemoryPlace place, std::shared_ptr<void> owner, Reuse reuse) {
  Hold held = hold(memory, place, reuse);
  if (held) regions_->own(held.region_);
  held.owns_memory_ = true;
  return {memory, place.kind, std::move(owner), std::move(held)};
}

Hold Domain::hold(std::span<std::byte> memory, MemoryPlace place, Reuse reuse) {
  Region* region = regions_->hold(memory, place, reuse);
  if (region == nullptr) return {};
  return {regions_, region, false};
}

Hold Domain::borrow(std::span<const std::byte> memory) {
  Region* region = regions_->borrow(memory);
  if (region == nullptr) return {};
  return {regions_, region, false};
}

void Domain::invalidate(std::span<const std::byte> memory) noexcept { regions_->invalidate(memory); }

const Registration* Domain::find(NicId nic, std::span<const std::byte> memory) const noexcept {
  return regions_->find(nic, memory);
}

DomainStats Domain::stats() const { return regions_->stats(); }

}  // namespace herring::memory
