// A tensor on a device in parts: what the runtime would do with them is done here, on a fake device under seeds.
#include "runtime/device_parts.h"

#include <gtest/gtest.h>

#include <random>

#include "device/fake_device.h"

namespace herring::runtime {
namespace {

using namespace std::chrono_literals;
using testing::FakeDevice;
using testing::FakeGpu;

constexpr std::uint64_t kPartBytes = 4096;

class DevicePartsTest : public ::testing::Test {
 protected:
  void SetUp() override { open(1); }

  void open(std::uint64_t seed) {
    parts_.reset();
    device_.reset();
    gpu_ = std::make_unique<FakeGpu>(testing::FakeGpuOptions{.seed = seed});
    device_ = std::make_unique<FakeDevice>(*gpu_);
    out_ = device_->create_stream();
    back_ = device_->create_stream();
  }

  /// A tensor that holds 0, 1, 2, ... (as bytes), and host memory that holds something else.
  void begin(std::size_t bytes) {
    ASSERT_TRUE(device_->allocate(bytes, tensor_).is_ok());
    host_.assign((bytes + kPartBytes - 1) / kPartBytes * kPartBytes, std::byte{0xEE});
    std::byte* const there = gpu_->alias(tensor_.address, bytes);
    for (std::size_t i = 0; i < bytes; ++i) there[i] = static_cast<std::byte>(i);
    DeviceParts::Options options;
    options.out = out_;
    options.back = back_;
    options.tensor = tensor_;
    options.host = host_;
    options.part_bytes = kPartBytes;
    options.deadline = now_ + 10s;
    parts_ = DeviceParts::start(now_, *device_, options);
  }

  /// As the runtime: adds 1 to each byte of a part that is there.
  bool reduce_next() {
    const std::uint64_t end = std::min<std::uint64_t>(reduced_ + kPartBytes, tensor_.bytes);
    if (reduced_ == tensor_.bytes || parts_->bytes_there() < end) return false;
    for (std::uint64_t i = reduced_; i < end; ++i) {
      EXPECT_EQ(host_[i], static_cast<std::byte>(i)) << "not there yet";
      host_[i] = static_cast<std::byte>(i + 1);
    }
    parts_->on_result(reduced_, end - reduced_);
    reduced_ = end;
    return true;
  }

  void expect_result() {
    const std::byte* const there = gpu_->alias(tensor_.address, tensor_.bytes);
    for (std::size_t i = 0; i < tensor_.bytes; ++i) ASSERT_EQ(there[i], static_cast<std::byte>(i + 1)) << i;
  }

  Instant now_ = Instant{} + 1h;
  std::unique_ptr<FakeGpu> gpu_;
  std::unique_ptr<FakeDevice> device_;
  StreamHandle out_, back_;
  DeviceSpan tensor_;
  std::vector<std::byte> host_;
  std::uint64_t reduced_ = 0;
  std::shared_ptr<DeviceParts> parts_;
};

TEST_F(DevicePartsTest, EachPartIsReducedWhenItIsThereAndComesBack) {
  bool overlapped = false;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    open(seed);
    reduced_ = 0;
    std::mt19937_64 random(seed);
    begin(std::array{1ul, kPartBytes, kPartBytes + 1, 10 * kPartBytes - 7}[seed % 4]);
    for (int turn = 0; turn < 100'000 && !parts_->is_released(); ++turn) {
      parts_->run(now_);
      if (random() % 3 == 0) reduce_next();
      overlapped |= reduced_ > 0 && parts_->bytes_there() < tensor_.bytes;
      if (reduced_ == tensor_.bytes && random() % 2 == 0) parts_->host_ended(Status::ok());
    }
    ASSERT_TRUE(parts_->has_ended());
    ASSERT_TRUE(parts_->is_released());
    EXPECT_TRUE(parts_->status().is_ok());
    expect_result();
    EXPECT_TRUE(gpu_->faults().empty()) << gpu_->faults().front();
  }
  EXPECT_TRUE(overlapped) << "no part was reduced before all of them were there";
}

TEST_F(DevicePartsTest, AKernelThatDoesNotEndIsATimeOutAndItsMemoryStaysInUse) {
  begin(3 * kPartBytes);
  gpu_->stall(out_.value);
  for (int i = 0; i < 100; ++i) parts_->run(now_);
  EXPECT_EQ(parts_->bytes_there(), 0u);
  const DeviceParts::Turn turn = parts_->run(now_ + 10s);
  EXPECT_TRUE(turn.has_news) << "the runtime has to hear of it";
  EXPECT_EQ(parts_->status().code(), Code::kTimeout);
  EXPECT_TRUE(parts_->has_ended());
  EXPECT_FALSE(parts_->is_released()) << "a copy may still write to it";
  parts_->host_ended({Code::kCancelled, "not begun"});
  gpu_->unstall(out_.value);
  for (int i = 0; i < 10'000 && !parts_->is_released(); ++i) parts_->run(now_ + 11s);
  EXPECT_TRUE(parts_->is_released());
}

TEST_F(DevicePartsTest, AnOperationThatFailsOnTheHostEndsAndReleasesTheMemory) {
  begin(8 * kPartBytes);
  while (!reduce_next()) parts_->run(now_);
  parts_->host_ended({Code::kPeerLost, "worker 3 died"});
  for (int i = 0; i < 10'000 && !parts_->is_released(); ++i) parts_->run(now_);
  EXPECT_TRUE(parts_->is_released());
  EXPECT_EQ(parts_->status().code(), Code::kPeerLost);
  EXPECT_TRUE(gpu_->faults().empty());
}

TEST_F(DevicePartsTest, ADeviceThatFailsEndsIt) {
  begin(8 * kPartBytes);
  while (!reduce_next()) parts_->run(now_);
  gpu_->fail();
  EXPECT_TRUE(parts_->run(now_).has_news);
  EXPECT_FALSE(parts_->status().is_ok());
  EXPECT_TRUE(parts_->has_ended());
}

TEST_F(DevicePartsTest, NothingIsNoTensorInParts) {
  DeviceParts::Options options;
  options.part_bytes = kPartBytes;
  EXPECT_THROW(static_cast<void>(DeviceParts::start(now_, *device_, options)), Error);
}

}  // namespace
}  // namespace herring::runtime
