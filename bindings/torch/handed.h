#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

#include "device.h"

namespace herring::torch_binding {

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
  void write_from(const at::Tensor& tensor, const at::Tensor& host) { mirror_.write_from(tensor, host); }
  at::Tensor host_memory(const std::vector<std::int64_t>& sizes, at::ScalarType type) const {
    return mirror_.host_memory(sizes, type);
  }

  void start();
  /// The host tensors hold what was read, or it has failed.
  bool is_read() const;
  /// The same; false where it is not so within that time.
  bool wait(std::chrono::duration<double> limit) const;
  /// Calls it once that is so: on any thread, at once where it is.
  void on_read(std::function<void()> callback);
  /// Why it has failed, and whether it was the time; nothing where it has not.
  struct Failure {
    std::string text;
    bool is_timeout = false;
  };
  std::optional<Failure> failure() const;

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
  /// For as long as the copies that are on the stream just now take, or (where there is no stager any more) until they
  /// are done.
  void keep(const c10::Stream& stream);

  /// Not owned: its own thread, which holds this, must not be the last to let it go.
  const std::weak_ptr<Stager> stager_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point deadline_;
  Mirror mirror_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_read_ = false;                          ///< Guarded by mutex_.
  std::optional<Failure> failure_;                ///< Guarded by mutex_.
  std::vector<std::function<void()>> callbacks_;  ///< Guarded by mutex_.
  bool has_left_ = false;                         ///< Copies back are in their stream. Guarded by mutex_.
  std::vector<at::Tensor> placed_from_;           ///< Host tensors of place(). Guarded by mutex_.
  std::optional<c10::Event> placed_;              ///< Guarded by mutex_.
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
