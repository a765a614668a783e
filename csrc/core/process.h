#pragma once

#include <atomic>
#include <cstdint>

namespace herring {

namespace internal {
/// This process's id once it was asked for, in memory that the kernel clears in a fork()ed child; null before that, and
/// where the kernel cannot do so.
extern std::atomic<std::atomic<std::int32_t>*> kept_process_id;
std::int32_t find_process_id() noexcept;
}  // namespace internal

/// This process's id: getpid() at the cost of two loads.
inline std::int32_t process_id() noexcept {
  const std::atomic<std::int32_t>* const kept = internal::kept_process_id.load(std::memory_order_acquire);
  const std::int32_t id = kept == nullptr ? 0 : kept->load(std::memory_order_relaxed);
  return id != 0 ? id : internal::find_process_id();
}

/// Tells the process that made it from its fork()ed children, which inherit memory and descriptors but no threads, and
/// must leave what is shared alone. Costs two loads.
class ForkGuard final {
 public:
  bool in_owner() const { return process_id() == owner_; }

 private:
  const std::int32_t owner_ = process_id();
};

}  // namespace herring
