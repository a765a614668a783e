#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "bindings/tensorflow/gpu_stream.h"
#include "bindings/tensorflow/tensor.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/status.h"
#include "runtime/device_copies.h"

/// Tensors in a GPU's memory, whose copies Herring makes itself, on streams of its own.
namespace herring::tensorflow_binding {

/// Of what goes on with GPUs.
Logger& log();

/// The GPU's copies, of all of the process. Throws Error(kUnavailable).
std::shared_ptr<runtime::DeviceCopies> copies_of(const GpuStream& stream);

/// Pinned memory of the host. Null where there is none; the log says once why.
std::shared_ptr<std::byte> take_pinned(runtime::PinnedMemory& memory, std::size_t bytes,
                                       const std::shared_ptr<runtime::DeviceCopies>& device);

/// One tensor that is reduced: out to memory of the host, and back into another tensor of its size. Both copies lie
/// between the kernels of TensorFlow's stream: the first after those that it has when this is made, the second before
/// those that it gets when the result is there. One thread at a time.
class OnGpu final {
 public:
  /// `output`: memory of the same GPU, which is free when the stream comes to where it is now. `limit`: of each copy,
  /// from the first time that it is asked about. Throws Error.
  OnGpu(const GpuStream& stream, runtime::PinnedMemory& memory, Tensor input, Tensor output, Duration limit);

  /// What is reduced, in place.
  std::span<std::byte> host() const { return {held_->host.get(), bytes_}; }
  /// Where output() is.
  const GpuStream& stream() const { return stream_; }
  const TF_Tensor* output() const { return output_ ? output_.get() : held_->output.get(); }
  /// Its copy out comes after those of all such tensors that were made before.
  bool is_in_line() const { return way_ == runtime::DeviceCopies::Way::kOut; }

  /// Whether host() holds what the input does; true with a status that is not ok: never.
  bool is_out(Status& status);
  /// The reduced bytes are in host(): whether the stream goes on with them in the output. The first call starts it.
  bool is_back(Status& status);

 private:
  /// Kept until no copy touches it.
  struct Held {
    Tensor input;   ///< Until it is out.
    Tensor output;  ///< Until the stream waits for it.
    std::shared_ptr<std::byte> host;
  };
  enum class Stage : std::uint8_t { kFirst, kOut, kHost, kBack, kLast };

  DeviceSpan span_of(const Tensor& tensor) const;
  /// Of the copy that is asked about.
  bool is_late(Instant now);
  Status start_back();

  const GpuStream stream_;
  const std::shared_ptr<runtime::DeviceCopies> device_;
  const std::size_t bytes_;
  const Duration limit_;
  const std::shared_ptr<Held> held_ = std::make_shared<Held>();
  Tensor output_;  ///< Then: whatever gets this memory next comes after the copy.
  runtime::DeviceCopies::Way way_ = runtime::DeviceCopies::Way::kOwn;
  std::optional<runtime::DeviceCopies::Queue> out_;
  std::optional<runtime::DeviceCopies::Queue> back_;
  Stage stage_ = Stage::kFirst;
  std::optional<Instant> deadline_;
};

/// Copies what lies on the host to a tensor on the GPU, which TensorFlow has made now, and waits for it. `owner`: of
/// both, kept until no copy touches them.
Status put_on_gpu(const GpuStream& stream, std::span<std::byte> host, const TF_Tensor* there, Duration limit,
                  std::shared_ptr<void> owner);

}  // namespace herring::tensorflow_binding
