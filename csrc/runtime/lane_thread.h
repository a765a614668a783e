#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "runtime/lane.h"

namespace herring::runtime {

/// Whether the lanes inside a worker get threads of their own: with few cores a lane's thread only takes turns with its
/// worker's, and each turn costs a wake-up.
bool wants_lane_threads(const Config& config, std::size_t workers_on_host);

/// Drives a lane from its constructor to its destructor.
class LaneThread final {
 public:
  /// `spin`: how long it polls before it blocks; `slice`: ShortTurns. The lane is open, and outlives it.
  LaneThread(Lane& lane, Duration spin, Duration slice);
  ~LaneThread();
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

 private:
  void loop(Duration spin, Duration slice);

  Lane& lane_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

std::vector<std::unique_ptr<LaneThread>> start_lane_threads(const Config& config,
                                                            std::span<const std::unique_ptr<Lane>> lanes);

}  // namespace herring::runtime
