#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "core/memory_kind.h"
#include "core/types.h"

namespace herring::memory {

/// A network card's hold on a range of memory: until its destructor the card may read and write there.
class Registration {
 public:
  virtual ~Registration() = default;
  /// What a post of this memory carries. Means something to the card's own endpoints alone.
  virtual void* descriptor() const noexcept = 0;
};

/// A network card, as far as memory is concerned. Only those are one that want memory registered (EFA, verbs:
/// FI_MR_LOCAL); sockets read what lies anywhere. Any thread.
class Nic {
 public:
  virtual ~Nic() = default;
  /// "efa (rdmap0s6-rdm)": for errors.
  virtual std::string description() const = 0;
  /// False: memory of that kind is never posted on this card (a device's, without GPUDirect).
  virtual bool takes(MemoryKind kind) const noexcept = 0;
  /// Pins the memory and makes it known to the card: slow, milliseconds for large memory. Throws Error.
  virtual std::unique_ptr<Registration> register_memory(std::span<std::byte> memory, MemoryPlace place) = 0;
};

/// Position of a card in its domain.
using NicId = Id<struct NicKind>;

}  // namespace herring::memory
