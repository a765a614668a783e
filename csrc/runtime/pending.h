#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"
#include "runtime/runtime.h"

namespace herring::runtime {

/// Runs callbacks off the progress thread. A callback may block on another operation, whose own callback must still
/// run: so a task never waits behind a blocked one; another thread is started instead, up to max_threads.
class CallbackPool final {
 public:
  explicit CallbackPool(std::size_t max_threads = 64);
  ~CallbackPool();  ///< Runs what is queued, then joins. May itself run inside a callback.
  CallbackPool(const CallbackPool&) = delete;
  CallbackPool& operator=(const CallbackPool&) = delete;

  void run(std::function<void()> task);

 private:
  struct State;
  static void loop(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // shared with the threads
  std::vector<std::thread> threads_;
};

/// The Work behind every submit.
class PendingWork final : public Work {
 public:
  explicit PendingWork(std::shared_ptr<CallbackPool> callbacks) : callbacks_(std::move(callbacks)) {}

  bool is_done() const override { return done_.load(std::memory_order_acquire); }
  bool wait(Instant deadline) override;
  Status status() const override;
  void on_done(std::function<void(const Status&)> callback) override;

  /// The first call wins; later ones are ignored.
  void complete(const Status& status);

 private:
  std::shared_ptr<CallbackPool> callbacks_;
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Status status_;                                            // guarded by mutex_ until done_
  std::vector<std::function<void(const Status&)>> on_done_;  // guarded by mutex_
};

}  // namespace herring::runtime
