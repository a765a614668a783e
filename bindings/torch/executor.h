#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace herring::torch_binding {

/// Runs the callbacks that users attach to futures. A callback may block on another collective's future (PowerSGD
/// does), so a task never waits behind a running one: where every thread is busy another is started, up to kMaxThreads;
/// past that, tasks queue. Threads that find nothing to do for a second end.
///
/// Any thread may post. The destructor runs what is queued and joins; it must not hold the GIL (tasks may need it).
class Executor final {
 public:
  Executor() = default;
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Tasks must not throw.
  void post(std::function<void()> task);

 private:
  static constexpr std::size_t kMaxThreads = 64;

  /// Outlives the Executor where the last reference to it is dropped on one of its own threads.
  struct State {
    std::mutex mutex;
    std::condition_variable wake;
    std::condition_variable ended;
    std::deque<std::function<void()>> tasks;
    std::size_t threads = 0;
    std::size_t idle = 0;
    bool stopping = false;
  };
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace herring::torch_binding
