#pragma once

#include <atomic>
#include <cstdint>

namespace herring {

/// Counts up. Any thread; add() is one relaxed atomic addition. Alone on its cache line, so that two threads that count
/// different things do not slow each other down.
class alignas(64) Counter final {
 public:
  void add(std::uint64_t count = 1) noexcept { value_.fetch_add(count, std::memory_order_relaxed); }
  std::uint64_t value() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

}  // namespace herring
