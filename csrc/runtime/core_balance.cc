#include "runtime/core_balance.h"

#include <algorithm>
#include <chrono>

namespace herring::runtime {
namespace {

using intra_node::kNoCore;

constexpr std::uint32_t kCrowdedLooks = 8;                // Not for who only passes by.
constexpr Duration kRest = std::chrono::milliseconds(1);  // A move costs some microseconds.

std::int64_t count_on(std::span<const std::uint32_t> cores, std::uint32_t core) {
  return std::ranges::count(cores, core);
}

std::uint32_t first_of(const cpu_set_t& set) {
  std::uint32_t core = 0;
  while (!CPU_ISSET(core, &set)) ++core;
  return core;
}

}  // namespace

cpu_set_t roomier_cores(std::span<const std::uint32_t> cores, std::uint32_t mine, const cpu_set_t& allowed) {
  cpu_set_t roomier;
  CPU_ZERO(&roomier);
  std::int64_t fewest = count_on(cores, mine) - 2;
  for (std::uint32_t core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    const std::int64_t ranks = count_on(cores, core);
    if (ranks > fewest) continue;
    if (ranks < fewest) CPU_ZERO(&roomier);
    fewest = ranks;
    CPU_SET(core, &roomier);
  }
  return roomier;
}

bool CoreBalance::on_wait() {
  if (!say_where() || !is_crowded()) {
    crowded_ = 0;
    return false;
  }
  if (++crowded_ < kCrowdedLooks) return true;
  crowded_ = 0;
  const Instant now = std::chrono::steady_clock::now();
  if (now < rest_until_) return true;
  rest_until_ = now + kRest;
  move();
  return true;
}

bool CoreBalance::say_where() {
  const int core = sched_getcpu();
  if (core < 0) return false;
  if (static_cast<std::uint32_t>(core) == mine_) return true;
  mine_ = static_cast<std::uint32_t>(core);
  neighborhood_.set_core(mine_);
  return true;
}

bool CoreBalance::is_crowded() {
  cores_.resize(neighborhood_.size());
  for (std::uint32_t rank = 0; rank < cores_.size(); ++rank) cores_[rank] = neighborhood_.core_of(rank);
  return count_on(cores_, mine_) > 1;
}

void CoreBalance::move() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  const cpu_set_t roomier = roomier_cores(cores_, mine_, allowed);
  if (CPU_COUNT(&roomier) == 0) return;
  // Said before this thread runs there, which takes a while: who is left behind would follow.
  mine_ = first_of(roomier);
  neighborhood_.set_core(mine_);
  if (sched_setaffinity(0, sizeof(roomier), &roomier) == 0) {
    sched_setaffinity(0, sizeof(allowed), &allowed);
    ++moves_;
  }
  say_where();
}

}  // namespace herring::runtime
