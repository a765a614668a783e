#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "core/device.h"
#include "host_memory.h"
#include "pack.h"
#include "runtime/callback_pool.h"

/// Tensors on an accelerator: how their bytes come to the host and go back, in the order that streams have. Through
/// c10's device guards alone, so that one binding serves torch with and without CUDA.
namespace herring::torch_binding {

/// The accelerator that the call is about: where its first tensor is. Nothing for CPU tensors, and for what has no
/// streams (those are refused where CPU tensors are checked).
std::optional<c10::Device> accelerator_of(const at::Tensor& tensor);
std::optional<c10::Device> accelerator_of(const std::vector<at::Tensor>& tensors);

/// The two streams of a GPU that copies go on: of torch's pool, which are never destroyed. Made at first use.
struct CopyStreams {
  c10::Stream out;
  c10::Stream back;
  static CopyStreams of(c10::Device device);
};

/// The thread's device, for as long as it lives: whoever asks about another GPU's events gets a context there. Where a
/// failed device refuses even that, what is asked next says so.
class OnDevice final {
 public:
  explicit OnDevice(c10::Device device) noexcept {
    try {
      guard_.reset_device(device);
    } catch (...) {
      // The caller's next question fails.
    }
  }

 private:
  c10::OptionalDeviceGuard guard_;
};

/// The stream, of a pool, as the device's driver names it. Older releases of torch are asked in Python, once a stream.
ForeignStream native_stream(const c10::Stream& stream);

/// After a failure: copies that were submitted before it use memory that is about to be given back.
void end_copies(const c10::Stream& stream) noexcept;

/// The thread's current stream there. Throws where it is being captured into a graph; `call` stands in the message.
c10::Stream current_stream(c10::Device device, const std::string& call);
/// Host memory that copies from and to the device are fast with, where it can be had.
at::Tensor host_memory_of(HostMemory& memory, at::IntArrayRef sizes, at::ScalarType type, c10::Device device);

/// A call on device tensors, while it is put together: which host tensor stands for which device tensor. All copies,
/// out and back, come after what the caller's current stream has now.
class Mirror final {
 public:
  /// Throws where the caller's current stream is being captured into a graph. `call` stands in messages.
  Mirror(c10::Device device, std::string call, std::shared_ptr<HostMemory> memory);

  /// A host copy of what `tensor` holds.
  at::Tensor read(const at::Tensor& tensor);
  /// Host memory for what `tensor` is to hold.
  at::Tensor write(const at::Tensor& tensor);
  std::vector<at::Tensor> read(const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> write(const std::vector<at::Tensor>& tensors);
  /// Both.
  std::vector<at::Tensor> update(const std::vector<at::Tensor>& tensors);
  /// Host copies of what `sources` hold, which `targets` (each of its source's size and type) are to hold in the end.
  /// Small ones move together.
  std::vector<at::Tensor> update(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& targets);
  /// `tensor` is to hold what `host`, of its shape and type, holds in the end.
  void write_from(const at::Tensor& tensor, const at::Tensor& host);
  /// direct.cc. On the device itself: a copy of what `tensor` holds goes to `input`, and `tensor` is to hold what
  /// `output` does in the end. `owner`: of both, kept until then.
  void update_there(const at::Tensor& tensor, const at::Tensor& input, const at::Tensor& output,
                    std::shared_ptr<void> owner);
  /// Memory that copies from and to the device are fast with, where it can be had.
  at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType type) const;

  /// All reads are in the out stream: from here on the mirror changes no more.
  void seal();
  /// What was read is on the host. Throws what the device failed with.
  bool is_read() const { return !read_.has_value() || read_->query(); }
  /// Puts the copies back on the back stream, and an event after them. On any thread.
  void write_back();
  /// Others have put copies back on the back stream: what comes later waits for them.
  void note_written();
  /// The device tensors are as they will be.
  bool is_written() const { return !written_.has_value() || written_->query(); }
  /// The caller's current stream goes on after the copies back.
  void block_current_stream() const;

  c10::Device device() const { return device_; }
  const CopyStreams& streams() const { return streams_; }

 private:
  struct Pair {
    at::Tensor device;
    at::Tensor host;
  };
  bool has_reads() const { return !reads_.empty() || !packs_.empty(); }
  void check(const at::Tensor& tensor) const;
  at::Tensor host_like(const at::Tensor& tensor) const;

  const c10::Device device_;
  const std::string call_;
  const std::shared_ptr<HostMemory> memory_;
  const CopyStreams streams_;
  c10::Event ready_;             ///< What the caller's stream had at the call.
  std::shared_ptr<void> owner_;  ///< Of update_there(): goes after the tensors that lie there.
  std::vector<Pair> reads_;
  std::vector<Pair> writes_;
  std::vector<Pack> packs_;  ///< Read and written.
  std::optional<c10::Event> read_;
  std::optional<c10::Event> written_;
};

class PartedCopies;

/// What the stager looks after.
class Staged {
 public:
  Staged() = default;
  virtual ~Staged() = default;
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;

  /// True where what comes after the copies out has been started, or has failed: nothing is to be waited for any more.
  virtual bool try_start(std::chrono::steady_clock::time_point now) = 0;
  /// Looks at what goes on after the start; true where anything happened.
  virtual bool turn([[maybe_unused]] std::chrono::steady_clock::time_point now) { return false; }
  /// Somebody waits for it just now: the stager looks at it again and again. That keeps the driver busy, which the
  /// threads of the program call too.
  virtual bool is_urgent() const { return true; }
  /// It need not be kept alive any longer.
  virtual bool is_over() = 0;
};

/// A call on device tensors, whose results are written on the back stream. As c10d asks of a backend with streams:
/// wait() makes the caller's current stream wait for what writes them, not the host, which waits only until that is
/// submitted; and so does the future, whose callbacks run with the back stream current. The stager looks after it.
class DeviceWork : public c10d::Work {
 public:
  /// `ticket` goes when it has ended.
  DeviceWork(std::shared_ptr<runtime::Communicator> runtime, int rank, c10d::OpType type, const char* title,
             c10::Device device, std::vector<at::Tensor> outputs, std::shared_ptr<void> ticket);

  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }

  // As Staged has it:
  virtual bool try_start(std::chrono::steady_clock::time_point now) = 0;
  virtual bool turn(std::chrono::steady_clock::time_point now) = 0;
  /// Nothing touches the device tensors any more.
  virtual bool is_over() = 0;

 protected:
  const char* title() const { return title_; }
  c10::Device device() const { return device_; }
  const CopyStreams& streams() const { return streams_; }
  /// What writes the results is in its stream, or it has failed.
  bool is_submitted();
  /// The first call counts.
  void finish_with(std::exception_ptr error);
  /// What other ranks have to do before it ends, where that is all that it waits for. Any thread.
  virtual runtime::Awaited awaited() = 0;

 private:
  /// Blocks until it is_submitted(); false where that is not so within the limit. The caller holds the lock.
  bool wait_until_submitted(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit);

  const std::shared_ptr<runtime::Communicator> runtime_;
  const char* const title_;
  const c10::Device device_;
  const CopyStreams streams_;
  const std::vector<at::Tensor> outputs_;
  std::shared_ptr<void> ticket_;  ///< Guarded by mutex_, as this:
  bool is_submitted_ = false;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// A collective on device tensors: copies out, the operation on host tensors, copies back.
class StagedWork final : public DeviceWork {
 public:
  using HostCall = std::function<c10::intrusive_ptr<c10d::Work>()>;

  /// `call` starts the operation on host tensors, when they have been read.
  StagedWork(std::shared_ptr<runtime::Communicator> runtime, int rank, c10d::OpType type, const char* title,
             std::unique_ptr<Mirror> mirror, std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout,
             HostCall call, std::shared_ptr<void> ticket, std::shared_ptr<PartedCopies> parted = nullptr);

  /// The copies back are done.
  bool isCompleted() override;
  void synchronize() override;
  int sourceRank() const override;

  bool try_start(std::chrono::steady_clock::time_point now) override;
  bool turn(std::chrono::steady_clock::time_point now) override;
  bool is_over() override;

 private:
  runtime::Awaited awaited() override;
  void on_host_done();

  const std::unique_ptr<Mirror> mirror_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point deadline_;
  HostCall call_;
  const std::shared_ptr<PartedCopies> parted_;  ///< Where the tensor goes in parts: does the mirror's copies.
  c10::intrusive_ptr<c10d::Work> host_;         ///< Guarded by mutex_.
  std::shared_ptr<void> will_call_;             ///< Until the operation on host tensors is called.
};

/// The thread that starts operations on host tensors when their copies have come, in the order of the calls, and keeps
/// tensors alive until their copies back are done. One for a process, started by the first call on device tensors.
class Stager final {
 public:
  Stager() = default;
  ~Stager();
  Stager(const Stager&) = delete;
  Stager& operator=(const Stager&) = delete;

  void add(std::shared_ptr<Staged> call);
  void add(c10::intrusive_ptr<DeviceWork> work);
  /// Holds it until it is over; what is to be started has been. Where there is no stager any more, returns when what
  /// the stream has just now is done.
  static void keep(const std::weak_ptr<Stager>& stager, std::shared_ptr<Staged> call, const c10::Stream& stream);
  /// Until everything that was added has been started: what is called on CPU tensors comes after it on all ranks.
  void wait_until_started();
  /// Ends the thread; copies that are under way end first, or are left with their memory after a while. Idempotent. The
  /// thread takes the interpreter's lock: so before that ends, and without it.
  void stop();
  /// Something is to be looked at before the nap ends.
  void wake() { changed_.notify_all(); }
  /// Runs what may wait for other calls on device tensors, as callbacks of the user do: here, or where this is the
  /// stager's thread, which has to go on, on another one.
  static void call_back(std::function<void()> task);

 private:
  void hold(std::shared_ptr<Staged> call);
  void run();
  /// Copies that are still under way keep their memory, if for ever.
  static void see_off(std::vector<std::shared_ptr<Staged>> started);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Staged>> waiting_;
  std::vector<std::shared_ptr<Staged>> kept_;
  std::atomic<std::size_t> unstarted_{0};
  bool is_stopping_ = false;
  std::chrono::steady_clock::time_point stops_at_;  ///< At the latest, where it is.
  std::mutex join_mutex_;
  std::unique_ptr<runtime::CallbackPool> callbacks_;  ///< As long as thread_.
  std::thread thread_;
};

}  // namespace herring::torch_binding
