#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/clock.h"
#include "core/device.h"
#include "core/status.h"
#include "core/types.h"

/// Collectives among devices that another library brings (NCCL).
namespace herring {

/// One communicator of such a library: some ranks, each with a device. What is asked for is work on a stream, which
/// waits on the device for the other members', so all members ask for the same in the same order. One thread at a time;
/// the device is the thread's current one.
class DeviceCollectives {
 public:
  virtual ~DeviceCollectives() = default;

  /// What was asked for last (at first: that all members come together). Ok: it is on its stream. kAgain: not yet, and
  /// until then nothing else is asked for. Else it failed.
  virtual Status poll() = 0;

  // Ok or kAgain, as poll() says it. Memory is borrowed until a later ticket of the stream is done.
  virtual Status all_reduce(StreamHandle stream, DeviceSpan to, DeviceSpan from, DataType type, ReduceOp reduce) = 0;
  /// `to` is this member's share of `from`, which is members times as large; it may lie there at its place.
  virtual Status reduce_scatter(StreamHandle stream, DeviceSpan to, DeviceSpan from, DataType type,
                                ReduceOp reduce) = 0;
  /// `from` is this member's share of `to`, and may lie there at its place.
  virtual Status all_gather(StreamHandle stream, DeviceSpan to, DeviceSpan from) = 0;

  /// What is under way on the device ends, whatever the others do, and its results are of no use. Nothing can be asked
  /// for any more. May wait for kernels of other communicators on the device.
  virtual void abort() = 0;
  /// All that was asked for has ended. Waits until the other members have come to this as well, so that they have read
  /// what they need of this one's memory; at the deadline as abort(). The library may wait for them longer. After
  /// abort(): nothing.
  virtual void close(Instant deadline) = 0;
};

class DeviceCollectivesLibrary {
 public:
  using Id = std::array<std::byte, 128>;

  virtual ~DeviceCollectivesLibrary() = default;
  /// "NCCL 2.27.7 (/usr/lib/libnccl.so.2)"
  virtual std::string description() const = 0;
  /// For one communicator: one member makes it, and all connect with it. Throws Error.
  virtual Id make_id() = 0;
  /// At most so many multiprocessors are used. Begins; poll() says when all have come. Throws Error.
  virtual std::unique_ptr<DeviceCollectives> connect(const Id& id, std::uint32_t members, std::uint32_t index,
                                                     std::uint32_t blocks) = 0;
};

}  // namespace herring
