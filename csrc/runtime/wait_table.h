#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "core/types.h"
#include "runtime/communicator.h"

namespace herring::runtime {

/// Threads of this process that wait for operations and do nothing else before these end, and those that have been seen
/// to wait, so that it is known whether one is left that may call something. Safe from any thread.
class WaitTable final : public std::enable_shared_from_this<WaitTable> {
 public:
  /// `on_first` runs once, on the first thread that waits, before stop() returns. It may not call the table.
  explicit WaitTable(std::function<void()> on_first = {}) : on_first_(std::move(on_first)) {}

  /// The calling thread waits for `work` while the result lives. `from_pool`: it is one of a framework's pool, which
  /// runs what other threads ask for: such threads are not told apart, only counted.
  std::shared_ptr<void> enter(const Work& work, bool from_pool);
  /// The same, where `ask` says what it waits for at the time; on another thread, and not with the table's lock.
  std::shared_ptr<void> enter(std::function<Awaited()> ask, bool from_pool);
  /// The calling thread makes calls that it waits for.
  void know_thread();
  /// While the result lives this process may call something, whoever waits.
  std::shared_ptr<void> hold();

  /// What is waited for where all threads that are known to wait do so now: as many as ever did at once, and as many as
  /// there are of those that are told apart and still live. Else, and under hold(), none.
  struct Waits {
    std::vector<std::function<Awaited()>> asks;
    std::vector<std::uint64_t> numbers;  ///< Of each wait; never the same again.
  };
  Waits all_wait() const;
  /// Blocks until somebody waits; false after stop(). One thread alone calls it.
  bool wait_for_somebody();
  /// False after stop().
  bool sleep(Duration duration);
  void stop();

 private:
  struct Waiting {
    std::function<Awaited()> ask;
    std::uint64_t number = 0;
  };
  struct ThisThread;
  static ThisThread& this_thread();
  void forget_thread();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Waiting> waiting_;  // guarded by mutex_, as all below
  std::uint64_t last_number_ = 0;
  std::size_t most_at_once_ = 0;
  std::size_t threads_ = 0;
  std::size_t holders_ = 0;
  bool is_watched_for_ = false;  // wait_for_somebody() blocks
  bool stopped_ = false;
  std::function<void()> on_first_;
};

}  // namespace herring::runtime
