#pragma once

#include <cstdint>

namespace herring {

/// This process's id: getpid() at the cost of a load. The kernel clears what was kept of it in a fork()ed child.
std::int32_t process_id() noexcept;

}  // namespace herring
