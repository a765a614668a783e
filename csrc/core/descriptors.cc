#include "core/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <optional>
#include <utility>

#include "core/status.h"

namespace herring {
namespace {

constexpr rlim_t kSpare = 16;  // For the rest of Herring; and a library that fails has given back what it had opened.

std::mutex mutex;
std::uint64_t claimed = 0;  // Guarded by mutex, as is the soft limit.

/// None where nobody knows; `all` where there is none left to look.
std::optional<rlim_t> count_open(rlim_t all) {
  DIR* const list = ::opendir("/proc/self/fd");
  if (list == nullptr) return errno == EMFILE ? std::optional(all) : std::nullopt;
  rlim_t open = 0;
  while (::readdir(list) != nullptr) ++open;
  ::closedir(list);
  return open - std::min<rlim_t>(open, 3);  // ".", ".." and the list's own.
}

}  // namespace

DescriptorClaim::DescriptorClaim(const std::string& what, std::uint64_t least, std::uint64_t most) {
  const std::scoped_lock lock(mutex);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  if (limit.rlim_max != RLIM_INFINITY) {
    const rlim_t open = count_open(limit.rlim_cur).value_or(0);
    if (open + least + kSpare > limit.rlim_max) {
      throw Error(Code::kUnavailable, what + " needs " + std::to_string(least) +
                                          " file descriptors for connections, and " + std::to_string(kSpare) +
                                          " for the rest. This process has " + std::to_string(open) +
                                          " open, and may have " + std::to_string(limit.rlim_max) +
                                          " in all: raise its hard limit (ulimit -Hn, LimitNOFILE= of a service)");
    }
  }
  count_ = most;
  claimed += most;
  const rlim_t needed = claimed + kOtherDescriptors;
  if (limit.rlim_cur >= needed) return;
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  static_cast<void>(::setrlimit(RLIMIT_NOFILE, &limit));
}

DescriptorClaim::~DescriptorClaim() {
  const std::scoped_lock lock(mutex);
  claimed -= count_;
}

DescriptorClaim::DescriptorClaim(DescriptorClaim&& other) noexcept : count_(std::exchange(other.count_, 0)) {}

DescriptorClaim& DescriptorClaim::operator=(DescriptorClaim&& other) noexcept {
  std::swap(count_, other.count_);
  return *this;
}

std::string descriptor_hint() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  const std::optional<rlim_t> open = count_open(limit.rlim_cur);
  if (!open || *open + kSpare < limit.rlim_cur) return {};
  return ". It has " + std::to_string(*open) + " of " + std::to_string(limit.rlim_cur) +
         " file descriptors open: raise the limit (ulimit -n)";
}

}  // namespace herring
