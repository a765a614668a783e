#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "cuda/kernels/twins.h"
#include "device/fake_gpu.h"

/// core/device.h on a FakeGpu. poll() lets the fake GPU go on a little; kernels are their twins.
namespace herring::testing {

class FakeDevice final : public Device {
 public:
  static constexpr std::size_t kMostTickets = 64;

  explicit FakeDevice(FakeGpu& gpu, std::uint32_t number = 0) : gpu_(gpu), id_{number} {}

  DeviceId id() const override { return id_; }
  std::string description() const override { return "fake:" + std::to_string(id_.value) + " (no GPU)"; }
  StreamHandle create_stream() override { return {gpu_.create_stream()}; }
  StreamHandle adopt_stream(ForeignStream stream) override { return {stream.value}; }

  Status allocate(std::size_t bytes, DeviceSpan& memory) override {
    if (!check()) return health_;
    const std::uint64_t address = gpu_.allocate(bytes);
    if (address == 0) {
      return {Code::kUnavailable, description() + ": no " + std::to_string(bytes) + " bytes of device memory"};
    }
    memory = {address, bytes};
    return Status::ok();
  }
  Status allocate_shared(std::size_t bytes, DeviceSpan& memory, int& descriptor) override {
    if (!check()) return health_;
    if (gpu_.allocated_bytes() + bytes > gpu_.memory_bytes()) {
      return {Code::kUnavailable, description() + ": no " + std::to_string(bytes) + " bytes of device memory"};
    }
    descriptor = FakeGpu::create_file(whole_pages(bytes));
    memory = {gpu_.map(descriptor, whole_pages(bytes)), bytes};
    return Status::ok();
  }
  Status import_shared(int descriptor, std::size_t bytes, DeviceSpan& memory) override {
    if (!check()) return health_;
    struct stat file {};
    if (fstat(descriptor, &file) != 0 || file.st_size != static_cast<off_t>(whole_pages(bytes))) {
      return {Code::kUnavailable, description() + ": not the memory that was shared"};
    }
    memory = {gpu_.map(descriptor, whole_pages(bytes)), bytes};
    return Status::ok();
  }
  Status release(DeviceSpan memory) override {
    if (gpu_.release(memory.address)) return Status::ok();
    return {Code::kInvalidArgument, description() + ": release of what allocate() did not give"};
  }
  Status pin(std::span<std::byte> memory) override {
    if (!check()) return health_;
    if (gpu_.pin(memory.data(), memory.size())) return Status::ok();
    return {Code::kUnavailable, description() + ": the system cannot pin " + std::to_string(memory.size()) + " bytes"};
  }
  Status unpin(std::span<std::byte> memory) override {
    if (gpu_.unpin(memory.data())) return Status::ok();
    return {Code::kInvalidArgument, description() + ": unpin of what is not pinned"};
  }

  Status wait_event(StreamHandle stream, ForeignEvent event) override {
    if (!check()) return health_;
    if (!gpu_.has_event(event.value)) return {Code::kTransport, description() + ": wait for what is no event"};
    gpu_.wait(stream.value, event.value);
    return Status::ok();
  }
  Status wait_ticket(StreamHandle stream, Ticket ticket) override {
    if (!check()) return health_;
    if (const auto found = tickets_.find(ticket.value); found != tickets_.end()) gpu_.wait(stream.value, found->second);
    return Status::ok();
  }
  Status copy_to_host(StreamHandle stream, std::span<std::byte> to, DeviceSpan from) override {
    return copy(stream, reinterpret_cast<std::uint64_t>(to.data()), from.address, to.size(), from.bytes, false, true);
  }
  Status copy_to_device(StreamHandle stream, DeviceSpan to, std::span<const std::byte> from) override {
    return copy(stream, to.address, reinterpret_cast<std::uint64_t>(from.data()), to.bytes, from.size(), true, false);
  }
  Status copy_inside(StreamHandle stream, DeviceSpan to, DeviceSpan from) override {
    return copy(stream, to.address, from.address, to.bytes, from.bytes, true, true);
  }
  Status launch(StreamHandle stream, KernelId kernel, std::span<const std::byte> parameters, std::uint32_t) override {
    if (!check()) return health_;
    const std::vector<std::byte> kept(parameters.begin(), parameters.end());
    const std::size_t size = kernel == KernelId::kSum ? sizeof(cuda::SumParameters) : sizeof(cuda::PackParameters);
    if (kept.size() != size) {
      return {Code::kInvalidArgument, description() + ": launch with a parameter block of another size"};
    }
    gpu_.launch(stream.value, [this, kernel, kept] {
      if (kernel == KernelId::kSum) return run_sum(kept.data());
      run_pack(kept.data());
    });
    return Status::ok();
  }
  Status record(StreamHandle stream, Ticket& ticket) override {
    if (!check()) return health_;
    if (tickets_.size() == kMostTickets) return Status::again();
    const std::uint64_t event = gpu_.create_event();
    gpu_.record(event, stream.value);
    ticket = {++last_ticket_};
    tickets_[ticket.value] = event;
    return Status::ok();
  }
  std::size_t poll(std::span<TicketDone> done) override {
    gpu_.run_a_little(8);
    check();
    std::size_t count = 0;
    for (auto each = tickets_.begin(); each != tickets_.end() && count < done.size();) {
      if (health_.is_ok() && !gpu_.is_done(each->second)) {
        ++each;
        continue;
      }
      done[count++] = {{each->first}, health_};
      gpu_.destroy_event(each->second);
      each = tickets_.erase(each);
    }
    return count;
  }
  const Status& health() const override { return health_; }
  Status is_capturing(ForeignStream stream, bool& answer) override {
    answer = gpu_.is_captured(stream.value);
    return Status::ok();
  }
  PointerKind kind_of(std::uint64_t address) override {
    if (gpu_.is_device(address)) return PointerKind::kDevice;
    return gpu_.is_pinned(address, 1) ? PointerKind::kPinned : PointerKind::kUnknown;
  }

 private:
  static std::size_t whole_pages(std::size_t bytes) {
    return (bytes + FakeGpu::page() - 1) / FakeGpu::page() * FakeGpu::page();
  }
  bool check() {
    if (gpu_.is_broken() && health_.is_ok()) {
      health_ = {Code::kTransport, description() + ": the device failed (illegal address); restart the process"};
    }
    return health_.is_ok();
  }
  Status copy(StreamHandle stream, std::uint64_t to, std::uint64_t from, std::size_t to_bytes, std::size_t from_bytes,
              bool to_device, bool from_device) {
    if (!check()) return health_;
    if (to_bytes != from_bytes) {
      return {Code::kInvalidArgument,
              description() + ": copy of " + std::to_string(from_bytes) + " bytes to " + std::to_string(to_bytes)};
    }
    if (to_bytes == 0) return Status::ok();
    if (gpu_.copy(stream.value, to, from, to_bytes, to_device, from_device)) return Status::ok();
    return {Code::kTransport, description() + ": copy outside of device memory"};
  }
  std::uint64_t reach(std::uint64_t address, std::size_t bytes) const {
    return reinterpret_cast<std::uint64_t>(gpu_.alias(address, bytes));
  }
  void run_pack(const std::byte* block) {
    cuda::PackParameters parameters;
    std::memcpy(&parameters, block, sizeof(parameters));
    std::vector<cuda::Tile> tiles(parameters.tile_count);
    std::memcpy(tiles.data(), gpu_.alias(parameters.tiles, tiles.size() * sizeof(cuda::Tile)),
                tiles.size() * sizeof(cuda::Tile));
    for (cuda::Tile& tile : tiles) {
      tile.source = reach(tile.source, tile.elements * cuda::element_bytes(parameters.source_type));
      tile.target = reach(tile.target, tile.elements * cuda::element_bytes(parameters.target_type));
    }
    std::uint32_t* flag = nullptr;
    if (parameters.flag != 0) flag = reinterpret_cast<std::uint32_t*>(gpu_.alias(parameters.flag, 4));
    cuda::pack_twin(parameters, tiles, flag);
  }
  void run_sum(const std::byte* block) {
    cuda::SumParameters parameters;
    std::memcpy(&parameters, block, sizeof(parameters));
    const std::size_t bytes = parameters.elements * cuda::element_bytes(parameters.type);
    for (std::uint32_t i = 0; i < parameters.source_count; ++i) {
      parameters.sources[i] = reach(parameters.sources[i], bytes);
    }
    parameters.target = reach(parameters.target, bytes);
    cuda::sum_twin(parameters);
  }

  FakeGpu& gpu_;
  const DeviceId id_;
  Status health_;
  std::map<std::uint64_t, std::uint64_t> tickets_;  ///< Ticket to event.
  std::uint64_t last_ticket_ = 0;
};

}  // namespace herring::testing
