#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "core/types.h"

namespace herring::runtime {

/// Runs callbacks off the threads that move data. A callback may block on another operation, whose own callback must
/// still run: so a task never waits behind a blocked one; another thread is started instead, up to max_threads.
class CallbackPool final {
 public:
  explicit CallbackPool(std::size_t max_threads = 64);
  ~CallbackPool();  ///< Runs what is queued, then joins. May itself run inside a callback.
  CallbackPool(const CallbackPool&) = delete;
  CallbackPool& operator=(const CallbackPool&) = delete;

  /// After close(): on the calling thread.
  void run(std::function<void()> task);
  /// Returns when nothing is queued or runs any more (but what calls it, if that is a task), or false at the deadline.
  /// For a language whose interpreter may end afterwards, and must not be entered then.
  bool close(Instant deadline);

 private:
  struct State;
  static void loop(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // shared with the threads
  std::vector<std::thread> threads_;
};

}  // namespace herring::runtime
