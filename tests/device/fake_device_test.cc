#include <gtest/gtest.h>

#include "device/contract.h"
#include "device/fake_device.h"
#include "device/fake_gpu_world.h"
#include "seeds.h"

namespace herring::testing {
namespace {

struct OwnedGpu {
  explicit OwnedGpu(FakeGpuOptions options) : gpu(options) {}
  FakeGpu gpu;
};

class FakeWorld final : private OwnedGpu, public FakeGpuWorld {
 public:
  explicit FakeWorld(std::uint64_t seed)
      : OwnedGpu({.seed = seed, .memory_bytes = kLimit, .pin_bytes = kLimit}), FakeGpuWorld(gpu), device_(gpu) {}

  Device& device() override { return device_; }

 private:
  FakeDevice device_;
};

DeviceFactory fake(std::uint64_t seed) {
  return {"fake" + std::to_string(seed), [seed](std::string&) { return std::make_unique<FakeWorld>(seed); }};
}

INSTANTIATE_TEST_SUITE_P(Fake, DeviceContract, ::testing::Values(fake(1), fake(2), fake(3)),
                         [](const auto& test) { return test.param.name; });

/// The double itself: it must not let pass what the real thing punishes.
TEST(FakeGpu, ReadingASlotBeforeItsTicketSeesHalfACopy) {
  int early = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    FakeGpu gpu({.seed = seed});
    FakeDevice device(gpu);
    const StreamHandle stream = device.create_stream();
    DeviceSpan memory;
    ASSERT_TRUE(device.allocate(1 << 20, memory).is_ok());
    std::memset(gpu.alias(memory.address, memory.bytes), 1, memory.bytes);
    std::vector<std::byte> host(memory.bytes);
    ASSERT_TRUE(device.copy_to_host(stream, host, memory).is_ok());
    gpu.run_a_little(8);
    if (std::count(host.begin(), host.end(), std::byte{1}) != static_cast<std::ptrdiff_t>(host.size())) ++early;
    gpu.run_all();
  }
  EXPECT_GE(early, 15);
}

TEST(FakeGpu, ForgettingTheReadyEventReadsOldBytes) {
  int wrong = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    FakeWorld world(seed);
    Device& device = world.device();
    const StreamHandle stream = device.create_stream();
    DeviceSpan memory;
    ASSERT_TRUE(device.allocate(4096, memory).is_ok());
    static_cast<void>(world.fill_later(memory, std::byte{9}));
    std::vector<std::byte> host(4096);
    ASSERT_TRUE(device.copy_to_host(stream, host, memory).is_ok());
    Ticket ticket;
    ASSERT_TRUE(device.record(stream, ticket).is_ok());
    TicketDone done[1];
    while (device.poll(done) == 0) {
    }
    if (host[4095] != std::byte{9}) ++wrong;
  }
  EXPECT_GE(wrong, 10);
}

TEST(FakeGpu, WritesDownWhatIsFreedOrUnpinnedUnderACopy) {
  FakeGpu gpu;
  FakeDevice device(gpu);
  const StreamHandle stream = device.create_stream();
  HostPages pages(4096);
  DeviceSpan memory;
  ASSERT_TRUE(device.allocate(4096, memory).is_ok());
  ASSERT_TRUE(device.pin(pages.span()).is_ok());
  ASSERT_TRUE(device.copy_to_host(stream, pages.span(), memory).is_ok());
  ASSERT_TRUE(device.unpin(pages.span()).is_ok());
  ASSERT_TRUE(device.release(memory).is_ok());
  EXPECT_EQ(gpu.faults().size(), 2u);
  gpu.run_all();
  EXPECT_TRUE(gpu.is_broken());
}

TEST(FakeGpu, AStalledStreamStandsAndOthersGoOn) {
  FakeGpu gpu;
  FakeDevice device(gpu);
  const StreamHandle still = device.create_stream(), moving = device.create_stream();
  gpu.stall(still.value);
  Ticket first, second;
  ASSERT_TRUE(device.record(still, first).is_ok());
  ASSERT_TRUE(device.record(moving, second).is_ok());
  gpu.run_all();
  TicketDone done[4];
  ASSERT_EQ(device.poll(done), 1u);
  EXPECT_EQ(done[0].ticket, second);
  gpu.unstall(still.value);
  gpu.run_all();
  ASSERT_EQ(device.poll(done), 1u);
  EXPECT_EQ(done[0].ticket, first);
}

}  // namespace
}  // namespace herring::testing
