#include "bindings/tensorflow/pending.h"

#include <unistd.h>

#include <utility>

namespace herring::tensorflow_binding {

Process& Process::instance() {
  static Process* const process = new Process;  // Never freed: kernels may run while the process exits.
  return *process;
}

void Process::attach(const std::shared_ptr<runtime::Communicator>& job) {
  std::unordered_map<std::int64_t, std::shared_ptr<Pending>> old;
  {
    const std::lock_guard lock(mutex_);
    job_ = job;
    pid_ = ::getpid();
    old.swap(pending_);
  }
  for (auto& [handle, pending] : old) drop(std::move(pending));
}

std::shared_ptr<runtime::Communicator> Process::job() const {
  const std::lock_guard lock(mutex_);
  return pid_ == ::getpid() ? job_.lock() : nullptr;
}

std::int64_t Process::add(std::shared_ptr<Pending> pending) {
  const std::lock_guard lock(mutex_);
  pending_.emplace(++last_, std::move(pending));
  return last_;
}

std::shared_ptr<Pending> Process::take(std::int64_t handle) {
  const std::lock_guard lock(mutex_);
  const auto found = pending_.find(handle);
  if (found == pending_.end()) return nullptr;
  std::shared_ptr<Pending> pending = std::move(found->second);
  pending_.erase(found);
  return pending;
}

std::size_t Process::size() const {
  const std::lock_guard lock(mutex_);
  return pending_.size();
}

}  // namespace herring::tensorflow_binding
