#include "device.h"

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <ranges>
#include <utility>

#include "core/thread.h"
#include "gil.h"
#include "parted.h"
#include "work.h"

namespace herring::torch_binding {
namespace {

using Clock = std::chrono::steady_clock;

/// Between two looks at copies the stager sleeps for a quarter of the time that nothing has happened: a copy is noticed
/// late by a part of its own length at most. A sleep that is shorter than the system's timers are exact is none.
constexpr std::chrono::microseconds kShortNap{15};
constexpr std::chrono::microseconds kLongNap{200};
constexpr std::chrono::milliseconds kNoDeadline{24 * 3600 * 1000};
/// How long the stager waits, when it ends, for copies that have no end.
constexpr std::chrono::seconds kLongestFarewell{5};

/// Releases of torch that do not tell it by the guard are asked in Python.
template <class Guard>
bool is_capturing(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    if (!stream.device().is_cuda()) return false;
    const pybind11::gil_scoped_acquire gil;
    return pybind11::module_::import("torch.cuda").attr("is_current_stream_capturing")().template cast<bool>();
  }
}

/// Releases of torch that do not tell it in C++ are asked in Python.
template <class Stream>
std::uint64_t native_handle(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return reinterpret_cast<std::uint64_t>(stream.native_handle());
  } else {
    const pybind11::gil_scoped_acquire gil;
    const auto parts = stream.pack3();
    return pybind11::module_::import("torch.cuda")
        .attr("Stream")(pybind11::arg("stream_id") = parts.stream_id,
                        pybind11::arg("device_index") = parts.device_index,
                        pybind11::arg("device_type") = static_cast<std::int64_t>(parts.device_type))
        .attr("cuda_stream")
        .template cast<std::uint64_t>();
  }
}

}  // namespace

ForeignStream native_stream(const c10::Stream& stream) {
  // Asked once: the streams of a pool live as long as the process.
  static std::mutex mutex;
  static auto* const known = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, ForeignStream>();
  const std::pair key(stream.device_index(), stream.id());
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known->find(key); found != known->end()) return found->second;
  }
  const ForeignStream native{native_handle(stream)};
  const std::lock_guard lock(mutex);
  known->emplace(key, native);
  return native;
}

void end_copies(const c10::Stream& stream) noexcept {
  try {
    stream.synchronize();
  } catch (...) {
    // The device does nothing any more.
  }
}

std::optional<c10::Device> accelerator_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return std::nullopt;
  const c10::Device device = tensor.device();
  if (!device.is_cuda() && !device.is_privateuseone()) return std::nullopt;
  return device;
}

std::optional<c10::Device> accelerator_of(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? std::nullopt : accelerator_of(tensors[0]);
}

CopyStreams CopyStreams::of(c10::Device device) {
  // Streams of the pool: kept by torch for as long as the process lives, so a tensor's memory may always be told of
  // them.
  static std::mutex mutex;
  static auto* const known = new std::map<c10::DeviceIndex, CopyStreams>();
  const std::lock_guard lock(mutex);
  const auto found = known->find(device.index());
  if (found != known->end()) return found->second;
  const c10::impl::VirtualGuardImpl guard(device.type());
  const CopyStreams streams{guard.getStreamFromGlobalPool(device, true), guard.getStreamFromGlobalPool(device, true)};
  known->emplace(device.index(), streams);
  return streams;
}

c10::Stream current_stream(c10::Device device, const std::string& call) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream current = guard.getStream(device);
  TORCH_CHECK(
      !is_capturing(guard, current), call,
      ": the current stream is being captured into a graph, which Herring's collectives cannot be part of: they "
      "go through the host. Call them outside of the capture");
  return current;
}

Mirror::Mirror(c10::Device device, std::string call, std::shared_ptr<HostMemory> memory)
    : device_(device),
      call_(std::move(call)),
      memory_(std::move(memory)),
      streams_(CopyStreams::of(device)),
      ready_(device.type()) {
  ready_.record(current_stream(device, call_));
  ready_.block(streams_.out);
}

void Mirror::check(const at::Tensor& tensor) const {
  TORCH_CHECK_VALUE(tensor.defined(), call_, ": got an undefined tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, call_, ": takes dense tensors on ", device_,
                              ", got layout ", tensor.layout(), "; pass tensor.to_dense() or tensor.cpu()");
  TORCH_CHECK_VALUE(tensor.device() == device_, call_, ": all tensors of a call must be on one device, got ", device_,
                    " and ", tensor.device());
}

at::Tensor Mirror::host_like(const at::Tensor& tensor) const {
  check(tensor);
  return host_memory(tensor.sizes(), tensor.scalar_type());
}

at::Tensor Mirror::host_memory(at::IntArrayRef sizes, at::ScalarType type) const {
  return host_memory_of(*memory_, sizes, type, device_);
}

at::Tensor host_memory_of(HostMemory& memory, at::IntArrayRef sizes, at::ScalarType type, c10::Device device) {
  const at::TensorOptions options = at::TensorOptions().dtype(type).device(at::kCPU);
  const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  if (std::shared_ptr<std::byte> pages = memory.take(bytes, device)) {
    void* const start = pages.get();
    return at::from_blob(
        start, sizes, [held = std::move(pages)](void*) {}, options);
  }
  if (!device.is_cuda()) return at::empty(sizes, options);
  try {
    return at::empty(sizes, options.pinned_memory(true));
  } catch (const c10::Error&) {
    TORCH_WARN_ONCE("herring: the system cannot pin more memory, so copies from and to ", device,
                    " are slower; raise the limit (ulimit -l)");
    return at::empty(sizes, options);
  }
}

at::Tensor Mirror::read(const at::Tensor& tensor) {
  reads_.push_back({tensor.defined() ? tensor.detach() : tensor, host_like(tensor)});
  return reads_.back().host;
}

at::Tensor Mirror::write(const at::Tensor& tensor) {
  writes_.push_back({tensor.defined() ? tensor.detach() : tensor, host_like(tensor)});
  return writes_.back().host;
}

void Mirror::write_from(const at::Tensor& tensor, const at::Tensor& host) {
  check(tensor);
  writes_.push_back({tensor.detach(), host});
}

std::vector<at::Tensor> Mirror::read(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> host;
  for (const at::Tensor& tensor : tensors) host.push_back(read(tensor));
  return host;
}

std::vector<at::Tensor> Mirror::write(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> host;
  for (const at::Tensor& tensor : tensors) host.push_back(write(tensor));
  return host;
}

std::vector<at::Tensor> Mirror::update(const std::vector<at::Tensor>& tensors) { return update(tensors, tensors); }

std::vector<at::Tensor> Mirror::update(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& targets) {
  struct Packed {
    std::size_t tensor;
    std::size_t pack;
    std::size_t index;  ///< There.
  };
  std::vector<Packed> packed;
  std::vector<at::Tensor> host(sources.size());
  const auto goes_along = [&](std::size_t i) { return Pack::takes(sources[i], targets[i]); };
  const bool are_several = std::ranges::count_if(std::views::iota(std::size_t{0}, sources.size()), goes_along) > 1;
  const std::size_t first = packs_.size();
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (are_several && goes_along(i)) {
      check(sources[i]);
      if (packs_.size() == first || !packs_.back().has_room(sources[i])) packs_.emplace_back(device_);
      packed.push_back({i, packs_.size() - 1, packs_.back().add(sources[i], targets[i])});
    } else {
      host[i] = read(sources[i]);
      write_from(targets[i], host[i]);
    }
  }
  for (std::size_t pack = first; pack < packs_.size(); ++pack) {
    packs_[pack].lay(host_memory({static_cast<std::int64_t>(packs_[pack].bytes())}, at::kByte));
  }
  for (const auto& [tensor, pack, index] : packed) host[tensor] = packs_[pack].host(index);
  return host;
}

void Mirror::seal() {
  if (!has_reads()) return;
  const c10::StreamGuard on_stream(streams_.out);
  try {
    for (const Pair& pair : reads_) pair.host.copy_(pair.device, true);
    for (Pack& pack : packs_) pack.copy_out(streams_.out);
    read_.emplace(device_.type());
    read_->record(streams_.out);
  } catch (...) {
    end_copies(streams_.out);
    throw;
  }
}

void Mirror::write_back() {
  if (writes_.empty() && packs_.empty()) return;
  // Where something was read, this is known to be over.
  if (!has_reads()) ready_.block(streams_.back);
  const c10::StreamGuard on_stream(streams_.back);
  try {
    for (const Pair& pair : writes_) pair.device.copy_(pair.host, true);
    for (Pack& pack : packs_) pack.copy_back(streams_.back);
    note_written();
  } catch (...) {
    end_copies(streams_.back);
    throw;
  }
}

void Mirror::note_written() {
  written_.emplace(device_.type());
  written_->record(streams_.back);
}

void Mirror::block_current_stream() const {
  if (!written_) return;
  written_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

DeviceWork::DeviceWork(std::shared_ptr<runtime::Communicator> runtime, int rank, c10d::OpType type, const char* title,
                       c10::Device device, std::vector<at::Tensor> outputs, std::shared_ptr<void> ticket)
    : c10d::Work(rank, type, title, outputs),
      runtime_(std::move(runtime)),
      title_(title),
      device_(device),
      streams_(CopyStreams::of(device)),
      outputs_(std::move(outputs)),
      ticket_(std::move(ticket)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device})) {}

bool DeviceWork::is_submitted() {
  const std::lock_guard lock(mutex_);
  return is_submitted_;
}

void DeviceWork::finish_with(std::exception_ptr error) {
  std::shared_ptr<void> ticket;
  {
    const std::lock_guard lock(mutex_);
    if (is_submitted_) return;  // In parts it may fail here and there.
    ticket = std::move(ticket_);
    is_submitted_ = true;
    completed_ = true;
    exception_ = error;
  }
  cv_.notify_all();
  Stager::call_back([self = c10::intrusive_ptr<DeviceWork>::unsafe_reclaim_from_nonowning(this), error] {
    if (error) {
      self->future_->setError(error);
      return;
    }
    // What the future tells its users is an event on the stream that is current here.
    const c10::StreamGuard on_stream(self->streams_.back);
    self->future_->markCompleted(c10::IValue(self->outputs_));
  });
}

bool DeviceWork::wait_until_submitted(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds kAtOnce{10};
  const auto is_there = [this] { return is_submitted_; };
  if (cv_.wait_for(lock, std::min(limit, kAtOnce), is_there)) return true;
  // Who gives up by himself after a while waits for nobody.
  std::shared_ptr<void> blocked;
  if (limit == kNoDeadline) {
    lock.unlock();
    blocked = runtime_->block(
        [self = c10::intrusive_ptr<DeviceWork>::unsafe_reclaim_from_nonowning(this)] { return self->awaited(); },
        false);
    lock.lock();
  }
  const bool is_done = cv_.wait_for(lock, limit, is_there);
  if (blocked) {
    lock.unlock();
    blocked.reset();
    lock.lock();
  }
  return is_done;
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout <= std::chrono::milliseconds(0) ? kNoDeadline : timeout;
  {
    std::unique_lock lock(mutex_);
    // The operation's own time-out ends it, on the device and between the ranks.
    if (!wait_until_submitted(lock, limit)) {
      C10_THROW_ERROR(DistBackendError, c10::str("herring: not done after waiting ", limit.count(),
                                                 " ms; the operation itself goes on until its own timeout"));
    }
    if (exception_) std::rethrow_exception(exception_);
  }
  synchronize();
  return true;
}

StagedWork::StagedWork(std::shared_ptr<runtime::Communicator> runtime, int rank, c10d::OpType type, const char* title,
                       std::unique_ptr<Mirror> mirror, std::vector<at::Tensor> outputs,
                       std::chrono::milliseconds timeout, HostCall call, std::shared_ptr<void> ticket,
                       std::shared_ptr<PartedCopies> parted)
    : DeviceWork(runtime, rank, type, title, mirror->device(), std::move(outputs), std::move(ticket)),
      mirror_(std::move(mirror)),
      timeout_(timeout),
      deadline_(Clock::now() + timeout),
      call_(std::move(call)),
      parted_(std::move(parted)),
      will_call_(runtime->will_call()) {}

bool StagedWork::try_start(Clock::time_point now) {
  const OnDevice on_device(mirror_->device());
  try {
    if (parted_) {
      parted_->turn(now);
      if (const Status status = parted_->status(); !status.is_ok())
        std::rethrow_exception(to_exception(title(), status));
      if (!parted_->has_begun()) return false;
    } else if (!mirror_->is_read()) {
      if (now < deadline_) return false;
      TORCH_CHECK(false, "timeout: the tensors were not ready on ", mirror_->device(), " within ", timeout_.count(),
                  " ms: a kernel that writes them has not ended");
    }
    c10::intrusive_ptr<c10d::Work> host = std::exchange(call_, nullptr)();
    {
      const std::lock_guard lock(mutex_);
      host_ = host;
    }
    host->getFuture()->addCallback([self = c10::intrusive_ptr<StagedWork>::unsafe_reclaim_from_nonowning(this)](
                                       c10::ivalue::Future&) { self->on_host_done(); });
  } catch (...) {
    call_ = nullptr;
    if (parted_) parted_->host_ended({Code::kCancelled, "the operation was not started"});
    finish_with(std::current_exception());
  }
  will_call_.reset();
  return true;
}

bool StagedWork::turn(Clock::time_point now) {
  if (!parted_ || parted_->is_released()) return false;
  const OnDevice on_device(mirror_->device());
  const bool has_moved = parted_->turn(now);
  if (!parted_->has_ended()) return has_moved;
  if (is_submitted()) return has_moved;
  std::exception_ptr error;
  try {
    const Status status = parted_->status();
    status.is_ok() ? mirror_->note_written() : std::rethrow_exception(to_exception(title(), status));
  } catch (...) {
    error = std::current_exception();
  }
  finish_with(std::move(error));
  return true;
}

runtime::Awaited StagedWork::awaited() {
  const std::lock_guard lock(mutex_);
  const auto* const host = host_ ? dynamic_cast<torch_binding::Work*>(host_.get()) : nullptr;
  return host == nullptr ? runtime::Awaited{} : host->awaited();
}

void StagedWork::on_host_done() {
  c10::intrusive_ptr<c10d::Work> host;
  {
    const std::lock_guard lock(mutex_);
    host = host_;
  }
  std::exception_ptr error = host->exception();
  if (parted_) {
    parted_->host_ended(error ? Status(Code::kCancelled, "the operation has failed") : Status::ok());
    if (!error) return;  // What is left of the copies back is not in its stream yet: turn().
  } else if (!error) {
    try {
      mirror_->write_back();
    } catch (...) {
      error = std::current_exception();
    }
  }
  finish_with(std::move(error));
}

bool StagedWork::is_over() {
  if (!is_submitted()) return false;
  if (parted_) return parted_->is_released();
  const OnDevice on_device(mirror_->device());
  try {
    return mirror_->is_read() && mirror_->is_written();
  } catch (...) {
    return true;  // The device failed: nothing is copied any more.
  }
}

bool StagedWork::isCompleted() {
  {
    const std::lock_guard lock(mutex_);
    if (exception_) return true;
  }
  return is_over();
}

void StagedWork::synchronize() { mirror_->block_current_stream(); }

int StagedWork::sourceRank() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(host_, "herring: the source is known when a receive is done; wait() first");
  return host_->sourceRank();
}

namespace {

thread_local runtime::CallbackPool* callbacks_of_this_thread = nullptr;

}  // namespace

void Stager::call_back(std::function<void()> task) {
  if (callbacks_of_this_thread == nullptr) return task();
  callbacks_of_this_thread->run(std::move(task));
}

Stager::~Stager() {
  const GilRelease no_gil;
  stop();
}

void Stager::stop() {
  {
    const std::lock_guard lock(mutex_);
    if (!is_stopping_) stops_at_ = Clock::now() + kLongestFarewell;
    is_stopping_ = true;
  }
  changed_.notify_all();
  // On its own thread, where what it has let go was the last to need it, somebody else joins it.
  const std::lock_guard lock(join_mutex_);
  if (thread_.get_id() == std::this_thread::get_id()) return;
  if (thread_.joinable()) thread_.join();
  if (callbacks_) callbacks_->close(Clock::now() + kLongestFarewell);
}

void Stager::add(std::shared_ptr<Staged> call) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      if (!callbacks_) callbacks_ = std::make_unique<runtime::CallbackPool>();
      thread_ = start_thread("herring-stager", [this] { run(); });
    }
    waiting_.push_back(std::move(call));
    unstarted_.fetch_add(1);
  }
  changed_.notify_all();
}

void Stager::add(c10::intrusive_ptr<DeviceWork> work) {
  /// c10d's works are counted in their own way.
  struct Held final : Staged {
    explicit Held(c10::intrusive_ptr<DeviceWork> staged) : work(std::move(staged)) {}
    bool try_start(Clock::time_point now) override { return work->try_start(now); }
    bool turn(Clock::time_point now) override { return work->turn(now); }
    bool is_over() override { return work->is_over(); }
    const c10::intrusive_ptr<DeviceWork> work;
  };
  add(std::make_shared<Held>(std::move(work)));
}

void Stager::keep(const std::weak_ptr<Stager>& stager, std::shared_ptr<Staged> call, const c10::Stream& stream) {
  if (const std::shared_ptr<Stager> self = stager.lock()) {
    self->hold(std::move(call));
  } else {
    end_copies(stream);
  }
}

void Stager::hold(std::shared_ptr<Staged> call) {
  {
    const std::lock_guard lock(mutex_);
    kept_.push_back(std::move(call));
  }
  changed_.notify_all();
}

void Stager::wait_until_started() {
  if (unstarted_.load() == 0) return;
  std::unique_lock lock(mutex_);
  if (std::this_thread::get_id() == thread_.get_id()) return;  // Is starting one of them just now.
  changed_.wait(lock, [this] { return unstarted_.load() == 0; });
}

void Stager::run() {
  callbacks_of_this_thread = callbacks_.get();
  std::vector<std::shared_ptr<Staged>> started;
  Clock::time_point last_move = Clock::now();
  const Staged* last_first = nullptr;
  std::unique_lock lock(mutex_);
  while (!is_stopping_ || (!waiting_.empty() && Clock::now() < stops_at_)) {
    if (waiting_.empty() && started.empty() && kept_.empty()) {
      changed_.wait(lock, [this] { return is_stopping_ || !waiting_.empty() || !kept_.empty(); });
      continue;
    }
    const bool has_new_copies = !kept_.empty();
    std::move(kept_.begin(), kept_.end(), std::back_inserter(started));
    kept_.clear();
    const std::shared_ptr<Staged> first = waiting_.empty() ? nullptr : waiting_.front();
    lock.unlock();
    const Clock::time_point now = Clock::now();
    if (has_new_copies || first.get() != last_first) last_move = now;  // Others may have been under way for long.
    last_first = first.get();
    bool moved = false;
    for (const auto& call : started) moved |= call->turn(now);
    moved |= std::erase_if(started, [](const auto& call) { return call->is_over(); }) > 0;
    const bool is_started = first && first->try_start(now);
    lock.lock();
    if (is_started) {
      started.push_back(first);
      waiting_.pop_front();
      unstarted_.fetch_sub(1);
      changed_.notify_all();
      moved = true;
    }
    if (moved) {
      last_move = now;
      continue;
    }
    const Duration nap = std::min<Duration>((now - last_move) / 4, kLongNap);
    if (nap < kShortNap && first && !first->is_urgent()) {
      changed_.wait_for(lock, kShortNap);
    } else if (nap < kShortNap) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    } else {
      changed_.wait_for(lock, nap);  // A new call ends the sleep; a copy that is done does not.
    }
  }
  std::move(kept_.begin(), kept_.end(), std::back_inserter(started));
  kept_.clear();
  // Kernels that write them do not end.
  std::move(waiting_.begin(), waiting_.end(), std::back_inserter(started));
  unstarted_.fetch_sub(waiting_.size());
  waiting_.clear();
  changed_.notify_all();
  lock.unlock();
  see_off(std::move(started));
}

void Stager::see_off(std::vector<std::shared_ptr<Staged>> started) {
  const Clock::time_point limit = Clock::now() + kLongestFarewell;
  for (;;) {
    for (const auto& call : started) call->turn(Clock::now());
    std::erase_if(started, [](const auto& call) { return call->is_over(); });
    if (started.empty()) return;
    if (Clock::now() > limit) break;
    std::this_thread::sleep_for(kLongNap);
  }
  static_cast<void>(new std::vector<std::shared_ptr<Staged>>(std::move(started)));
}

}  // namespace herring::torch_binding
