#include "efa/signals.h"

#include <link.h>

#include <cstdint>
#include <cstring>

namespace herring::efa {
namespace {

using Action = struct sigaction;

void* handler_of(const Action& action) noexcept {
  if ((action.sa_flags & SA_SIGINFO) != 0) return reinterpret_cast<void*>(action.sa_sigaction);
  return reinterpret_cast<void*>(action.sa_handler);
}

bool same(const Action& a, const Action& b) noexcept {
  // The C library sets SA_RESTORER by itself in whatever goes through it.
  constexpr int kRestorer = 0x04000000;
  return handler_of(a) == handler_of(b) && (a.sa_flags & ~kRestorer) == (b.sa_flags & ~kRestorer) &&
         std::memcmp(&a.sa_mask, &b.sa_mask, NSIG / 8) == 0;
}

bool is_in(const dl_phdr_info& object, std::uintptr_t address) noexcept {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const auto& segment = object.dlpi_phdr[i];
    const std::uintptr_t begin = object.dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD && address >= begin && address - begin < segment.p_memsz) return true;
  }
  return false;
}

struct Search {
  std::uintptr_t handler = 0;
  std::uintptr_t own = 0;
  bool found_before_own = false;
};

/// Whether `action` runs code of an object that was loaded before the one that this function is in.
bool is_by_an_earlier_object(const Action& action) noexcept {
  Search search;
  search.handler = reinterpret_cast<std::uintptr_t>(handler_of(action));
  search.own = reinterpret_cast<std::uintptr_t>(&is_by_an_earlier_object);
  // Goes through the objects in the order in which they were loaded, until the answer is not 0.
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* argument) {
        auto& looked_for = *static_cast<Search*>(argument);
        if (is_in(*object, looked_for.own)) return 1;
        looked_for.found_before_own = is_in(*object, looked_for.handler);
        return looked_for.found_before_own ? 1 : 0;
      },
      &search);
  return search.found_before_own;
}

}  // namespace

SignalGuard::SignalGuard() noexcept {
  for (int number = 1; number < NSIG; ++number) {
    Saved& saved = saved_[static_cast<std::size_t>(number)];
    saved.is_known = sigaction(number, nullptr, &saved.action) == 0;
  }
}

SignalGuard::~SignalGuard() {
  for (int number = 1; number < NSIG; ++number) {
    const Saved& saved = saved_[static_cast<std::size_t>(number)];
    Action now{};
    if (!saved.is_known || sigaction(number, nullptr, &now) != 0 || same(now, saved.action)) continue;
    if (!is_by_an_earlier_object(now)) sigaction(number, &saved.action, nullptr);
  }
}

}  // namespace herring::efa
