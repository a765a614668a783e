#include "bindings/tensorflow/waiting.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "bindings/tensorflow/composed.h"
#include "core/copy.h"

namespace herring::tensorflow_binding {
namespace {

/// The first of its current step that is not done.
std::shared_ptr<runtime::Work> unfinished(const Pending& pending) {
  const auto& works = pending.works;
  const auto work = std::find_if(works.begin(), works.end(), [](const auto& each) { return !each->is_done(); });
  return work == works.end() ? nullptr : *work;
}

}  // namespace

Waiting::Waiting(TF_OpKernelContext* context, std::optional<GpuStream> gpu) : context_(context), gpu_(gpu) {
  const TfStatus status = new_status();
  for (int i = 0; i < TF_NumInputs(context); ++i) {
    TF_Tensor* handle = nullptr;
    TF_GetInput(context, i, &handle, status.get());
    if (!is_ok(status)) {
      failure_ = {TF_GetCode(status.get()), TF_Message(status.get())};
      break;
    }
    const Tensor owned(handle);
    Number number = 0;
    std::memcpy(&number, TF_TensorData(handle), sizeof(number));
    if (auto pending = Process::instance().take(number)) {
      if (calls_.empty() || calls_.back() != pending->call) calls_.push_back(pending->call);
      has_gpu_tensors_ = has_gpu_tensors_ || pending->gpu;
      all_.push_back(std::move(pending));
    } else {
      failure_.set(TF_FAILED_PRECONDITION, {}, "this operation was already waited for, or it belongs to another job");
    }
  }
  open_ = all_;
  // In the order of their copies out.
  if (has_gpu_tensors_) std::sort(open_.begin(), open_.end(), [](auto& a, auto& b) { return a->place < b->place; });
  if (!has_gpu_tensors_) end_calls();
}

Waiting::~Waiting() { end_calls(); }

void Waiting::end_calls() {
  for (const Number call : std::exchange(calls_, {})) Process::instance().end_call(call);
}

std::shared_ptr<runtime::Work> Waiting::next() {
  while (!open_.empty()) {
    for (; place_ < open_.size(); ++place_) {
      const std::shared_ptr<Pending>& pending = open_[place_];
      if (failure_) {
        drop(pending);
        continue;
      }
      if (auto work = unfinished(*pending)) return work;
      if (start_next_step(*pending)) further_.push_back(pending);
    }
    open_ = std::exchange(further_, {});
    place_ = 0;
  }
  return nullptr;
}

Waiting::Turn Waiting::turn() {
  Turn turn;
  bool is_line_busy = false;
  std::erase_if(open_, [&](const auto& pending) { return advance(*pending, turn, is_line_busy); });
  turn.is_over = open_.empty();
  if (failure_ && turn.is_over) {
    for (const auto& pending : all_) drop(pending);
  }
  if (turn.is_over || !turn.is_about_to_call) end_calls();
  return turn;
}

void Waiting::wait() {
  if (has_gpu_tensors_) return wait_with_gpu();
  while (const auto work = next()) {
    const std::shared_ptr<void> blocked = work->block(true);
    work->wait(Instant::max());
  }
}

void Waiting::wait_with_gpu() {
  constexpr std::chrono::microseconds kShortestNap(10);
  constexpr std::chrono::microseconds kLongestNap(200);
  std::chrono::microseconds nap = kShortestNap;
  std::shared_ptr<runtime::Work> awaited;
  std::shared_ptr<void> blocked;
  while (true) {
    const Turn now = turn();
    if (now.is_over) return;
    const auto now_awaited = now.is_about_to_call ? nullptr : now.work;
    if (awaited != now_awaited) {
      blocked.reset();
      awaited = now_awaited;
      if (awaited) blocked = awaited->block(true);
    }
    nap = now.has_moved ? kShortestNap : std::min(2 * nap, kLongestNap);
    if (now.work) {
      now.work->wait(std::chrono::steady_clock::now() + nap);
    } else {
      std::this_thread::sleep_for(nap);
    }
  }
}

bool Waiting::advance(Pending& pending, Turn& turn, bool& is_line_busy) {
  OnGpu* const gpu = pending.gpu.get();
  const bool has_begun = gpu == nullptr || !pending.next;
  if (failure_ && (has_begun || has_lost_copy_)) return true;
  Status status;
  while (true) {
    if (auto work = unfinished(pending)) {
      if (!turn.work) turn.work = std::move(work);
      return false;
    }
    if (gpu != nullptr && pending.next) {
      const bool is_behind = is_line_busy && gpu->is_in_line();
      if (is_behind || !gpu->is_out(status)) {
        is_line_busy = is_line_busy || gpu->is_in_line();
        turn.is_about_to_call = true;
        return false;
      }
      has_lost_copy_ = !status.is_ok();
      if (has_lost_copy_) break;
    }
    if (!start_next_step(pending)) {
      if (failure_ || gpu == nullptr) return true;
      if (!gpu->is_back(status)) return false;
      if (!status.is_ok()) break;
      turn.has_moved = true;
      return true;
    }
    turn.has_moved = true;
  }
  failure_.set(code_of(status.code()), pending, status.to_string());
  return true;
}

bool Waiting::start_next_step(Pending& pending) {
  for (const auto& work : pending.works) {
    const Status outcome = work->status();
    if (!outcome.is_ok()) {
      failure_.set(code_of(outcome.code()), pending, outcome.to_string());
      return false;
    }
  }
  if (!pending.next) return false;
  pending.works.clear();
  try {
    std::exchange(pending.next, nullptr)(pending);
  } catch (const Error& error) {
    failure_.set(code_of(error.status().code()), pending, error.status().to_string());
  } catch (const std::exception& error) {
    failure_.set(TF_RESOURCE_EXHAUSTED, pending, error.what());
  }
  return !failure_;
}

void Waiting::give(int place, const Pending& pending, const TF_Tensor* output) {
  const TfStatus status = new_status();
  TF_SetOutput(context_, place, output, status.get());
  if (!is_ok(status)) failure_.set(TF_GetCode(status.get()), pending, TF_Message(status.get()));
}

void Waiting::give_on_gpu(int place, const std::shared_ptr<Pending>& pending, const TF_Tensor* like,
                          std::span<std::byte> host) {
  const TfStatus status = new_status();
  const std::vector<std::int64_t> shape = shape_of(like);
  Tensor there(TF_AllocateOutput(context_, place, TF_TensorType(like), shape.data(), static_cast<int>(shape.size()),
                                 TF_TensorByteSize(like), status.get()));
  if (!is_ok(status)) return failure_.set(TF_GetCode(status.get()), *pending, TF_Message(status.get()));
  const auto owner = std::make_shared<std::pair<std::shared_ptr<Pending>, Tensor>>(pending, std::move(there));
  put_on_gpu(*gpu_, host, owner->second.get(), Process::instance().limit(), owner).or_throw();
}

void Waiting::give_all(int& place, const std::shared_ptr<Pending>& pending) {
  try {
    if (const OnGpu* const gpu = pending->gpu.get()) {
      const bool is_here = gpu_ && gpu_->device == gpu->stream().device && gpu_->stream == gpu->stream().stream;
      if (is_here) return give(place++, *pending, gpu->output());
      // TensorFlow, or the program, has placed the call apart from its tensors.
      if (gpu_) return give_on_gpu(place++, pending, gpu->output(), gpu->host());
      const Tensor host = allocate(TF_TensorType(gpu->output()), shape_of(gpu->output()));
      copy_bytes(gpu->host(), bytes_of(host));
      return give(place++, *pending, host.get());
    }
    for (const Tensor& output : pending->outputs) {
      if (failure_) return;
      if (gpu_) {
        give_on_gpu(place++, pending, output.get(), bytes_of(output));
      } else {
        give(place++, *pending, output.get());
      }
    }
  } catch (const Error& error) {
    failure_.set(code_of(error.status().code()), *pending, error.status().to_string());
  } catch (const std::exception& error) {
    failure_.set(TF_RESOURCE_EXHAUSTED, *pending, error.what());
  }
}

void Waiting::answer() {
  int place = 0;
  for (const auto& pending : all_) {
    if (!failure_) give_all(place, pending);
  }
  if (failure_) fail(context_, failure_.code, failure_.text);
}

}  // namespace herring::tensorflow_binding
