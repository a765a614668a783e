#include "bindings/tensorflow/pending.h"

#include <unistd.h>

#include <numeric>
#include <utility>

namespace herring::tensorflow_binding {

Process& Process::instance() {
  static Process* const process = new Process;  // Never freed: kernels may run while the process exits.
  return *process;
}

void Process::attach(const std::shared_ptr<runtime::Communicator>& job) {
  {
    const std::lock_guard lock(mutex_);
    job_ = job;
    pid_ = ::getpid();
    local_.reset();
  }
  begin_again();
}

void Process::begin_again() {
  {
    const std::lock_guard lock(mutex_);
    groups_.clear();
    calls_.clear();
  }
  keys_.clear();
  let_go_of_pending();
}

void Process::let_go_of_pending() {
  std::unordered_map<std::int64_t, std::shared_ptr<Pending>> old;
  {
    const std::lock_guard lock(mutex_);
    old.swap(pending_);
  }
  for (const auto& [handle, pending] : old) drop(pending);
}

void Process::set_group(std::uint32_t group, std::vector<std::uint32_t> ranks) {
  const std::lock_guard lock(mutex_);
  groups_[group] = std::move(ranks);
}

std::optional<std::vector<std::uint32_t>> Process::group(std::uint32_t group) const {
  const auto now = job();
  const std::lock_guard lock(mutex_);
  if (const auto found = groups_.find(group); found != groups_.end()) return found->second;
  if (group != 0 || !now) return std::nullopt;
  std::vector<std::uint32_t> all(now->size());
  std::iota(all.begin(), all.end(), 0u);
  return all;
}

void Process::set_local(std::uint32_t rank, std::uint32_t size) {
  const std::lock_guard lock(mutex_);
  local_ = {rank, size};
}

std::optional<std::pair<std::uint32_t, std::uint32_t>> Process::local() const {
  const std::lock_guard lock(mutex_);
  return local_;
}

std::shared_ptr<runtime::Communicator> Process::job() const {
  const std::lock_guard lock(mutex_);
  return pid_ == ::getpid() ? job_.lock() : nullptr;
}

std::int64_t Process::begin_call() {
  const auto now = job();
  std::shared_ptr<void> may_call = now ? now->will_call() : nullptr;
  const std::lock_guard lock(mutex_);
  if (may_call) calls_.emplace(++last_call_, std::move(may_call));
  return last_call_;
}

void Process::end_call(std::int64_t call) {
  const std::lock_guard lock(mutex_);
  calls_.erase(call);
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
