#include "work.h"

#include <ATen/core/List.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

namespace herring::torch_binding {
namespace {

/// How much longer than an operation's own deadline a wait lasts: the runtime ends it with a reason, which is worth
/// more than ours.
constexpr std::chrono::seconds kVerdictGrace{60};
/// A wait that has lasted for so long may be one for ever.
constexpr std::chrono::milliseconds kAtOnce{100};

}  // namespace

std::exception_ptr to_exception(const char* title, const Status& status) {
  // In gloo's and NCCL's messages the word stands alone, and users' code looks for " timeout ".
  const std::string text = status.code() == Code::kTimeout ? c10::str(title, ": timeout (", status.message(), ")")
                                                           : c10::str(title, ": ", status.to_string());
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, text));
}

Work::Work(WorkInfo info, std::shared_ptr<runtime::Communicator> runtime)
    : c10d::Work(info.rank, info.op_type, info.title, info.inputs),
      info_(std::move(info)),
      runtime_(std::move(runtime)) {}

Work::~Work() {
  // A synchronous call that was left early (its wait timed out): the runtime still writes to the tensors.
  struct Kept {
    WorkInfo info;
    std::function<Step()> then;
  };
  if (parts_.empty()) return;
  const auto kept = std::make_shared<Kept>(Kept{std::move(info_), std::move(then_)});
  for (const std::shared_ptr<runtime::Work>& part : parts_) part->on_done([kept](const Status&) {});
}

c10::intrusive_ptr<Work> Work::start(WorkInfo info, Step first, std::shared_ptr<runtime::Communicator> runtime) {
  const bool is_async = info.is_async;
  auto work = c10::make_intrusive<Work>(std::move(info), std::move(runtime));
  work->enter(std::move(first));
  if (is_async) work->watch();
  return work;
}

void Work::enter(Step step) {
  Parts parts;
  for (const runtime::Request& request : step.requests) parts.push_back(runtime_->submit(request));
  // Receives first: a message that finds its receive waiting is not kept.
  std::shared_ptr<runtime::ReceiveWork> receive;
  for (const runtime::Receive& message : step.receives) parts.push_back(receive = runtime_->receive(message));
  for (const runtime::Send& message : step.sends) parts.push_back(runtime_->send(message));
  std::uint64_t number = 0;
  bool watched = false;
  {
    const std::lock_guard lock(mutex_);
    parts_ = parts;
    then_ = std::move(step.then);
    receive_ = std::move(receive);
    number = ++step_number_;
    watched = watched_;
  }
  cv_.notify_all();
  if (watched) watch_step(parts, number);
}

void Work::watch() {
  Parts parts;
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    if (watched_) return;
    watched_ = true;
    if (advanced_ >= step_number_) return;  // Whoever ends this step sees watched_ when it enters the next.
    parts = parts_;
    number = step_number_;
  }
  watch_step(parts, number);
}

void Work::watch_step(const Parts& parts, std::uint64_t number) {
  // Counted by the callbacks themselves: those of a step that a wait() ended may still be to come when the next one
  // runs.
  const auto left = std::make_shared<std::atomic<std::size_t>>(parts.size());
  for (const std::shared_ptr<runtime::Work>& part : parts) {
    // Holds this Work, and so the tensors, until the runtime lets go of their memory.
    part->on_done([self = c10::intrusive_ptr<Work>::unsafe_reclaim_from_nonowning(this), number, left](const Status&) {
      if (left->fetch_sub(1, std::memory_order_acq_rel) == 1) self->advance(number);
    });
  }
  if (parts.empty()) advance(number);
}

bool Work::isCompleted() {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    if (completed_) return true;
    if (advanced_ >= step_number_) return false;
    for (const std::shared_ptr<runtime::Work>& part : parts_) {
      if (!part->is_done()) return false;
    }
    number = step_number_;
  }
  advance(number);
  return c10d::Work::isCompleted();
}

void Work::advance(std::uint64_t number) {
  Parts parts;
  std::function<Step()> then;
  {
    const std::lock_guard lock(mutex_);
    if (advanced_ >= number) return;
    advanced_ = number;
    parts = std::exchange(parts_, {});
    then = std::exchange(then_, nullptr);
  }
  std::exception_ptr error;
  for (const std::shared_ptr<runtime::Work>& part : parts) {
    const Status status = part->status();
    if (!status.is_ok() && !error) error = to_exception(info_.title, status);
  }
  Step next;
  if (!error && then) {
    try {
      const at::ThreadLocalStateGuard state(caller_state_);
      next = then();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (!error && !next.is_empty()) {
    enter(std::move(next));
  } else {
    end(error);
  }
}

void Work::end(std::exception_ptr error) {
  const at::ThreadLocalStateGuard state(caller_state_);
  const std::shared_ptr<void> ticket = std::move(info_.ticket);
  finish(std::move(error));
  complete_future();
}

void Work::complete_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    if (!future_ || future_claimed_ || !completed_) return;
    future_claimed_ = true;
    future = future_;
    error = exception_;
  }
  const at::ThreadLocalStateGuard state(caller_state_);
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(info_.outputs));
  }
}

runtime::Awaited Work::awaited() const {
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<runtime::Work>& part : parts_) {
    if (!part->is_done()) return {part.get(), {}, part};
  }
  return {};
}

bool Work::wait_for_step(Instant deadline, bool blocks) {
  std::uint64_t number = 0;
  Parts parts;
  {
    std::unique_lock lock(mutex_);
    if (completed_) return true;
    number = step_number_;
    if (advanced_ >= number) {
      // Another thread is copying this step's results, or starting the next one.
      return cv_.wait_until(lock, deadline, [&] { return completed_ || step_number_ > number; });
    }
    parts = parts_;
  }
  for (const std::shared_ptr<runtime::Work>& part : parts) {
    const Instant soon = std::chrono::steady_clock::now() + kAtOnce;
    if (part->wait(std::min(deadline, soon))) continue;
    const std::shared_ptr<void> blocked = blocks ? part->block() : nullptr;
    if (!part->wait(deadline)) return false;
  }
  advance(number);
  return true;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  const bool own_deadline = timeout <= kNoTimeout;
  const std::chrono::milliseconds limit = own_deadline ? info_.timeout + kVerdictGrace : timeout;
  Instant deadline = std::chrono::steady_clock::now() + limit;
  while (!c10d::Work::isCompleted()) {
    if (!wait_for_step(deadline, own_deadline)) throw_wait_timed_out(limit);
    if (own_deadline) deadline = std::chrono::steady_clock::now() + limit;  // Each step has the time-out for itself.
  }
  // Whoever waited may look at the future next and expects it to be done.
  complete_future();
  std::exception_ptr error;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    error = exception_;
    future = future_;
  }
  if (future) future->wait();  // Short: somebody is marking it.
  if (error) std::rethrow_exception(error);
  return true;
}

void Work::throw_wait_timed_out(std::chrono::milliseconds timeout) const {
  C10_THROW_ERROR(DistBackendError, c10::str(info_.title, ": not done after waiting ", timeout.count(),
                                             " ms; the operation itself goes on until its own timeout of ",
                                             info_.timeout.count(), " ms"));
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool completed = false;
  {
    const std::lock_guard lock(mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
    future = future_;
    completed = completed_;
  }
  if (completed) {
    complete_future();
  } else {
    watch();
  }
  return future;
}

int Work::sourceRank() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(receive_ != nullptr && receive_->is_done(), info_.title,
              ": the source is known when a receive is done; wait() first");
  return static_cast<int>(receive_->received().source);
}

std::vector<at::Tensor> Work::result() {
  TORCH_CHECK(isCompleted(), info_.title, ": the result was asked for before the operation was done; wait() first");
  return info_.outputs;
}

bool CoalescedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (std::exception_ptr error = work->exception()) return error;
  }
  return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  std::exception_ptr first;
  for (const auto& work : works_) {
    try {
      work->wait(timeout);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures);
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    const std::vector<at::Tensor> each = work->result();
    all.insert(all.end(), each.begin(), each.end());
  }
  return all;
}

}  // namespace herring::torch_binding
