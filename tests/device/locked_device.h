#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "device/fake_device.h"

namespace herring::testing {

/// A FakeDevice that several threads may call, with the lock of its fake GPU's other users.
class LockedDevice : public Device {
 public:
  LockedDevice(FakeGpu& gpu, std::recursive_mutex& mutex) : mutex_(mutex), device_(gpu) {}

  DeviceId id() const override { return device_.id(); }
  std::string description() const override { return device_.description(); }
#define HERRING_FORWARD(call)         \
  const std::lock_guard lock(mutex_); \
  return device_.call
  StreamHandle create_stream() override { HERRING_FORWARD(create_stream()); }
  StreamHandle adopt_stream(ForeignStream stream) override { HERRING_FORWARD(adopt_stream(stream)); }
  Status allocate(std::size_t bytes, DeviceSpan& memory) override { HERRING_FORWARD(allocate(bytes, memory)); }
  Status allocate_shared(std::size_t bytes, DeviceSpan& memory, int& descriptor) override {
    HERRING_FORWARD(allocate_shared(bytes, memory, descriptor));
  }
  Status import_shared(int descriptor, std::size_t bytes, DeviceSpan& memory) override {
    HERRING_FORWARD(import_shared(descriptor, bytes, memory));
  }
  Status release(DeviceSpan memory) override { HERRING_FORWARD(release(memory)); }
  Status pin(std::span<std::byte> memory) override { HERRING_FORWARD(pin(memory)); }
  Status unpin(std::span<std::byte> memory) override { HERRING_FORWARD(unpin(memory)); }
  Status wait_event(StreamHandle stream, ForeignEvent event) override { HERRING_FORWARD(wait_event(stream, event)); }
  Status wait_ticket(StreamHandle stream, Ticket ticket) override { HERRING_FORWARD(wait_ticket(stream, ticket)); }
  Status copy_to_host(StreamHandle stream, std::span<std::byte> to, DeviceSpan from) override {
    HERRING_FORWARD(copy_to_host(stream, to, from));
  }
  Status copy_to_device(StreamHandle stream, DeviceSpan to, std::span<const std::byte> from) override {
    HERRING_FORWARD(copy_to_device(stream, to, from));
  }
  Status copy_inside(StreamHandle stream, DeviceSpan to, DeviceSpan from) override {
    HERRING_FORWARD(copy_inside(stream, to, from));
  }
  Status launch(StreamHandle stream, KernelId kernel, std::span<const std::byte> parameters,
                std::uint32_t blocks) override {
    HERRING_FORWARD(launch(stream, kernel, parameters, blocks));
  }
  Status record(StreamHandle stream, Ticket& ticket) override { HERRING_FORWARD(record(stream, ticket)); }
  std::size_t poll(std::span<TicketDone> done) override { HERRING_FORWARD(poll(done)); }
  const Status& health() const override { return device_.health(); }
  Status is_capturing(ForeignStream stream, bool& answer) override { HERRING_FORWARD(is_capturing(stream, answer)); }
  PointerKind kind_of(std::uint64_t address) override { HERRING_FORWARD(kind_of(address)); }
#undef HERRING_FORWARD

 private:
  std::recursive_mutex& mutex_;
  FakeDevice device_;
};

}  // namespace herring::testing
