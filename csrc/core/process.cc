#include "core/process.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace herring {
namespace {

/// A page that is zero in a fork()ed child; null where the kernel cannot do that. Never unmapped: it may be asked for
/// until the very end of the process.
std::atomic<std::int32_t>* wiped_on_fork() noexcept {
  constexpr std::size_t kPageBytes = 4096;
  void* page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return nullptr;
  if (madvise(page, kPageBytes, MADV_WIPEONFORK) != 0) {
    munmap(page, kPageBytes);
    return nullptr;
  }
  return new (page) std::atomic<std::int32_t>(0);
}

}  // namespace

namespace internal {

constinit std::atomic<std::atomic<std::int32_t>*> kept_process_id = nullptr;

std::int32_t find_process_id() noexcept {
  static std::atomic<std::int32_t>* const kept = wiped_on_fork();
  const std::int32_t id = getpid();
  if (kept == nullptr) return id;
  kept->store(id, std::memory_order_relaxed);
  kept_process_id.store(kept, std::memory_order_release);
  return id;
}

}  // namespace internal
}  // namespace herring
