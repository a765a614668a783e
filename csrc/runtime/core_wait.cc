#include "runtime/core_wait.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>

namespace herring::runtime {

Duration waited_for_core() {
  const int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  char text[96];
  const ssize_t length = read(fd, text, sizeof(text));
  close(fd);
  // Three numbers: ns on a core, ns of waiting for one, turns.
  const char* const end = text + std::max<ssize_t>(length, 0);
  const char* const second = std::find(static_cast<const char*>(text), end, ' ');
  std::uint64_t waited = 0;
  if (second != end) std::from_chars(second + 1, end, waited);
  return std::chrono::nanoseconds(waited);
}

bool CoreWait::look(Instant now) {
  const bool went_on = now - looked_ < kPeriod;  // Else it had nothing to do meanwhile.
  looked_ = now;
  if (went_on && now - measured_ < kPeriod) return false;
  const auto thread = static_cast<pid_t>(syscall(SYS_gettid));
  const Duration waited = waited_for_core();
  const bool is_new = went_on && thread == thread_;
  if (is_new) measured(now - measured_, waited - waited_);
  thread_ = thread;
  measured_ = now;
  waited_ = waited;
  return is_new;
}

void CoreWait::measured(Duration time, Duration waited) {
  const double share =
      static_cast<double>(waited.count()) / static_cast<double>(std::max<Duration::rep>(time.count(), 1));
  share_ += kWeight * (std::clamp(share, 0.0, 1.0) - share_);
}

}  // namespace herring::runtime
