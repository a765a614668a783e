#include "core/process.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
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

std::int32_t process_id() noexcept {
  static std::atomic<std::int32_t>* const kept = wiped_on_fork();
  if (kept == nullptr) return getpid();
  std::int32_t id = kept->load(std::memory_order_relaxed);
  if (id == 0) {
    id = getpid();
    kept->store(id, std::memory_order_relaxed);
  }
  return id;
}

}  // namespace herring
