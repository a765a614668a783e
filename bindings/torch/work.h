#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "runtime/communicator.h"

namespace herring::torch_binding {

/// One step of a collective: the runtime's operations that it waits for, then what is done with their results on this
/// rank (copy back to memory that the runtime could not use directly), which may ask for another step. Nothing is
/// submitted while a step is put together, so an argument may be refused at any point of it.
struct Step {
  std::vector<runtime::Request> requests;
  std::vector<runtime::Receive> receives;
  std::vector<runtime::Send> sends;
  /// Runs once, after all of them ended well; holds on to the tensors that they borrow. An empty result is the end.
  std::function<Step()> then;

  bool is_empty() const { return requests.empty() && receives.empty() && sends.empty() && !then; }
};

/// What a collective is, for its Work.
struct WorkInfo {
  int rank = -1;
  c10d::OpType op_type = c10d::OpType::UNKNOWN;
  const char* title = nullptr;           ///< "herring:all_reduce"; static.
  std::uint64_t sequence = 0;            ///< Number in the group.
  std::chrono::milliseconds timeout{0};  ///< The runtime ends the operation by then.
  std::vector<at::Tensor> inputs;        ///< For the profiler, and kept alive until the end.
  std::vector<at::Tensor> outputs;       ///< What the future and result() give.
  bool is_async = true;                  ///< False: the caller will only wait.
  std::shared_ptr<void> ticket;          ///< Dropped when the operation ends.
};

/// A collective as torch sees it. Ends once. The memory that the runtime borrowed is referenced until then, also when
/// the caller drops the Work.
///
/// Who finishes it: the runtime's callback threads, a caller in wait(), or one that asks isCompleted(), whichever comes
/// first. So a wait depends on no thread that a user's callback may have blocked; and a synchronous call, which only
/// waits, wakes no other thread. Callbacks of the future run on the thread that finishes the Work.
class Work final : public c10d::Work {
 public:
  /// Submits `first`. Use this, not the constructor.
  static c10::intrusive_ptr<Work> start(WorkInfo info, Step first, std::shared_ptr<runtime::Communicator> runtime);
  Work(WorkInfo info, std::shared_ptr<runtime::Communicator> runtime);
  ~Work() override;

  bool isCompleted() override;
  /// Blocks at most `timeout` (none given: until the operation's own deadline, which the runtime keeps). Throws what
  /// the operation failed with; DistBackendError when `timeout` passes first, in which case the operation goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override;
  /// Of a receive: the rank in the group that sent. Throws before its end.
  int sourceRank() const override;
  std::uint64_t getSequencenumber() const override { return info_.sequence; }
  /// The first of its operations that has not ended.
  runtime::Awaited awaited() const;

 private:
  using Parts = std::vector<std::shared_ptr<runtime::Work>>;

  /// Submits `step` and makes it the current one.
  void enter(Step step);
  /// From now on the runtime's callback threads finish this Work where nobody else does.
  void watch();
  /// Asks the operations of step `number` to call back.
  void watch_step(const Parts& parts, std::uint64_t number);
  /// Ends step `number` where nobody has yet. All of its parts are done.
  void advance(std::uint64_t number);
  void end(std::exception_ptr error);
  void complete_future();
  /// One look at the current step: helps it to its end, or waits for whoever does. False at the deadline.
  /// `blocks`: the deadline is later than the operations' own.
  bool wait_for_step(Instant deadline, bool blocks);
  [[noreturn]] void throw_wait_timed_out(std::chrono::milliseconds timeout) const;

  WorkInfo info_;
  const std::shared_ptr<runtime::Communicator> runtime_;
  const at::ThreadLocalState caller_state_;  ///< Profiler, grad and inference mode of the caller.
  // Guarded by mutex_ (c10d::Work's):
  Parts parts_;                                    ///< Of the current step.
  std::function<Step()> then_;                     ///< Of the current step.
  std::shared_ptr<runtime::ReceiveWork> receive_;  ///< Of a step with one receive.
  std::uint64_t step_number_ = 0;
  std::uint64_t advanced_ = 0;  ///< Steps up to this number have been claimed by a thread that ends them.
  bool watched_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_claimed_ = false;
};

/// Several operations as one: what a coalescing manager waits for.
class CoalescedWork final : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works) : works_(std::move(works)) {}
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// Waits for all of them, `timeout` for each; throws what the first that failed threw.
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

/// What a failed operation throws: DistBackendError "herring: <title>: <status>".
std::exception_ptr to_exception(const char* title, const Status& status);

}  // namespace herring::torch_binding
