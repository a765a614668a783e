#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace herring::tensorflow_binding {

/// Threads for what would hold up TensorFlow's own: as many as wait at the same time, kept for a while for the next.
class WaitingThreads final {
 public:
  static WaitingThreads& instance();

  /// Runs it beside all others; here, where the system gives no thread.
  void run(std::function<void()> task);

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  std::size_t idle_ = 0;                     // guarded by mutex_
};

}  // namespace herring::tensorflow_binding
