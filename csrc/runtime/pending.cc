#include "runtime/pending.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "core/status.h"
#include "core/thread.h"

namespace herring::runtime {

struct CallbackPool::State {
  std::size_t max_threads = 0;
  std::mutex mutex;
  std::condition_variable changed;          // there is a task, or no more will come
  std::condition_variable quiet;            // few run, and none wait
  std::deque<std::function<void()>> tasks;  // guarded by mutex, as all below
  std::size_t idle = 0;
  std::size_t busy = 0;  // threads inside a task
  bool stopping = false;
};

CallbackPool::CallbackPool(std::size_t max_threads) : state_(std::make_shared<State>()) {
  state_->max_threads = max_threads;
  threads_.push_back(start_thread("herring-callbk", [state = state_] { loop(state); }));
}

CallbackPool::~CallbackPool() {
  {
    const std::scoped_lock lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  for (std::thread& thread : threads_) {
    // The last reference may go away inside a callback, and a thread cannot join itself; it keeps the state alive.
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void CallbackPool::run(std::function<void()> task) {
  {
    const std::scoped_lock lock(state_->mutex);
    if (!state_->stopping) {
      state_->tasks.push_back(std::move(task));
      if (state_->tasks.size() > state_->idle && threads_.size() < state_->max_threads) {
        try {
          threads_.push_back(start_thread("herring-callbk", [state = state_] { loop(state); }));
        } catch (const Error&) {
          // No more to be had: those that there are run it when they come to it.
        }
      }
      state_->changed.notify_one();
      return;
    }
  }
  task();
}

bool CallbackPool::close(Instant deadline) {
  std::unique_lock lock(state_->mutex);
  const bool inside = std::any_of(threads_.begin(), threads_.end(), [](const std::thread& thread) {
    return thread.get_id() == std::this_thread::get_id();
  });
  const std::size_t mine = inside ? 1 : 0;
  const bool ended =
      state_->quiet.wait_until(lock, deadline, [&] { return state_->tasks.empty() && state_->busy == mine; });
  state_->stopping = true;
  std::vector<std::thread> others;
  for (std::thread& thread : threads_) {
    if (ended && thread.get_id() != std::this_thread::get_id()) others.push_back(std::move(thread));
  }
  std::erase_if(threads_, [](const std::thread& thread) { return !thread.joinable(); });
  lock.unlock();
  state_->changed.notify_all();
  for (std::thread& thread : others) thread.join();
  return ended;
}

void CallbackPool::loop(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (true) {
    ++state->idle;
    state->changed.wait(lock, [&] { return state->stopping || !state->tasks.empty(); });
    --state->idle;
    if (state->tasks.empty()) return;
    std::function<void()> task = std::move(state->tasks.front());
    state->tasks.pop_front();
    ++state->busy;
    lock.unlock();
    task();
    task = nullptr;  // Whatever it holds is released outside the lock.
    lock.lock();
    if (--state->busy <= 1) state->quiet.notify_all();
  }
}

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
