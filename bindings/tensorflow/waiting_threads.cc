#include "bindings/tensorflow/waiting_threads.h"

#include <chrono>
#include <utility>

#include "core/status.h"
#include "core/thread.h"

namespace herring::tensorflow_binding {
namespace {

constexpr std::chrono::seconds kIdle{10};

}  // namespace

WaitingThreads& WaitingThreads::instance() {
  static WaitingThreads* const threads = new WaitingThreads;  // Never freed: they may wait while the process exits.
  return *threads;
}

void WaitingThreads::run(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() <= idle_) return changed_.notify_one();
  }
  try {
    start_thread("herring-tf-wait", [this] { loop(); }).detach();
  } catch (const Error&) {
    std::function<void()> mine;
    {
      const std::lock_guard lock(mutex_);
      if (tasks_.empty()) return;  // Another thread has become free meanwhile.
      mine = std::move(tasks_.back());
      tasks_.pop_back();
    }
    mine();
  }
}

void WaitingThreads::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    const bool has_task = changed_.wait_for(lock, kIdle, [this] { return !tasks_.empty(); });
    --idle_;
    if (!has_task) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace herring::tensorflow_binding
