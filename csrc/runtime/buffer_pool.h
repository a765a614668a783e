#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/status.h"
#include "memory/domain.h"

namespace herring::runtime {

/// Buffers of one size in slabs that are registered where an endpoint wants that; grows, never shrinks. Goes when no
/// post uses a buffer of it any more.
class BufferPool final {
 public:
  /// `domain`: the endpoint's, or null.
  BufferPool(memory::Domain* domain, std::size_t buffer_bytes, std::size_t per_slab)
      : domain_(domain), buffer_bytes_(buffer_bytes), per_slab_(std::max<std::size_t>(per_slab, 1)) {}

  std::size_t buffer_bytes() const { return buffer_bytes_; }

  /// Throws Error where none is free, and memory for more cannot be registered.
  std::span<std::byte> take() {
    if (free_.empty()) grow();
    std::byte* buffer = free_.back();
    free_.pop_back();
    return {buffer, buffer_bytes_};
  }
  /// Of a pool whose users give their buffers back by themselves: empty until one has, where there is no more memory.
  std::span<std::byte> take_in_turn() {
    if (free_.empty() && could_not_grow_) return {};
    try {
      return take();
    } catch (const Error&) {
      could_not_grow_ = true;
      return {};
    }
  }
  void give_back(std::span<std::byte> buffer) { free_.push_back(buffer.data()); }
  /// Has a slab from now on. Throws Error where it cannot be registered.
  void reserve() {
    if (slabs_.empty()) grow();
  }

 private:
  void grow() {
    const std::size_t bytes = buffer_bytes_ * per_slab_;
    const std::shared_ptr<std::byte[]> owner(new std::byte[bytes]);
    const std::span<std::byte> memory(owner.get(), bytes);
    memory::Buffer slab = domain_ == nullptr ? memory::Buffer(memory, MemoryKind::kHost, owner)
                                             : domain_->adopt(memory, MemoryKind::kHost, owner);
    for (std::size_t i = per_slab_; i > 0; --i) free_.push_back(memory.data() + (i - 1) * buffer_bytes_);
    slabs_.push_back(std::move(slab));
  }

  memory::Domain* domain_;
  std::size_t buffer_bytes_;
  std::size_t per_slab_;
  std::vector<memory::Buffer> slabs_;
  std::vector<std::byte*> free_;
  bool could_not_grow_ = false;
};

/// What the headers and copies of posts live in. Where memory has to be registered, and may one day not be, sends have
/// their own: these come back by themselves, so that a host without memory to pin is only slower. What a receive needs
/// may be out for as long as an operation; peers count on it, and without it the process cannot go on.
class PostBuffers final {
 public:
  PostBuffers(memory::Domain* domain, std::size_t small_bytes, std::size_t small_per_slab, std::size_t large_bytes,
              std::size_t large_per_slab)
      : has_own_for_sends_(domain != nullptr),
        small_(domain, small_bytes, small_per_slab),
        large_(domain, large_bytes, large_per_slab),
        small_sends_(domain, small_bytes, small_per_slab),
        large_sends_(domain, large_bytes, large_per_slab) {
    if (!has_own_for_sends_) return;
    small_sends_.reserve();
    large_sends_.reserve();
  }

  std::size_t large_bytes() const { return large_.buffer_bytes(); }
  /// A send's: empty where it is to be tried again. Throws Error where there is none for a receive.
  std::span<std::byte> take(bool is_send, bool is_large) {
    BufferPool& pool = pool_of(is_send, is_large);
    return is_send && has_own_for_sends_ ? pool.take_in_turn() : pool.take();
  }
  void give_back(bool is_send, bool is_large, std::span<std::byte> buffer) {
    pool_of(is_send, is_large).give_back(buffer);
  }

 private:
  BufferPool& pool_of(bool is_send, bool is_large) {
    if (is_send && has_own_for_sends_) return is_large ? large_sends_ : small_sends_;
    return is_large ? large_ : small_;
  }

  const bool has_own_for_sends_;
  BufferPool small_;
  BufferPool large_;
  BufferPool small_sends_;
  BufferPool large_sends_;
};

}  // namespace herring::runtime
