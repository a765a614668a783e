#include "executor.h"

#include <pthread.h>

#include <chrono>
#include <utility>

namespace herring::torch_binding {
namespace {

constexpr std::chrono::seconds kIdleFor{1};
/// Which executor the current thread belongs to: its destructor must not wait for the thread that runs it.
thread_local const void* current_executor = nullptr;

}  // namespace

Executor::~Executor() {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->wake.notify_all();
  const std::size_t own = current_executor == state_.get() ? 1 : 0;
  state_->ended.wait(lock, [&] { return state_->threads <= own; });
}

void Executor::post(std::function<void()> task) {
  std::unique_lock lock(state_->mutex);
  state_->tasks.push_back(std::move(task));
  if (state_->idle >= state_->tasks.size() || state_->threads >= kMaxThreads) {
    state_->wake.notify_one();
    return;
  }
  ++state_->threads;
  lock.unlock();
  // Detached: the state counts it, and the destructor waits for the count.
  std::thread([state = state_] { run(state); }).detach();
}

void Executor::run(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "herring-future");
  current_executor = state.get();
  std::unique_lock lock(state->mutex);
  for (;;) {
    if (state->tasks.empty()) {
      if (state->stopping) break;
      ++state->idle;
      const bool woken = state->wake.wait_for(lock, kIdleFor, [&] { return state->stopping || !state->tasks.empty(); });
      --state->idle;
      if (!woken) break;
      continue;
    }
    {
      const std::function<void()> task = std::move(state->tasks.front());
      state->tasks.pop_front();
      lock.unlock();
      task();
    }
    lock.lock();
  }
  --state->threads;
  state->ended.notify_all();
}

}  // namespace herring::torch_binding
