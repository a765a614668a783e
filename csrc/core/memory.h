#pragma once

#include <cstdint>
#include <filesystem>

namespace herring {

/// Bytes of memory that this process may use: the machine's physical memory, or the limit of its cgroup or of any
/// cgroup around it (version 1 and 2) where that is lower. A container's limit counts, though /proc/meminfo does not
/// show it. `root` is where /proc and /sys lie; tests give another. Throws Error(kUnavailable) where the machine's
/// memory cannot be read.
std::uint64_t usable_memory_bytes(const std::filesystem::path& root = "/");

}  // namespace herring
