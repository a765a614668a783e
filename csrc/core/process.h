#pragma once

#include <cstdint>

namespace herring {

/// This process's id: getpid() at the cost of a load. The kernel clears what was kept of it in a fork()ed child.
std::int32_t process_id() noexcept;

/// Tells the process that made it from its fork()ed children, which inherit memory and descriptors but no threads, and
/// must leave what is shared alone. Costs one load.
class ForkGuard final {
 public:
  bool in_owner() const { return process_id() == owner_; }

 private:
  const std::int32_t owner_ = process_id();
};

}  // namespace herring
