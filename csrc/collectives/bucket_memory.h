#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <vector>

#include "runtime/communicator.h"

namespace herring::collectives {

/// Of the runtime's arena; of the heap where that is full. Throws as BucketMemory::take().
inline std::shared_ptr<std::byte> allocate(runtime::Communicator& runtime, std::size_t bytes) {
  constexpr std::align_val_t kAligned{64};
  if (std::shared_ptr<std::byte> memory = runtime.allocate(bytes)) return memory;
  return {static_cast<std::byte*>(operator new(bytes, kAligned)),
          [kAligned](std::byte* start) { operator delete(start, kAligned); }};
}

/// Memory for buckets, used again: of the runtime's arena, so that operations on it copy nothing; of the heap where the
/// arena is full. Any thread.
class BucketMemory final {
 public:
  struct Bucket {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
    std::span<std::byte> first(std::size_t count) const { return {memory.get(), count}; }
  };

  explicit BucketMemory(std::shared_ptr<runtime::Communicator> runtime) : runtime_(std::move(runtime)) {}

  /// At least so many bytes. Throws std::bad_alloc, and Error where the runtime has ended.
  Bucket take(std::size_t bytes) {
    {
      const std::scoped_lock lock(mutex_);
      auto best = free_.end();
      for (auto each = free_.begin(); each != free_.end(); ++each) {
        if (each->bytes >= bytes && (best == free_.end() || each->bytes < best->bytes)) best = each;
      }
      if (best != free_.end()) {
        Bucket found = std::move(*best);
        free_.erase(best);
        return found;
      }
    }
    const std::size_t rounded = (bytes + kUnit - 1) / kUnit * kUnit;
    return {allocate(*runtime_, rounded), rounded};
  }

  void give_back(Bucket bucket) {
    const std::scoped_lock lock(mutex_);
    free_.push_back(std::move(bucket));
    if (free_.size() <= kMostFree) return;
    free_.erase(std::ranges::min_element(free_, {}, &Bucket::bytes));
  }

 private:
  static constexpr std::size_t kUnit = 256 << 10;
  static constexpr std::size_t kMostFree = 4;

  const std::shared_ptr<runtime::Communicator> runtime_;
  std::mutex mutex_;
  std::vector<Bucket> free_;  // guarded by mutex_
};

}  // namespace herring::collectives
