#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime/callback_pool.h"
#include "runtime/core_share.h"
#include "runtime/runtime.h"
#include "runtime/wait_table.h"

namespace herring::runtime {

/// What moves data, one thread at a time.
class Driver {
 public:
  virtual ~Driver() = default;
  /// Moves data until the work is done, the deadline, or the end of the runtime. The caller holds the seat.
  virtual void drive(const Work& work, Instant deadline) = 0;
};

/// The place of the thread that moves data: the progress thread's, or that of a thread that waits for an operation
/// anyway, which saves waking another thread and being woken by it. Outlives the driver.
class DriverSeat final {
 public:
  explicit DriverSeat(Driver* driver) : driver_(driver) {}

  /// Takes the seat, which the progress thread leaves where it is awake, and drives until the work is done or the
  /// deadline. Else sees to it that the progress thread looks after the work.
  void drive(const Work& work, Instant deadline);
  /// Runs `action` in the seat where that is free, and its driver lives; false where not.
  template <class Action>
  bool use(const Action& action) {
    const std::unique_lock seat(mutex_, std::try_to_lock);
    if (!seat.owns_lock() || driver_ == nullptr) return false;
    action();
    return true;
  }
  /// The progress thread: somebody who waits anyway would rather drive.
  bool is_wanted() const { return wanted_.load(std::memory_order_acquire) > 0; }
  /// Of all threads that take this seat, or would like to.
  CoreShare& core_share() { return core_share_; }

  /// The progress thread: holds the seat while the lock lives.
  std::unique_lock<std::mutex> take() { return std::unique_lock(mutex_); }
  /// The progress thread, without the seat: true when unparked, false after `limit`.
  bool park(Duration limit);
  /// A thread that waits drives now, or has done so within `span`.
  bool is_visited(Duration span) const {
    return is_visited_.load(std::memory_order_acquire) ||
           std::chrono::steady_clock::now() - visited_until_.load(std::memory_order_acquire) < span;
  }
  void unpark();
  /// The driver ends or wants no others in its seat. The caller holds the seat or is alone.
  void close() { driver_ = nullptr; }

 private:
  std::mutex mutex_;
  Driver* driver_;  // guarded by mutex_
  std::atomic<bool> is_visited_{false};
  std::atomic<Instant> visited_until_{Instant{}};
  std::atomic<int> wanted_{0};
  CoreShare core_share_;
  std::mutex park_mutex_;
  std::condition_variable park_changed_;
  bool unparked_ = false;  // guarded by park_mutex_
};

/// The Work behind every submit. Shared: who completes it holds a reference.
class PendingWork final : public Work {
 public:
  explicit PendingWork(std::shared_ptr<CallbackPool> callbacks, std::shared_ptr<DriverSeat> seat = nullptr,
                       std::shared_ptr<WaitTable> waits = nullptr)
      : callbacks_(std::move(callbacks)), seat_(std::move(seat)), waits_(std::move(waits)) {}

  bool is_done() const override { return done_.load(std::memory_order_acquire); }
  bool wait(Instant deadline) override;
  std::shared_ptr<void> block(bool from_pool) override { return waits_ ? waits_->enter(*this, from_pool) : nullptr; }
  Status status() const override;
  void on_done(std::function<void(const Status&)> callback) override;

  std::vector<std::uint32_t> contributors() const override;
  /// Before complete().
  void set_contributors(std::vector<std::uint32_t> contributors);

  /// The first call wins; later ones are ignored.
  void complete(const Status& status);

 private:
  std::shared_ptr<CallbackPool> callbacks_;
  std::shared_ptr<DriverSeat> seat_;  // null: waiting threads only wait
  std::shared_ptr<WaitTable> waits_;  // null: nobody asks who waits
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Status status_;                                            // guarded by mutex_ until done_
  std::vector<std::uint32_t> contributors_;                  // guarded by mutex_
  std::vector<std::function<void(const Status&)>> on_done_;  // guarded by mutex_
};

}  // namespace herring::runtime
