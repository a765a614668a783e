#pragma once

#include <sched.h>

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"
#include "intra_node/neighborhood.h"

namespace herring::runtime {

/// The cores of `allowed` that the fewest ranks are on, where these are at least two fewer than on core `mine`; else
/// none. `cores` has the core of each rank, this one's among them; unknown ones are kNoCore.
cpu_set_t roomier_cores(std::span<const std::uint32_t> cores, std::uint32_t mine, const cpu_set_t& allowed);

/// Ranks that wait for each other on one core take turns on it, and the scheduler may leave them there for
/// milliseconds, beside a core that has fewer of them. So a rank that waits tells the others which core it is on, and
/// goes to another where there is more room. What the calling thread may run on stays as it was. Used by one thread at
/// a time.
class CoreBalance final {
 public:
  explicit CoreBalance(intra_node::Neighborhood& neighborhood) : neighborhood_(neighborhood) {}

  /// While waiting, between two looks for what is waited for. True: another rank of the host is on this core.
  bool on_wait();
  std::uint64_t moves() const { return moves_; }

 private:
  bool say_where();
  bool is_crowded();
  void move();

  intra_node::Neighborhood& neighborhood_;
  std::vector<std::uint32_t> cores_;  // By local rank.
  std::uint32_t mine_ = intra_node::kNoCore;
  std::uint32_t crowded_ = 0;  // Looks in a row.
  Instant rest_until_{};
  std::uint64_t moves_ = 0;
};

}  // namespace herring::runtime
