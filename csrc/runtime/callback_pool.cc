#include "runtime/callback_pool.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
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

}  // namespace herring::runtime
