#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "device/contract.h"
#include "device/fake_gpu.h"

namespace herring::testing {

/// A world whose device works on a FakeGpu, whatever stands between them. The GPU outlives it.
class FakeGpuWorld : public DeviceWorld {
 public:
  ForeignEvent fill_later(DeviceSpan memory, std::byte value) override {
    // Several pieces of work: as long as the seed likes.
    for (int i = 0; i < 20; ++i) gpu_.launch(theirs_, [] {});
    gpu_.launch(theirs_, [this, memory, value] {
      std::memset(gpu_.alias(memory.address, memory.bytes), static_cast<int>(value), memory.bytes);
    });
    const std::uint64_t event = gpu_.create_event();
    gpu_.record(event, theirs_);
    return {event};
  }
  ForeignStream captured_stream() override { return {captured_}; }
  ForeignStream plain_stream() override { return {theirs_}; }
  std::size_t too_much_memory() const override { return kLimit + 1; }
  std::size_t too_much_pinned() const override { return kLimit + 4096; }
  bool fail() override {
    gpu_.fail();
    return true;
  }
  std::vector<std::string> faults() const override { return gpu_.faults(); }

 protected:
  static constexpr std::size_t kLimit = 64 << 20;

  explicit FakeGpuWorld(FakeGpu& gpu) : gpu_(gpu), theirs_(gpu.create_stream()), captured_(gpu.create_stream()) {
    gpu_.capture(captured_);
  }

 private:
  FakeGpu& gpu_;
  const std::uint64_t theirs_;
  const std::uint64_t captured_;
};

}  // namespace herring::testing
