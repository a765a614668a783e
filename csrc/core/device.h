#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/status.h"
#include "core/types.h"

/// The device contract: submit and poll, no callbacks, nothing that waits. One Device is one GPU; one thread at a time
/// may call it (another thread may take over). Nothing here promises an order between streams except through events and
/// tickets. tests/device/contract.h runs one suite against every implementation.
namespace herring {

/// Ordinal of a device in this process, as CUDA_VISIBLE_DEVICES leaves it. Not comparable between processes.
using DeviceId = Id<struct DeviceKind>;

/// Memory on a device. The address means nothing to the host: reading through it is a fault.
struct DeviceSpan {
  std::uint64_t address = 0;
  std::size_t bytes = 0;

  bool empty() const { return bytes == 0; }
  /// The caller keeps offset + count within bytes.
  DeviceSpan subspan(std::size_t offset, std::size_t count) const { return {address + offset, count}; }
  friend constexpr bool operator==(DeviceSpan, DeviceSpan) = default;
};

/// A queue of work on the device, known to one Device.
struct StreamHandle {
  std::uint64_t value = 0;
  friend constexpr auto operator<=>(StreamHandle, StreamHandle) = default;
};
/// A stream and an event of somebody else (a framework's), as the driver names them: CUstream, CUevent. Borrowed.
struct ForeignStream {
  std::uint64_t value = 0;
};
struct ForeignEvent {
  std::uint64_t value = 0;
};
/// A point in a stream: done once everything submitted before it on that stream is.
struct Ticket {
  std::uint64_t value = 0;
  friend constexpr auto operator<=>(Ticket, Ticket) = default;
};
struct TicketDone {
  Ticket ticket;
  Status status;  ///< Not ok: the device failed; what the copies before it did is unknown.
};

/// Kernels that every implementation has, with the parameter blocks of cuda/kernels/tables.h.
enum class KernelId : std::uint8_t { kPack = 0, kUnpack = 1, kSum = 2 };
inline constexpr std::size_t kKernels = 3;

enum class PointerKind : std::uint8_t {
  kUnknown,  ///< Nothing that the driver knows of: ordinary host memory, or no memory at all.
  kPinned,   ///< Host memory that the driver may copy from and to at full speed.
  kDevice,   ///< Of this or another device.
  kManaged,  ///< Moves between host and device by itself.
};

class Device {
 public:
  virtual ~Device() = default;

  virtual DeviceId id() const = 0;
  /// "cuda:0 (NVIDIA H100, driver 12.4)": for logs and errors.
  virtual std::string description() const = 0;

  /// A stream of this Device's own, which waits for no other stream by itself and goes before ordinary work where the
  /// device has priorities. Lives as long as the Device. Set-up: throws Error.
  virtual StreamHandle create_stream() = 0;
  /// Somebody else's stream, which must live as long as work is put on it.
  virtual StreamHandle adopt_stream(ForeignStream stream) = 0;

  /// kUnavailable where there is not so much memory; the Device stays usable.
  virtual Status allocate(std::size_t bytes, DeviceSpan& memory) = 0;
  /// Memory that other processes can have too, and the descriptor that they import it by, which is the caller's to
  /// close. The bytes are there until all who have it have released it: a process that dies takes nothing from others.
  /// Set-up. kUnavailable where there is not so much memory, or none of this kind.
  virtual Status allocate_shared(std::size_t bytes, DeviceSpan& memory, int& descriptor) = 0;
  /// What another process's allocate_shared(bytes) gave. kUnavailable where this device cannot reach that memory.
  virtual Status import_shared(int descriptor, std::size_t bytes, DeviceSpan& memory) = 0;
  /// What one of the above gave, when no work that uses it is left. May wait for the device: not for the hot path.
  virtual Status release(DeviceSpan memory) = 0;
  /// Makes host memory reachable for the copy engines, for all devices of the process. Whole pages, not pinned yet.
  /// kUnavailable where the system refuses (its limit, its kind of memory); the memory still works, only slower.
  virtual Status pin(std::span<std::byte> memory) = 0;
  /// What was pinned, when no copy uses it. May wait for the device.
  virtual Status unpin(std::span<std::byte> memory) = 0;

  /// The stream goes on when `event`, as recorded last, is done. The host does not wait.
  virtual Status wait_event(StreamHandle stream, ForeignEvent event) = 0;
  /// The same for a ticket of another stream of this Device; one that was handed out by poll() is done.
  virtual Status wait_ticket(StreamHandle stream, Ticket ticket) = 0;
  /// Copies are submitted, not done: memory on both sides is borrowed until a later ticket of the stream is done. Spans
  /// are of equal size; empty ones are no work. Host memory that is not pinned is allowed, and may make the call wait.
  virtual Status copy_to_host(StreamHandle stream, std::span<std::byte> to, DeviceSpan from) = 0;
  virtual Status copy_to_device(StreamHandle stream, DeviceSpan to, std::span<const std::byte> from) = 0;
  virtual Status copy_inside(StreamHandle stream, DeviceSpan to, DeviceSpan from) = 0;
  /// `parameters` is copied before the call returns.
  virtual Status launch(StreamHandle stream, KernelId kernel, std::span<const std::byte> parameters,
                        std::uint32_t blocks) = 0;
  /// kAgain: too many tickets are out; poll and try again.
  virtual Status record(StreamHandle stream, Ticket& ticket) = 0;

  /// Hands out tickets that are done, each once, in any order, at most done.size(). Never blocks. After a failure of
  /// the device all that are out are handed out with its status.
  virtual std::size_t poll(std::span<TicketDone> done) = 0;

  /// Not ok from the first failure on that the device does not recover from; every submission then returns it.
  virtual const Status& health() const = 0;

  /// The calling thread's current device, for libraries that go by it, while the result lives. Any thread.
  virtual std::shared_ptr<void> make_current() { return nullptr; }

  /// Whether the stream is being captured into a graph, where nothing of ours may be put on it.
  virtual Status is_capturing(ForeignStream stream, bool& answer) = 0;
  virtual PointerKind kind_of(std::uint64_t address) = 0;
};

}  // namespace herring
