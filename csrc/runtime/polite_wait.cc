#include "runtime/polite_wait.h"

#include <sched.h>

#include <cstddef>

namespace herring::runtime {

PoliteWait::PoliteWait(CoreShare& share, intra_node::Neighborhood* neighborhood) : share_(share) {
  if (neighborhood == nullptr) return;
  balance_.emplace(*neighborhood);
  cpu_set_t cores;
  shares_cores_ = sched_getaffinity(0, sizeof(cores), &cores) != 0 ||
                  neighborhood->size() > static_cast<std::size_t>(CPU_COUNT(&cores));
}

bool PoliteWait::yield(Instant now) {
  // Other ranks come back in time, whatever they do there.
  if (balance_ && balance_->on_wait()) {
    sched_yield();
    return true;
  }
  if (share_.is_wanted(now)) return false;
  runtime::yield(share_);
  return true;
}

}  // namespace herring::runtime
