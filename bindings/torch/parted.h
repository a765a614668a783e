#pragma once

#include <deque>
#include <utility>

#include "core/device.h"
#include "device.h"
#include "runtime/communicator.h"
#include "runtime/device_parts.h"

namespace herring::torch_binding {

/// torch's streams and copies as a Device, for one tensor and the host memory that stands for it. What is asked of it
/// is what the staging engine needs: copies between the two, and tickets.
class TensorDevice final : public Device {
 public:
  static constexpr StreamHandle kOut{1};
  static constexpr StreamHandle kBack{2};

  /// Both flat, contiguous and of one type; the host memory may be longer.
  TensorDevice(at::Tensor tensor, at::Tensor host, CopyStreams streams);

  DeviceSpan memory() const;

  DeviceId id() const override;
  std::string description() const override;
  StreamHandle create_stream() override;
  StreamHandle adopt_stream(ForeignStream stream) override;
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
  Status is_capturing(ForeignStream stream, bool& answer) override;
  PointerKind kind_of(std::uint64_t address) override;

 private:
  /// Between the same place of both.
  Status copy(StreamHandle stream, bool is_to_host, std::uint64_t offset, std::size_t bytes);
  c10::Stream stream_of(StreamHandle stream) const { return stream == kOut ? streams_.out : streams_.back; }

  const at::Tensor tensor_;
  const at::Tensor host_;
  const CopyStreams streams_;
  std::deque<std::pair<Ticket, c10::Event>> out_;  ///< Tickets of each stream, in its order.
  std::deque<std::pair<Ticket, c10::Event>> back_;
  std::uint64_t last_ticket_ = 0;
  Status health_;
};

/// One tensor of an all-reduce in parts (runtime/device_parts.h), and the host tensor that the runtime gets.
class PartedCopies final {
 public:
  /// Starts the copies out on the mirror's streams. `tensor` is contiguous.
  PartedCopies(std::shared_ptr<runtime::Communicator> runtime, const Mirror& mirror, const at::Tensor& tensor,
               std::uint64_t part_bytes, std::chrono::milliseconds timeout);

  /// Of the tensor's shape; its bytes come late.
  const at::Tensor& host() const { return host_; }
  std::shared_ptr<runtime::LateMemory> late() const { return parts_; }

  /// Looks at the copies; true where anything happened. The stager alone.
  bool turn(std::chrono::steady_clock::time_point now);
  bool has_begun() const { return parts_->bytes_there() > 0; }
  Status status() const { return parts_->status(); }
  void host_ended(const Status& status) { parts_->host_ended(status); }
  bool has_ended() const { return parts_->has_ended(); }
  bool is_released() const { return parts_->is_released(); }

 private:
  const std::shared_ptr<runtime::Communicator> runtime_;
  const at::Tensor memory_;  ///< So many whole parts.
  const at::Tensor host_;
  TensorDevice device_;
  std::shared_ptr<runtime::DeviceParts> parts_;
};

}  // namespace herring::torch_binding
