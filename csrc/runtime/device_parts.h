#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/device.h"
#include "runtime/communicator.h"

namespace herring::runtime {

/// A tensor on a device that is reduced in host memory, in the parts of the runtime's operation: while one is copied
/// out, others are reduced and copied back. What the staging engine does with slots (csrc/staging), where each part has
/// its own: the place that it has in the host memory, so the operation is the one that CPU tensors have.
class DeviceParts : public LateMemory {
 public:
  struct Options {
    StreamHandle out;  ///< Goes on, by itself, when the tensor may be read and written.
    StreamHandle back;
    DeviceSpan tensor;
    std::span<std::byte> host;     ///< So many whole parts that the tensor fits; pinned best.
    std::uint64_t part_bytes = 0;  ///< Communicator::late_part_bytes().
    Instant deadline;              ///< Of the copies out.
  };

  /// Starts the copies out. Device and memory are borrowed until is_released(). Throws Error.
  static std::shared_ptr<DeviceParts> start(Instant now, Device& device, Options options);

  // One thread at a time, the one that calls the device:
  struct Turn {
    bool has_moved = false;  ///< Anything happened.
    bool has_news = false;   ///< For Communicator::look_at_late_memory().
  };
  virtual Turn run(Instant now) = 0;

  // Any thread:
  /// All copies back are in their stream; or it has failed: status().
  virtual bool has_ended() const = 0;
  /// Nothing touches the tensor and the host memory any more, but for the runtime.
  virtual bool is_released() const = 0;

  /// The runtime's operation has ended so, or will not begin.
  virtual void host_ended(const Status& status) = 0;
};

}  // namespace herring::runtime
