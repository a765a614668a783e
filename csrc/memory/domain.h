#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/memory_kind.h"
#include "core/types.h"
#include "memory/buffer.h"
#include "memory/nic.h"

namespace herring::memory {

/// What registrations that nobody holds may take together; the least recently used go first.
struct IdleLimits {
  std::size_t regions = 1024;
  std::size_t bytes = std::size_t{1} << 30;
};

/// May a registration that nobody holds any more be used again?
enum class Reuse : std::uint8_t {
  /// No: nobody says when this memory is freed, and another allocation may get its address (docs/adr/0016).
  kNever,
  /// Yes: whoever owns the memory calls invalidate() before it is unmapped or its pages are given back.
  kUntilInvalidated,
};

struct DomainStats {
  std::uint64_t registered = 0;  ///< Ranges that were made known to the cards, ever,
  std::uint64_t reused = 0;      ///< and times that one was there already.
  std::uint64_t evicted = 0;     ///< Idle ones that went for lack of room.
  std::size_t regions = 0;       ///< Known now,
  std::size_t bytes = 0;         ///< with so many bytes;
  std::size_t idle_regions = 0;  ///< of those, held by nobody.
  std::size_t idle_bytes = 0;
};

/// Which memory the network cards of a process may touch. One for each job of a process: it is made before the first
/// endpoint and goes after the last. All endpoints on one card share what is registered with it. Any thread.
class Domain final {
 public:
  explicit Domain(IdleLimits limits = {});
  /// Takes all memory from the cards, then lets go of these. No endpoint may be left; buffers may.
  ~Domain();
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;

  /// Set-up: before any memory comes. Throws Error(kInternal) afterwards.
  NicId add_nic(std::shared_ptr<Nic> nic);
  const std::vector<std::shared_ptr<Nic>>& nics() const noexcept;
  /// False: nothing here is ever registered, and holding memory costs nothing.
  bool needs_registration() const noexcept { return !nics().empty(); }

  /// map_host(), registered. Throws Error: no memory, or a card that does not take it.
  Buffer allocate(std::size_t bytes);
  /// Memory that somebody else has mapped, registered. Throws Error where a card does not take it.
  Buffer adopt(std::span<std::byte> memory, MemoryPlace place, std::shared_ptr<void> owner,
               Reuse reuse = Reuse::kNever);
  /// Registers memory that its caller lends, where nobody has; empty memory needs nothing. Throws Error where a card
  /// does not take it.
  [[nodiscard]] Hold hold(std::span<std::byte> memory, MemoryPlace place = MemoryKind::kHost,
                          Reuse reuse = Reuse::kNever);
  /// This memory is about to be unmapped, or to lose its pages: no registration that has some of it is used again.
  void invalidate(std::span<const std::byte> memory) noexcept;

  /// For an endpoint: keeps a registration that covers all of `memory` until its post is over; empty where there is
  /// none. It need not be the one that whoever posts the memory holds: that of another tensor may cover it too, and end
  /// first.
  [[nodiscard]] Hold borrow(std::span<const std::byte> memory);
  /// A registration with this card that covers all of `memory`, or null. Good for as long as somebody holds that one.
  const Registration* find(NicId nic, std::span<const std::byte> memory) const noexcept;
  DomainStats stats() const;

 private:
  std::shared_ptr<Regions> regions_;
};

}  // namespace herring::memory
