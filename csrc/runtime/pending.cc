#include "runtime/pending.h"

#include <algorithm>
#include <utility>

#include "core/status.h"

namespace herring::runtime {

void DriverSeat::drive(const Work& work, Instant deadline) {
  // Longer than a turn takes. A progress thread that sleeps does not hear of it, and wakes up for the work itself.
  constexpr Duration kPatience = std::chrono::microseconds(100);
  const Instant patience = std::min(deadline, std::chrono::steady_clock::now() + kPatience);
  wanted_.fetch_add(1, std::memory_order_acq_rel);
  do {
    const std::unique_lock seat(mutex_, std::try_to_lock);
    if (seat.owns_lock()) {
      wanted_.fetch_sub(1, std::memory_order_acq_rel);
      if (driver_ == nullptr) return;
      is_visited_.store(true, std::memory_order_release);
      driver_->drive(work, deadline);
      visited_until_.store(std::chrono::steady_clock::now(), std::memory_order_release);
      is_visited_.store(false, std::memory_order_release);
      return;
    }
    if (core_share_.is_wanted(std::chrono::steady_clock::now())) break;
    yield(core_share_);
  } while (!work.is_done() && std::chrono::steady_clock::now() < patience);
  wanted_.fetch_sub(1, std::memory_order_acq_rel);
  unpark();  // Whoever has the seat may be about to leave it, with the work not yet looked at.
}

bool DriverSeat::park(Duration limit) {
  std::unique_lock lock(park_mutex_);
  park_changed_.wait_for(lock, limit, [this] { return unparked_; });
  return std::exchange(unparked_, false);
}

void DriverSeat::unpark() {
  {
    const std::scoped_lock lock(park_mutex_);
    unparked_ = true;
  }
  park_changed_.notify_one();
}

bool PendingWork::wait(Instant deadline) {
  if (is_done()) return true;
  if (seat_) {
    seat_->drive(*this, deadline);
    if (is_done()) return true;
  }
  std::unique_lock lock(mutex_);
  if (deadline == Instant::max()) {
    changed_.wait(lock, [this] { return is_done(); });
    return true;
  }
  return changed_.wait_until(lock, deadline, [this] { return is_done(); });
}

Status PendingWork::status() const {
  const std::scoped_lock lock(mutex_);
  return status_;
}

std::vector<std::uint32_t> PendingWork::contributors() const {
  const std::scoped_lock lock(mutex_);
  return contributors_;
}

void PendingWork::set_contributors(std::vector<std::uint32_t> contributors) {
  const std::scoped_lock lock(mutex_);
  contributors_ = std::move(contributors);
}

void PendingWork::on_done(std::function<void(const Status&)> callback) {
  {
    const std::scoped_lock lock(mutex_);
    if (!is_done()) {
      on_done_.push_back(std::move(callback));
      return;
    }
  }
  callbacks_->run([callback = std::move(callback), status = this->status()] { callback(status); });
}

void PendingWork::complete(const Status& status) {
  std::vector<std::function<void(const Status&)>> callbacks;
  {
    const std::scoped_lock lock(mutex_);
    if (is_done()) return;
    status_ = status;
    done_.store(true, std::memory_order_release);
    callbacks.swap(on_done_);
  }
  changed_.notify_all();
  for (auto& callback : callbacks) {
    callbacks_->run([callback = std::move(callback), status] { callback(status); });
  }
}

}  // namespace herring::runtime
