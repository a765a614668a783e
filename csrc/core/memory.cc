#include "core/memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

#include "core/status.h"

namespace herring {
namespace {

std::optional<std::uint64_t> leading_number(std::string_view text) {
  const std::size_t start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) return std::nullopt;
  text.remove_prefix(start);
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return std::nullopt;  // Also cgroup 2's "max": no limit.
  return number;
}

std::uint64_t physical_bytes(const std::filesystem::path& root) {
  constexpr std::string_view kField = "MemTotal:";
  std::ifstream file(root / "proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kField)) continue;
    if (const auto kilobytes = leading_number(std::string_view(line).substr(kField.size()))) return *kilobytes * 1024;
  }
  throw Error(Code::kUnavailable, "cannot read MemTotal from " + (root / "proc/meminfo").string() +
                                      "; set HERRING_ARENA_BYTES to a number of bytes");
}

/// The lowest limit of the cgroup `group` under `mount` and of all around it. Where a container shows only its own part
/// of the tree, the lower directories are missing and the mount itself has the limit.
std::uint64_t lowest_limit(const std::filesystem::path& mount, std::string_view group, const char* file_name,
                           std::uint64_t lowest) {
  std::filesystem::path relative = std::filesystem::path(group).relative_path();
  while (true) {
    std::ifstream file(mount / relative / file_name);
    std::string line;
    if (std::getline(file, line)) {
      if (const auto limit = leading_number(line); limit && *limit > 0) lowest = std::min(lowest, *limit);
    }
    if (relative.empty()) return lowest;
    relative = relative.parent_path();
  }
}

/// Whether a comma-separated list of cgroup controllers has `memory`.
bool has_memory(std::string_view controllers) {
  while (!controllers.empty()) {
    const std::size_t comma = std::min(controllers.find(','), controllers.size());
    if (controllers.substr(0, comma) == "memory") return true;
    controllers.remove_prefix(std::min(comma + 1, controllers.size()));
  }
  return false;
}

}  // namespace

std::uint64_t usable_memory_bytes(const std::filesystem::path& root) {
  std::uint64_t usable = physical_bytes(root);
  const std::filesystem::path mount = root / "sys/fs/cgroup";
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/user.slice" is version 2; "4:memory:/jobs/7" is version 1.
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    const std::string_view group = std::string_view(line).substr(second + 1);
    if (controllers.empty()) {
      usable = lowest_limit(mount, group, "memory.max", usable);
    } else if (has_memory(controllers)) {
      usable = lowest_limit(mount / "memory", group, "memory.limit_in_bytes", usable);
    }
  }
  return usable;
}

}  // namespace herring
