#include "runtime/lane_thread.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "core/short_turns.h"
#include "core/thread.h"

namespace herring::runtime {
namespace {

constexpr Duration kIdleWait = std::chrono::seconds(1);

}  // namespace

bool wants_lane_threads(const Config& config, std::size_t workers_on_host) {
  constexpr std::size_t kCoresPerWorker = 4;
  if (config.lane_threads != Switch::kAuto) return config.lane_threads == Switch::kOn;
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return true;
  return static_cast<std::size_t>(CPU_COUNT(&cores)) >= kCoresPerWorker * workers_on_host;
}

LaneThread::LaneThread(Lane& lane, Duration spin, Duration slice)
    : lane_(lane), thread_(start_thread("herring-lane", [this, spin, slice] { loop(spin, slice); })) {}

LaneThread::~LaneThread() {
  stop_.store(true, std::memory_order_release);
  lane_.wake();
  thread_.join();
}

std::vector<std::unique_ptr<LaneThread>> start_lane_threads(const Config& config,
                                                            std::span<const std::unique_ptr<Lane>> lanes) {
  const Duration spin = std::chrono::microseconds(config.spin_us);
  const Duration slice = std::chrono::microseconds(config.slice_us);
  std::vector<std::unique_ptr<LaneThread>> threads;
  for (const auto& lane : lanes) threads.push_back(std::make_unique<LaneThread>(*lane, spin, slice));
  return threads;
}

void LaneThread::loop(Duration spin, Duration slice) {
  const ShortTurns turns(slice);
  Instant busy_until{};
  while (!stop_.load(std::memory_order_acquire)) {
    const Instant now = std::chrono::steady_clock::now();
    if (lane_.turn(now)) {
      busy_until = now + spin;
    } else if (now >= busy_until) {
      lane_.publish(now);
      lane_.wait(std::min(lane_.next_deadline(), now + kIdleWait));
    }
  }
  lane_.publish(std::chrono::steady_clock::now());
}

}  // namespace herring::runtime
