#include "runtime/wait_table.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace herring::runtime {

/// Tells the table when its thread ends.
struct WaitTable::ThisThread {
  std::weak_ptr<WaitTable> table;
  const WaitTable* address = nullptr;  // of it; to compare only

  ~ThisThread() {
    if (const auto known = table.lock()) known->forget_thread();
  }
};

WaitTable::ThisThread& WaitTable::this_thread() {
  static thread_local ThisThread mark;
  return mark;
}

void WaitTable::know_thread() {
  ThisThread& thread = this_thread();
  // Where its table lives, another one cannot have the same address.
  if (thread.address == this && !thread.table.expired()) return;
  if (const auto other = thread.table.lock()) other->forget_thread();
  thread.table = weak_from_this();
  thread.address = this;
  const std::scoped_lock lock(mutex_);
  ++threads_;
}

void WaitTable::forget_thread() {
  const std::scoped_lock lock(mutex_);
  --threads_;
}

std::shared_ptr<void> WaitTable::enter(const Work& work, bool from_pool) {
  return enter([work = &work] { return Awaited{work, {}, {}}; }, from_pool);
}

std::shared_ptr<void> WaitTable::enter(std::function<Awaited()> ask, bool from_pool) {
  if (!from_pool) know_thread();
  std::list<Waiting> mine = {{std::move(ask), 0}};
  const auto place = mine.begin();
  {
    const std::scoped_lock lock(mutex_);
    place->number = ++last_number_;
    waiting_.splice(waiting_.end(), mine);
    most_at_once_ = std::max(most_at_once_, waiting_.size());
    if (is_watched_for_) changed_.notify_all();
    // With the lock held: after stop() whom it is for may be gone.
    if (!stopped_ && on_first_) std::exchange(on_first_, nullptr)();
  }
  return {this, [self = shared_from_this(), place](void*) {
            std::list<Waiting> gone;  // What it asks goes without the lock.
            const std::scoped_lock lock(self->mutex_);
            gone.splice(gone.end(), self->waiting_, place);
          }};
}

std::shared_ptr<void> WaitTable::hold() {
  {
    const std::scoped_lock lock(mutex_);
    ++holders_;
  }
  return {this, [self = shared_from_this()](void*) {
            const std::scoped_lock lock(self->mutex_);
            --self->holders_;
          }};
}

WaitTable::Waits WaitTable::all_wait() const {
  const std::scoped_lock lock(mutex_);
  if (holders_ > 0 || waiting_.size() < std::max(most_at_once_, threads_)) return {};
  Waits waits;
  for (const Waiting& each : waiting_) {
    waits.asks.push_back(each.ask);
    waits.numbers.push_back(each.number);
  }
  return waits;
}

bool WaitTable::wait_for_somebody() {
  std::unique_lock lock(mutex_);
  is_watched_for_ = true;
  changed_.wait(lock, [this] { return stopped_ || !waiting_.empty(); });
  is_watched_for_ = false;
  return !stopped_;
}

bool WaitTable::sleep(Duration duration) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, duration, [this] { return stopped_; });
  return !stopped_;
}

void WaitTable::stop() {
  {
    const std::scoped_lock lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
}

}  // namespace herring::runtime
