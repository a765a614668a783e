#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace herring::runtime {

/// Buffers of one size in slabs that are registered where the endpoint needs it; grows, never shrinks. Goes before the
/// endpoint, and when no post uses a buffer of it any more.
class BufferPool final {
 public:
  BufferPool(transport::Endpoint& endpoint, std::size_t buffer_bytes, std::size_t per_slab)
      : endpoint_(endpoint), buffer_bytes_(buffer_bytes), per_slab_(std::max<std::size_t>(per_slab, 1)) {}

  std::size_t buffer_bytes() const { return buffer_bytes_; }

  std::span<std::byte> take() {
    if (free_.empty()) grow();
    std::byte* buffer = free_.back();
    free_.pop_back();
    return {buffer, buffer_bytes_};
  }
  void give_back(std::span<std::byte> buffer) { free_.push_back(buffer.data()); }

 private:
  struct Slab {
    std::unique_ptr<std::byte[]> memory;
    std::unique_ptr<transport::Registration> registration;  // Goes before the memory.
  };

  void grow() {
    Slab slab;
    const std::size_t bytes = buffer_bytes_ * per_slab_;
    slab.memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
    if (endpoint_.needs_registration()) slab.registration = endpoint_.register_memory({slab.memory.get(), bytes});
    for (std::size_t i = per_slab_; i > 0; --i) free_.push_back(slab.memory.get() + (i - 1) * buffer_bytes_);
    slabs_.push_back(std::move(slab));
  }

  transport::Endpoint& endpoint_;
  std::size_t buffer_bytes_;
  std::size_t per_slab_;
  std::vector<Slab> slabs_;
  std::vector<std::byte*> free_;
};

}  // namespace herring::runtime
