#include "bindings/tensorflow/pending.h"

#include <unistd.h>

#include <numeric>
#include <utility>

namespace herring::tensorflow_binding {
namespace {

/// The one of 2^31 others before is over.
Number number_of(std::uint64_t count) { return static_cast<Number>(count & 0x7FFF'FFFF); }

}  // namespace

Process& Process::instance() {
  static Process* const process = new Process;  // Never freed: kernels may run while the process exits.
  return *process;
}

void Process::attach(const std::shared_ptr<runtime::Communicator>& job, Duration limit) {
  auto pinned = std::make_shared<runtime::PinnedMemory>(job);
  {
    const std::lock_guard lock(mutex_);
    job_ = job;
    pinned_.swap(pinned);
    limit_ = limit;
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
  std::unordered_map<Number, std::shared_ptr<Pending>> old;
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

Duration Process::limit() const {
  const std::lock_guard lock(mutex_);
  return limit_;
}

std::shared_ptr<runtime::PinnedMemory> Process::pinned_memory() const {
  const std::lock_guard lock(mutex_);
  if (!pinned_) throw Error(Code::kShutdown, "this process has not joined a job");
  return pinned_;
}

Number Process::begin_call() {
  const auto now = job();
  std::shared_ptr<void> may_call = now ? now->will_call() : nullptr;
  const std::lock_guard lock(mutex_);
  const Number call = number_of(++last_call_);
  calls_.insert_or_assign(call, std::move(may_call));
  return call;
}

void Process::end_call(Number call) {
  const std::lock_guard lock(mutex_);
  calls_.erase(call);
}

void Process::give_up_call(Number call) {
  std::vector<std::shared_ptr<Pending>> gone;
  {
    const std::lock_guard lock(mutex_);
    calls_.erase(call);
    std::erase_if(pending_, [&](auto& each) {
      if (each.second->call != call) return false;
      gone.push_back(std::move(each.second));
      return true;
    });
  }
  for (const auto& pending : gone) drop(pending);
}

Number Process::add(std::shared_ptr<Pending> pending) {
  std::unique_lock lock(mutex_);
  const Number number = number_of(++last_);
  pending->place = last_;
  if (calls_.contains(pending->call)) {
    pending_.emplace(number, std::move(pending));
  } else {
    lock.unlock();
    drop(pending);
  }
  return number;
}

std::shared_ptr<Pending> Process::take(Number handle) {
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
