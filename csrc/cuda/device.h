#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "cuda/driver.h"

namespace herring::cuda {

/// One GPU, in the context that the process's other users of it (torch) have too. One thread at a time; every call
/// pushes that context and pops it.
class CudaDevice final : public Device {
 public:
  static constexpr std::size_t kMostTickets = 256;

  /// Takes the GPU's primary context, which is made (about half a GB of its memory) where nobody has it yet. Throws
  /// Error(kUnavailable).
  CudaDevice(std::shared_ptr<Driver> driver, DeviceId id);
  /// Work that is under way must have ended; a device that failed is left as it is.
  ~CudaDevice() override;

  DeviceId id() const override { return id_; }
  std::string description() const override { return description_; }
  StreamHandle create_stream() override;
  StreamHandle adopt_stream(ForeignStream stream) override { return {stream.value}; }
  Status allocate(std::size_t bytes, DeviceSpan& memory) override;
  Status allocate_shared(std::size_t bytes, DeviceSpan& memory, int& descriptor) override;
  Status import_shared(int descriptor, std::size_t bytes, DeviceSpan& memory) override;
  Status release(DeviceSpan memory) override;
  Status pin(std::span<std::byte> memory) override;
  Status unpin(std::span<std::byte> memory) override;
  Status wait_event(StreamHandle stream, ForeignEvent event) override;
  Status wait_ticket(StreamHandle stream, Ticket ticket) override;
  Status copy_to_host(StreamHandle stream, std::span<std::byte> to, DeviceSpan from) override;
  Status copy_to_device(StreamHandle stream, DeviceSpan to, std::span<const std::byte> from) override;
  Status copy_inside(StreamHandle stream, DeviceSpan to, DeviceSpan from) override;
  Status launch(StreamHandle stream, KernelId kernel, std::span<const std::byte> parameters,
                std::uint32_t blocks) override;
  Status record(StreamHandle stream, Ticket& ticket) override;
  std::size_t poll(std::span<TicketDone> done) override;
  const Status& health() const override { return health_; }
  std::shared_ptr<void> make_current() override;
  Status is_capturing(ForeignStream stream, bool& answer) override;
  PointerKind kind_of(std::uint64_t address) override;

 private:
  class Current;
  struct Mark {
    Ticket ticket;
    Event event = nullptr;
  };

  /// Not ok where the device failed, or this is a forked child.
  Status ready();
  /// The call's Status; an error that the context does not survive becomes health().
  Status to_status(Result result, const char* call, const std::string& what = {});
  Status load_kernels();
  Status or_unavailable(const Status& status) const;
  /// To whole granules, as such memory comes.
  Status round_up(std::size_t& bytes);
  /// Of whole granules. The handle is the caller's to give back: what is mapped stays.
  Status map_shared(MemoryHandle handle, std::size_t bytes, DevicePointer& address);
  Status release_shared(DevicePointer address, std::size_t bytes);

  const std::shared_ptr<Driver> driver_;
  const DeviceId id_;
  std::string description_;
  DeviceNumber device_ = 0;
  Context context_ = nullptr;
  Status health_;
  std::vector<Stream> streams_;
  std::vector<Event> free_events_;
  std::map<StreamHandle, std::deque<Mark>> marks_;  ///< Of each stream, the oldest first.
  std::size_t tickets_ = 0;
  std::uint64_t last_ticket_ = 0;
  std::map<DevicePointer, std::size_t> shared_;  ///< Mapped memory that other processes have too: whole granules.
  Module module_ = nullptr;
  std::array<Function, kKernels> kernels_{};
};

}  // namespace herring::cuda
