#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "core/memory_kind.h"
#include "core/types.h"

namespace herring::memory {

class Domain;
class Registration;
class Regions;
struct Region;

/// A promise that a range of memory stays registered while this lives. Movable; empty where nothing needs registering.
/// Any thread, one at a time.
class Hold final {
 public:
  Hold() = default;
  Hold(Hold&& other) noexcept
      : regions_(std::move(other.regions_)),
        region_(std::exchange(other.region_, nullptr)),
        owns_memory_(other.owns_memory_) {}
  Hold& operator=(Hold&& other) noexcept;
  ~Hold() { reset(); }

  explicit operator bool() const noexcept { return region_ != nullptr; }
  /// With this card; null where it does not take such memory.
  const Registration* registration(Id<struct NicKind> nic) const noexcept;
  void reset() noexcept;
  /// The memory is its owner's again, who may free it, while a card may still read it for somebody who is gone. Nobody
  /// else shares this registration from now on.
  void outlive_memory() noexcept;

 private:
  friend class Domain;
  Hold(std::shared_ptr<Regions> regions, Region* region, bool owns_memory)
      : regions_(std::move(regions)), region_(region), owns_memory_(owns_memory) {}

  std::shared_ptr<Regions> regions_;
  Region* region_ = nullptr;
  bool owns_memory_ = false;  ///< A buffer's: the memory goes when it does.
};

/// Memory with one owner that says what it is, registered with every card of its domain from the beginning to the end.
/// It may outlive its domain (a tensor that its user keeps): then it is registered nowhere any more, and stays memory.
class Buffer final {
 public:
  Buffer() = default;
  /// `owner` frees the memory when it goes, after the registrations have.
  Buffer(std::span<std::byte> bytes, MemoryKind kind, std::shared_ptr<void> owner, Hold hold = {})
      : owner_(std::move(owner)), hold_(std::move(hold)), bytes_(bytes), kind_(kind) {}

  std::span<std::byte> bytes() const noexcept { return bytes_; }
  std::byte* data() const noexcept { return bytes_.data(); }
  std::size_t size() const noexcept { return bytes_.size(); }
  MemoryKind kind() const noexcept { return kind_; }
  bool is_registered() const noexcept { return static_cast<bool>(hold_); }

 private:
  std::shared_ptr<void> owner_;  // First: its memory goes last.
  Hold hold_;
  std::span<std::byte> bytes_;
  MemoryKind kind_ = MemoryKind::kHost;
};

/// Zeroed pages of this process that no card knows, taken when they are touched, on huge pages where the kernel allows.
/// Throws Error(kUnavailable) that names the size.
Buffer map_host(std::size_t bytes);

}  // namespace herring::memory
