// Copies of arrays on GPUs for callers that wait for them, on a fake device under seeds.
#include "runtime/device_copies.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "cuda/kernels/twins.h"
#include "device/fake_device.h"

namespace herring::runtime {
namespace {

using namespace std::chrono_literals;
using testing::FakeDevice;
using testing::FakeGpu;

Instant in(Duration time) { return std::chrono::steady_clock::now() + time; }

class DeviceCopiesTest : public ::testing::Test {
 protected:
  explicit DeviceCopiesTest(std::uint64_t seed = 1) : gpu_({.seed = seed}) {
    auto device = std::make_unique<FakeDevice>(gpu_);
    EXPECT_TRUE(device->allocate(kBytes, array_).is_ok());
    copies_ = std::make_shared<DeviceCopies>(std::move(device));
    std::byte* const there = gpu_.alias(array_.address, kBytes);
    for (std::size_t i = 0; i < kBytes; ++i) there[i] = static_cast<std::byte>(i);
  }
  ~DeviceCopiesTest() override { EXPECT_TRUE(gpu_.faults().empty()); }

  static constexpr std::size_t kBytes = 300'000;
  FakeGpu gpu_;
  std::shared_ptr<DeviceCopies> copies_;
  DeviceSpan array_;
  std::vector<std::byte> host_ = std::vector<std::byte>(kBytes, std::byte{0xEE});
};

TEST_F(DeviceCopiesTest, BytesGoAndComeBack) {
  DeviceCopies::Queue queue(copies_);
  ASSERT_TRUE(queue.to_host(host_, array_, nullptr).is_ok());
  Status status;
  ASSERT_TRUE(queue.wait(in(10s), status));
  EXPECT_TRUE(status.is_ok());
  for (std::size_t i = 0; i < kBytes; ++i) {
    ASSERT_EQ(host_[i], static_cast<std::byte>(i)) << i;
    host_[i] = static_cast<std::byte>(i + 1);
  }
  ASSERT_TRUE(queue.to_device(array_, host_, nullptr).is_ok());
  ASSERT_TRUE(queue.wait(in(10s), status));
  const std::byte* const there = gpu_.alias(array_.address, kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) ASSERT_EQ(there[i], static_cast<std::byte>(i + 1)) << i;
}

TEST_F(DeviceCopiesTest, WhatACopyTouchesIsKeptUntilItEndsAlsoWhereNobodyWaits) {
  ASSERT_TRUE(copies_->pin(host_).is_ok());
  const auto owner = std::make_shared<int>();
  std::uint64_t stream = 0;
  {
    DeviceCopies::Queue queue(copies_);
    stream = queue.stream();
    gpu_.stall(stream);
    ASSERT_TRUE(queue.to_host(host_, array_, owner).is_ok());
    Status status;
    EXPECT_FALSE(queue.wait(in(2ms), status));
  }
  EXPECT_EQ(owner.use_count(), 2);
  DeviceCopies::Queue other(copies_);
  EXPECT_NE(other.stream(), stream) << "somebody else's copy is there";
  Status status;
  gpu_.unstall(stream);
  for (int i = 0; i < 10'000 && owner.use_count() > 1; ++i) EXPECT_TRUE(other.has_ended(status));
  EXPECT_EQ(owner.use_count(), 1);
  EXPECT_EQ(DeviceCopies::Queue(copies_).stream(), stream) << "it is used again";
}

/// What a framework's stream has before and after.
class FrameworksStreamTest : public DeviceCopiesTest, public ::testing::WithParamInterface<std::uint64_t> {
 protected:
  FrameworksStreamTest() : DeviceCopiesTest(GetParam()) {
    EXPECT_TRUE(copies_->pin(host_).is_ok());
    gpu_.launch(stream_, [this] {
      for (std::size_t i = 0; i < kMoved; ++i) there()[i] = static_cast<std::byte>(i * 7);
    });
  }
  std::byte* there() { return gpu_.alias(array_.address, kBytes); }
  void end() {
    gpu_.launch(stream_, [this] {
      for (std::size_t i = 0; i < kMoved; ++i) seen_.push_back(there()[kMoved + 3 + i]);
      std::fill_n(there(), kBytes, std::byte{0x55});
    });
    gpu_.run_all();
    ASSERT_EQ(seen_.size(), kMoved);
    for (std::size_t i = 0; i < kMoved; ++i) ASSERT_EQ(seen_[i], static_cast<std::byte>(i * 7)) << i;
  }

  static constexpr std::size_t kMoved = 100'001;
  static constexpr std::size_t kTable = 280'000;
  const std::uint64_t stream_ = gpu_.create_stream();
  std::vector<std::byte> seen_;
};

TEST_P(FrameworksStreamTest, AKernelReadsItsTableAndComesInItsOrder) {
  std::vector<cuda::Tile> tiles;
  cuda::cut_tiles(array_.address, array_.address + kMoved + 3, kMoved, cuda::Element::kUInt8, cuda::Element::kUInt8,
                  tiles);
  const std::span<const std::byte> table = std::as_bytes(std::span(tiles));
  std::ranges::copy(table, host_.begin());
  cuda::PackParameters parameters;
  parameters.tiles = array_.address + kTable;
  parameters.tile_count = static_cast<std::uint32_t>(tiles.size());
  parameters.source_type = parameters.target_type = cuda::Element::kUInt8;
  const auto owner = std::make_shared<int>();
  gpu_.stall(stream_);
  {
    DeviceCopies::Queue queue(copies_, ForeignStream{stream_});
    ASSERT_TRUE(queue.to_device({parameters.tiles, table.size()}, std::span(host_).first(table.size()), owner).is_ok());
    ASSERT_TRUE(queue.launch(KernelId::kPack, std::as_bytes(std::span(&parameters, 1)), 2).is_ok());
  }
  EXPECT_EQ(owner.use_count(), 2) << "the table is still read";
  gpu_.unstall(stream_);
  end();
  DeviceCopies::Queue other(copies_);
  EXPECT_NE(other.stream(), stream_) << "that one is the framework's";
  Status status;
  for (int i = 0; i < 10'000 && owner.use_count() > 1; ++i) EXPECT_TRUE(other.has_ended(status));
  EXPECT_EQ(owner.use_count(), 1);
}

TEST_P(FrameworksStreamTest, CopiesInsideTheDeviceComeInItsOrder) {
  DeviceCopies::Queue queue(copies_, ForeignStream{stream_});
  for (std::size_t begin = 0; begin < kMoved; begin += 9'999) {
    const std::size_t bytes = std::min<std::size_t>(9'999, kMoved - begin);
    ASSERT_TRUE(queue.inside(array_.subspan(kMoved + 3 + begin, bytes), array_.subspan(begin, bytes)).is_ok());
  }
  end();
  Status status;
  EXPECT_TRUE(queue.wait(in(10s), status));
  EXPECT_TRUE(status.is_ok());
}

TEST_P(FrameworksStreamTest, ADeviceThatHasFailedSaysSo) {
  DeviceCopies::Queue queue(copies_, ForeignStream{stream_});
  gpu_.fail();
  Status status;
  EXPECT_TRUE(queue.wait(in(10s), status));
  EXPECT_FALSE(queue.inside(array_.subspan(0, 10), array_.subspan(10, 10)).is_ok());
  const cuda::PackParameters parameters;
  EXPECT_FALSE(queue.launch(KernelId::kPack, std::as_bytes(std::span(&parameters, 1)), 1).is_ok());
  EXPECT_THROW(DeviceCopies::Queue(copies_, ForeignStream{stream_}), Error);
}

INSTANTIATE_TEST_SUITE_P(Seeds, FrameworksStreamTest, ::testing::Values(1, 2, 3, 4));

TEST_F(DeviceCopiesTest, OwnersMayUseTheDeviceWhenTheyGo) {
  struct Unpins {
    std::shared_ptr<DeviceCopies> copies;
    std::span<std::byte> memory;
    ~Unpins() { copies->unpin(memory); }
  };
  ASSERT_TRUE(copies_->pin(host_).is_ok());
  {
    DeviceCopies::Queue queue(copies_);
    ASSERT_TRUE(queue.to_host(host_, array_, std::make_shared<Unpins>(copies_, std::span(host_))).is_ok());
  }
  DeviceCopies::Queue other(copies_);
  Status status;
  for (int i = 0; i < 10'000 && gpu_.pinned_bytes() > 0; ++i) EXPECT_TRUE(other.has_ended(status));
  EXPECT_EQ(gpu_.pinned_bytes(), 0u);
}

TEST_F(DeviceCopiesTest, ADeviceThatFailsEndsAllCopies) {
  DeviceCopies::Queue queue(copies_);
  gpu_.stall(queue.stream());
  ASSERT_TRUE(queue.to_host(host_, array_, nullptr).is_ok());
  gpu_.fail();
  Status status;
  ASSERT_TRUE(queue.wait(in(10s), status));
  EXPECT_NE(status.message().find("illegal address"), std::string::npos) << status.message();
  EXPECT_FALSE(queue.to_host(host_, array_, nullptr).is_ok());
  EXPECT_THROW(DeviceCopies::Queue{copies_}, Error);
}

TEST_F(DeviceCopiesTest, ACopyToMemoryThatIsNotPinnedBeginsWhenNothingIsBeforeIt) {
  // The driver would wait in the call, for a kernel that may never end, and nobody else could use the device.
  const auto owner = std::make_shared<int>();
  DeviceCopies::Queue queue(copies_);
  gpu_.stall(queue.stream());
  const std::uint64_t kernel = gpu_.create_event();
  gpu_.record(kernel, queue.stream());
  ASSERT_TRUE(queue.to_host(host_, array_, owner).is_ok());
  Status status;
  EXPECT_FALSE(queue.wait(in(2ms), status));
  EXPECT_EQ(gpu_.waiting(), 2u) << "the kernel and a mark; no copy";
  gpu_.unstall(queue.stream());
  ASSERT_TRUE(queue.wait(in(10s), status));
  EXPECT_TRUE(status.is_ok());
  for (std::size_t i = 0; i < kBytes; ++i) ASSERT_EQ(host_[i], static_cast<std::byte>(i)) << i;
  EXPECT_EQ(owner.use_count(), 1);
  // Who does not wait for it gets nothing, and leaves nothing behind.
  gpu_.stall(queue.stream());
  { ASSERT_TRUE(DeviceCopies::Queue(copies_).to_device(array_, host_, owner).is_ok()); }
  EXPECT_EQ(owner.use_count(), 1);
}

TEST_F(DeviceCopiesTest, MoreCopiesThanTheDeviceHasTicketsWaitInTurn) {
  ASSERT_TRUE(copies_->pin(host_).is_ok());
  const auto owner = std::make_shared<int>();
  constexpr std::size_t kCopies = 3 * FakeDevice::kMostTickets;
  const std::size_t piece = kBytes / kCopies;
  std::vector<std::unique_ptr<DeviceCopies::Queue>> queues;
  for (std::size_t i = 0; i < kCopies; ++i) {
    queues.push_back(std::make_unique<DeviceCopies::Queue>(copies_));
    gpu_.stall(queues[i]->stream());
    const auto to = std::span(host_).subspan(i * piece, piece);
    ASSERT_TRUE(queues[i]->to_host(to, array_.subspan(i * piece, piece), owner).is_ok());
  }
  Status status;
  EXPECT_FALSE(queues.back()->wait(in(2ms), status)) << "a kernel that does not end is no hang";
  for (const auto& queue : queues) gpu_.unstall(queue->stream());
  queues.front().reset();
  queues.pop_back();  // Without a ticket so far.
  for (std::size_t i = 1; i < queues.size(); ++i) ASSERT_TRUE(queues[i]->wait(in(10s), status)) << i;
  for (int i = 0; i < 10'000 && owner.use_count() > 1; ++i) EXPECT_TRUE(queues[1]->has_ended(status));
  EXPECT_EQ(owner.use_count(), 1);
  for (std::size_t i = 0; i < kCopies * piece; ++i) ASSERT_EQ(host_[i], static_cast<std::byte>(i)) << i;
}

TEST_F(DeviceCopiesTest, AForkedChildIsRefusedAlsoWhereAThreadHadTheLock) {
  DeviceCopies::Queue queue(copies_);
  ASSERT_TRUE(queue.to_host(host_, array_, nullptr).is_ok());
  std::atomic<bool> is_over = false;
  std::thread other([&] {
    DeviceCopies::Queue mine(copies_);
    for (Status status; !is_over;) EXPECT_TRUE(mine.has_ended(status));
  });
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      Status status;
      bool is_capturing = false;
      const bool are_refused = queue.has_ended(status) && !status.is_ok() && !copies_->pin(host_).is_ok() &&
                               !queue.to_host(host_, array_, nullptr).is_ok() &&
                               !queue.is_capturing(is_capturing).is_ok();
      try {
        DeviceCopies::Queue another(copies_);
      } catch (const Error& error) {
        _exit(are_refused && error.status().message().find("fork") != std::string::npos ? 0 : 1);
      }
      _exit(2);
    }
    int how = -1;
    ASSERT_EQ(waitpid(child, &how, 0), child);
    EXPECT_EQ(how, 0);
  }
  is_over = true;
  other.join();
  Status status;
  EXPECT_TRUE(queue.wait(in(10s), status));
}

TEST_F(DeviceCopiesTest, AForkedChildLeavesTheDeviceAlone) {
  ASSERT_TRUE(copies_->pin(host_).is_ok());
  auto queue = std::make_unique<DeviceCopies::Queue>(copies_);
  ASSERT_TRUE(queue->to_host(host_, array_, nullptr).is_ok());
  const std::size_t waiting = gpu_.waiting();
  const pid_t child = fork();
  if (child == 0) {
    queue.reset();
    copies_->unpin(host_);
    _exit(gpu_.waiting() == waiting && gpu_.pinned_bytes() == kBytes && gpu_.faults().empty() ? 0 : 1);
  }
  int how = -1;
  ASSERT_EQ(waitpid(child, &how, 0), child);
  EXPECT_EQ(how, 0);
  Status status;
  EXPECT_TRUE(queue->wait(in(10s), status));
}

/// A framework's stream, with a kernel that writes the array late, and one that reads it late.
class DeviceCopiesOfAFramework : public DeviceCopiesTest, public ::testing::WithParamInterface<std::uint64_t> {
 protected:
  DeviceCopiesOfAFramework() : DeviceCopiesTest(GetParam()) {}

  void fill_late(std::byte value) {
    for (int i = 0; i < 100; ++i) gpu_.launch(stream_, [] {});
    gpu_.launch(stream_, [this, value] { std::memset(there(), static_cast<int>(value), kBytes); });
  }
  std::byte* there() const { return gpu_.alias(array_.address, kBytes); }

  const std::uint64_t stream_ = gpu_.create_stream();
};

TEST_P(DeviceCopiesOfAFramework, CopiesLieBetweenItsKernels) {
  for (const bool is_pinned : {false, true}) {
    if (is_pinned) {
      ASSERT_TRUE(copies_->pin(host_).is_ok());
    }
    using Way = DeviceCopies::Way;
    DeviceCopies::Queue out(copies_, is_pinned ? Way::kOut : Way::kOwn);
    fill_late(std::byte{7});
    ASSERT_TRUE(out.after({stream_}).is_ok());
    ASSERT_TRUE(out.to_host(host_, array_, nullptr).is_ok());
    Status status;
    ASSERT_TRUE(out.wait(in(10s), status));
    ASSERT_EQ(host_, std::vector<std::byte>(kBytes, std::byte{7}));

    std::fill(host_.begin(), host_.end(), std::byte{9});
    auto back = std::make_unique<DeviceCopies::Queue>(copies_, is_pinned ? Way::kBack : Way::kOwn);
    ASSERT_TRUE(back->to_device(array_, host_, nullptr).is_ok());
    if (!is_pinned) {
      EXPECT_TRUE(back->before({stream_}).is_again()) << "it has not begun";
      ASSERT_TRUE(back->wait(in(10s), status));
    }
    ASSERT_TRUE(back->before({stream_}).is_ok());
    back.reset();
    std::vector<std::byte> seen(kBytes);
    gpu_.launch(stream_, [&] { std::memcpy(seen.data(), there(), kBytes); });
    gpu_.run_all();
    ASSERT_EQ(seen, std::vector<std::byte>(kBytes, std::byte{9}));
  }
}

TEST_P(DeviceCopiesOfAFramework, WhereTicketsRunOutItIsAskedAgain) {
  ASSERT_TRUE(copies_->pin(host_).is_ok());
  gpu_.stall(stream_);
  std::vector<std::unique_ptr<DeviceCopies::Queue>> queues;
  Status status;
  while (status.is_ok()) {
    queues.push_back(std::make_unique<DeviceCopies::Queue>(copies_, DeviceCopies::Way::kOut));
    status = queues.back()->after({stream_});
    if (!status.is_ok()) break;
    ASSERT_TRUE(queues.back()->to_host(host_, array_, nullptr).is_ok());
  }
  ASSERT_TRUE(status.is_again()) << status.message();
  EXPECT_EQ(queues.size(), FakeDevice::kMostTickets / 2 + 1);
  gpu_.unstall(stream_);
  for (std::size_t i = 0; i + 1 < queues.size(); ++i) ASSERT_TRUE(queues[i]->wait(in(10s), status)) << i;
  ASSERT_TRUE(queues.back()->after({stream_}).is_ok());
  ASSERT_TRUE(queues.back()->to_host(host_, array_, nullptr).is_ok());
  ASSERT_TRUE(queues.back()->wait(in(10s), status));
  EXPECT_EQ(queues.front()->stream(), queues.back()->stream()) << "all share one";
}

INSTANTIATE_TEST_SUITE_P(Seeds, DeviceCopiesOfAFramework, ::testing::Range<std::uint64_t>(1, 21));

TEST_F(DeviceCopiesTest, ThreadsDoNotWaitForEachOther) {
  DeviceCopies::Queue stalled(copies_);
  gpu_.stall(stalled.stream());
  std::vector<std::byte> never(kBytes);
  ASSERT_TRUE(stalled.to_host(never, array_, nullptr).is_ok());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this] {
      for (int round = 0; round < 20; ++round) {
        std::vector<std::byte> host(kBytes);
        DeviceCopies::Queue queue(copies_);
        ASSERT_TRUE(queue.to_host(host, array_, nullptr).is_ok());
        Status status;
        ASSERT_TRUE(queue.wait(in(30s), status));
        for (std::size_t k = 0; k < kBytes; ++k) ASSERT_EQ(host[k], static_cast<std::byte>(k));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  gpu_.unstall(stalled.stream());
  Status status;
  EXPECT_TRUE(stalled.wait(in(10s), status));
}

struct Block {
  std::size_t size;
  std::size_t bytes() const { return size; }
};

TEST(IdlePool, KeepsAsMuchAsWasEverInUseAtOnce) {
  IdlePool<Block> pool;
  const auto any = [](const Block&) { return true; };
  std::vector<std::unique_ptr<Block>> used;
  for (const std::size_t size : {100, 200, 300}) used.push_back(std::make_unique<Block>(size));
  for (const auto& block : used) pool.lend(*block);
  for (auto& block : used) pool.give_back(std::move(block));
  EXPECT_EQ(pool.find(301, any), nullptr);
  EXPECT_EQ(pool.find(49, any), nullptr) << "a hundred would be wasted on it";
  auto block = pool.find(150, any);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(block->bytes(), 200u) << "the smallest that is large enough";
  EXPECT_EQ(pool.find(150, [](const Block& each) { return each.bytes() != 300; }), nullptr);
  pool.lend(*block);
  pool.give_back(std::move(block));
  auto large = std::make_unique<Block>(250);  // Never counted as used together with the others.
  pool.lend(*large);
  pool.give_back(std::move(large));
  EXPECT_EQ(pool.oldest()->bytes(), 200u) << "100 and 300 had to go, which were used least lately";
  EXPECT_EQ(pool.oldest()->bytes(), 250u);
  EXPECT_EQ(pool.oldest(), nullptr);
}

}  // namespace
}  // namespace herring::runtime
