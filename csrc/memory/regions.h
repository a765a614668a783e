#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/memory_kind.h"
#include "core/process.h"
#include "memory/domain.h"
#include "memory/nic.h"
#include "memory/region_table.h"

namespace herring::memory {

/// A range that the cards know.
struct Region {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;  ///< One past the last byte.
  /// By NicId; null where the card does not take this kind of memory.
  std::vector<std::unique_ptr<Registration>> registrations;
  std::size_t holds = 0;
  bool is_owned = false;  ///< One of the holds is a buffer's.
  Reuse reuse = Reuse::kNever;
  bool is_stale = false;  ///< Nobody new holds it: its memory may be another's by now.
  bool is_idle = false;   ///< Held by nobody, in the list of those.
  std::list<Region*>::iterator idle_place{};

  std::size_t bytes() const noexcept { return end - begin; }
};

/// What a domain knows. Buffers and holds share it, for they may outlive the domain. Cards are asked without the lock:
/// pinning takes long, and posts of other threads look memory up meanwhile. In a fork()ed child nothing is taken back:
/// the cards are the parent's.
class Regions final {
 public:
  explicit Regions(IdleLimits limits) : limits_(limits) {}
  ~Regions();
  Regions(const Regions&) = delete;
  Regions& operator=(const Regions&) = delete;

  NicId add_nic(std::shared_ptr<Nic> nic);
  const std::vector<std::shared_ptr<Nic>>& nics() const noexcept { return nics_; }
  /// Null: nothing to register.
  Region* hold(std::span<std::byte> memory, MemoryPlace place, Reuse reuse);
  /// Of a known one, stale or not; null: none covers the memory.
  Region* borrow(std::span<const std::byte> memory);
  void own(Region* region) noexcept;
  void let_go(Region* region, bool owns_memory) noexcept;
  void outlive(Region* region) noexcept;
  void invalidate(std::span<const std::byte> memory) noexcept;
  const Registration* find(NicId nic, std::span<const std::byte> memory) const noexcept;
  DomainStats stats() const;
  void close() noexcept;

 private:
  using Owned = std::unique_ptr<Region>;

  Region* take_known(std::span<const std::byte> memory);
  std::vector<Owned> evict();
  Owned remove(Region& region) noexcept;
  void stop_idling(Region& region) noexcept;

  const IdleLimits limits_;
  const ForkGuard guard_;
  std::vector<std::shared_ptr<Nic>> nics_;  ///< Does not change once `is_used_`, until close().
  std::atomic<bool> is_used_{false};
  mutable std::shared_mutex mutex_;  // guards all below
  std::unordered_map<const Region*, Owned> owned_;
  RegionTable table_;
  std::list<Region*> idle_;  ///< Least recently used first.
  DomainStats stats_;
  bool is_closed_ = false;
};

}  // namespace herring::memory
