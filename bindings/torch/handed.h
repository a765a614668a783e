#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

#include "device.h"

namespace herring::torch_binding {

/// That copies to the host have come, or have failed: for a caller who waits, and for one who is called. Any thread.
class Arrival final {
 public:
  struct Failure {
    std::string text;
    bool is_timeout = false;
  };

  bool is_there() const;
  /// The same; false where it is not so within that time.
  bool wait(std::chrono::duration<double> limit) const;
  /// Calls it once that is so: at once where it is.
  void on_there(std::function<void()> callback);
  /// Why it has failed; nothing where it has not.
  std::optional<Failure> failure() const;
  void come(std::optional<Failure> failure);

  /// Looks at copies with that end and comes with them; false where they are under way.
  template <class IsRead>
  bool try_come(c10::Device device, std::chrono::steady_clock::time_point now,
                std::chrono::steady_clock::time_point deadline, std::chrono::milliseconds timeout, IsRead is_read);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_there_ = false;                         ///< Guarded by mutex_.
  std::optional<Failure> failure_;                ///< Guarded by mutex_.
  std::vector<std::function<void()>> callbacks_;  ///< Guarded by mutex_.
};

/// Copies of a call on device tensors, handed to a caller (Python) that carries out the operation on the host tensors
/// by itself: he puts it together, start()s it, waits, and calls write_back() in the end. Safe from any thread; the
/// calls before start() come from one.
class Handed final : public Staged, public std::enable_shared_from_this<Handed> {
 public:
  /// Throws where the caller's current stream is being captured into a graph. `timeout` is that of the copies out.
  Handed(const std::shared_ptr<Stager>& stager, std::shared_ptr<HostMemory> memory, c10::Device device,
         const std::string& call, std::chrono::milliseconds timeout);

  // Which host tensor stands for which device tensor.
  at::Tensor read(const at::Tensor& tensor) { return mirror_.read(tensor); }
  at::Tensor write(const at::Tensor& tensor) { return mirror_.write(tensor); }
  std::vector<at::Tensor> update(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& targets) {
    return mirror_.update(sources, targets);
  }
  void write_from(const at::Tensor& tensor, const at::Tensor& host) { mirror_.write_from(tensor, host); }
  at::Tensor host_memory(const std::vector<std::int64_t>& sizes, at::ScalarType type) const {
    return mirror_.host_memory(sizes, type);
  }

  void start();
  /// The host tensors hold what was read, or it has failed.
  Arrival& arrival() { return arrival_; }

  /// The operation is over: puts the copies back on their stream.
  void write_back();
  /// The device tensors are as they will be.
  bool is_written() const;
  /// The caller's current stream goes on after the copies back.
  void block_current_stream() const { mirror_.block_current_stream(); }
  /// A new device tensor with what `host` holds, for the caller's current stream.
  at::Tensor place(const at::Tensor& host);

  bool try_start(std::chrono::steady_clock::time_point now) override;
  bool is_over() override;

 private:
  /// Not owned: its own thread, which holds this, must not be the last to let it go.
  const std::weak_ptr<Stager> stager_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point deadline_;
  Mirror mirror_;
  Arrival arrival_;
  mutable std::mutex mutex_;
  bool has_left_ = false;                ///< Copies back are in their stream. Guarded by mutex_.
  std::vector<at::Tensor> placed_from_;  ///< Host tensors of place(). Guarded by mutex_.
  std::optional<c10::Event> placed_;     ///< Guarded by mutex_.
};

/// What a thread's current stream has at one moment, for another thread's to wait for.
class Moment final {
 public:
  explicit Moment(c10::Device device);
  void block_current_stream() const;

 private:
  const c10::Device device_;
  c10::Event event_;
};

}  // namespace herring::torch_binding
