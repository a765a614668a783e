#include "runtime/poll.h"

#include <poll.h>

#include <algorithm>
#include <ctime>
#include <vector>

namespace herring::runtime {

void poll_until(Instant deadline, std::span<const int> descriptors) {
  std::vector<pollfd> polled;
  for (const int descriptor : descriptors) polled.push_back({descriptor, POLLIN, 0});
  const Duration left = std::max(deadline - std::chrono::steady_clock::now(), Duration::zero());
  const timespec timeout{static_cast<time_t>(left.count() / 1'000'000'000),
                         static_cast<long>(left.count() % 1'000'000'000)};
  ppoll(polled.data(), polled.size(), &timeout, nullptr);
}

}  // namespace herring::runtime
