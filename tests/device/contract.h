#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/device.h"
#include "cuda/kernels/tables.h"
#include "cuda/kernels/twins.h"
#include "device/host_pages.h"

/// The suite that every implementation of Device must pass. Include in exactly one file of a test binary and name the
/// implementation:
///
///   INSTANTIATE_TEST_SUITE_P(Fake, DeviceContract, ::testing::Values(DeviceFactory{"fake", make_fake_world}));
namespace herring::testing {

/// A device, and what somebody else does on it.
class DeviceWorld {
 public:
  virtual ~DeviceWorld() = default;
  virtual Device& device() = 0;
  /// Somebody else's kernel on a stream of theirs: fills `memory` with `value`, later. Done at the event.
  virtual ForeignEvent fill_later(DeviceSpan memory, std::byte value) = 0;
  /// A stream of theirs that is being captured; 0: this world has none.
  virtual ForeignStream captured_stream() { return {}; }
  virtual ForeignStream plain_stream() = 0;
  /// More than there is.
  virtual std::size_t too_much_memory() const = 0;
  /// More than may be pinned; 0: not known.
  virtual std::size_t too_much_pinned() const { return 0; }
  /// Breaks the device for good; false where this world cannot.
  virtual bool fail() { return false; }
  /// True where reading device memory from the host ends the process.
  virtual bool faults_on_host() const { return true; }
  /// What the device saw that no correct user does.
  virtual std::vector<std::string> faults() const { return {}; }
};

struct DeviceFactory {
  std::string name;
  /// Null with a reason where the implementation cannot run here: the tests are skipped and print it.
  std::function<std::unique_ptr<DeviceWorld>(std::string& reason)> make;
  friend std::ostream& operator<<(std::ostream& out, const DeviceFactory& factory) { return out << factory.name; }
};

class DeviceContract : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr std::size_t kMiB = 1 << 20;

  void SetUp() override {
    std::string reason;
    world_ = GetParam().make(reason);
    if (!world_) GTEST_SKIP() << reason;
    stream_ = device().create_stream();
  }
  void TearDown() override {
    if (!world_) return;
    for (const std::string& fault : world_->faults()) ADD_FAILURE() << fault;
  }

  Device& device() { return world_->device(); }

  static std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> data(bytes);
    for (std::byte& each : data) each = static_cast<std::byte>(random());
    return data;
  }

  DeviceSpan allocate(std::size_t bytes) {
    DeviceSpan memory;
    const Status status = device().allocate(bytes, memory);
    EXPECT_TRUE(status.is_ok()) << status.to_string();
    EXPECT_EQ(memory.bytes, bytes);
    return memory;
  }

  /// Polls, 30 s at most, until the ticket was handed out.
  Status finish(Ticket ticket) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!done_.contains(ticket.value)) {
      if (poll() == 0) std::this_thread::yield();
      if (std::chrono::steady_clock::now() > limit) return {Code::kTimeout, "ticket did not end"};
    }
    return done_.at(ticket.value);
  }
  std::size_t poll() {
    TicketDone batch[3];
    const std::size_t count = device().poll(batch);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_TRUE(done_.try_emplace(batch[i].ticket.value, batch[i].status).second) << "handed out twice";
    }
    return count;
  }
  Ticket record(StreamHandle stream) {
    Ticket ticket;
    Status status = Status::again();
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (status.is_again() && std::chrono::steady_clock::now() < limit) {
      status = device().record(stream, ticket);
      if (status.is_again()) poll();
    }
    EXPECT_TRUE(status.is_ok()) << status.to_string();
    return ticket;
  }
  void ok(const Status& status) { EXPECT_TRUE(status.is_ok()) << status.to_string(); }
  void settle(StreamHandle stream) { ok(finish(record(stream))); }

  void put(DeviceSpan to, std::span<const std::byte> from) {
    ok(device().copy_to_device(stream_, to, from));
    settle(stream_);
  }
  std::vector<std::byte> get(DeviceSpan from) {
    std::vector<std::byte> data(from.bytes);
    ok(device().copy_to_host(stream_, data, from));
    settle(stream_);
    return data;
  }

  std::unique_ptr<DeviceWorld> world_;
  StreamHandle stream_;
  std::map<std::uint64_t, Status> done_;
};

TEST_P(DeviceContract, BytesComeBackAsTheyWent) {
  const DeviceSpan memory = allocate(kMiB + 77);
  for (const auto& [offset, bytes] : std::vector<std::pair<std::size_t, std::size_t>>{
           {0, 0}, {0, 1}, {13, 15}, {1, 4096}, {4095, 70001}, {0, kMiB + 77}}) {
    const std::vector<std::byte> sent = pattern(bytes, bytes + 1);
    put(memory.subspan(offset, bytes), sent);
    EXPECT_EQ(get(memory.subspan(offset, bytes)), sent) << bytes << " bytes at " << offset;
  }
  ok(device().release(memory));
}

TEST_P(DeviceContract, CopiesInsideTheDevice) {
  const DeviceSpan memory = allocate(2 * kMiB);
  const std::vector<std::byte> sent = pattern(kMiB - 5, 3);
  put(memory.subspan(5, sent.size()), sent);
  ok(device().copy_inside(stream_, memory.subspan(kMiB + 1, sent.size()), memory.subspan(5, sent.size())));
  settle(stream_);
  EXPECT_EQ(get(memory.subspan(kMiB + 1, sent.size())), sent);
  ok(device().release(memory));
}

TEST_P(DeviceContract, HostCannotReadDeviceMemory) {
  if (!world_->faults_on_host()) GTEST_SKIP() << "this device's memory is the host's too";
  const DeviceSpan memory = allocate(4096);
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        const volatile char* const address = reinterpret_cast<const char*>(memory.address);
        static_cast<void>(*address);
        std::exit(0);
      },
      // A sanitizer turns the signal into an exit.
      [](int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != 0; }, "");
  ok(device().release(memory));
}

TEST_P(DeviceContract, TicketsEndAfterAllThatWasBeforeThem) {
  const DeviceSpan memory = allocate(4 * kMiB);
  const std::vector<std::byte> sent = pattern(4 * kMiB, 9);
  HostPages pages(4 * kMiB);
  ok(device().pin(pages.span()));
  put(memory, sent);
  std::vector<std::pair<Ticket, std::size_t>> tickets;
  constexpr std::size_t kPart = kMiB / 2;
  for (std::size_t at = 0; at < memory.bytes; at += kPart) {
    ok(device().copy_to_host(stream_, pages.span().subspan(at, kPart), memory.subspan(at, kPart)));
    tickets.emplace_back(record(stream_), at);
  }
  while (!tickets.empty()) {
    poll();
    std::erase_if(tickets, [&](const auto& each) {
      if (!done_.contains(each.first.value)) return false;
      EXPECT_EQ(std::memcmp(pages.span().data() + each.second, sent.data() + each.second, kPart), 0) << each.second;
      return true;
    });
  }
  ok(device().unpin(pages.span()));
  ok(device().release(memory));
}

TEST_P(DeviceContract, WaitsForSomebodyElsesEvent) {
  const DeviceSpan memory = allocate(kMiB);
  put(memory, std::vector<std::byte>(kMiB, std::byte{1}));
  const ForeignEvent ready = world_->fill_later(memory, std::byte{42});
  ok(device().wait_event(stream_, ready));
  EXPECT_EQ(get(memory), std::vector<std::byte>(kMiB, std::byte{42}));
  ok(device().release(memory));
}

TEST_P(DeviceContract, StreamsMeetByTickets) {
  const StreamHandle other = device().create_stream();
  const DeviceSpan memory = allocate(2 * kMiB);
  const DeviceSpan first = memory.subspan(0, kMiB), second = memory.subspan(kMiB, kMiB);
  const std::vector<std::byte> sent = pattern(kMiB, 11);
  put(second, std::vector<std::byte>(kMiB));
  ok(device().copy_to_device(other, first, sent));
  const Ticket written = record(other);
  ok(device().wait_ticket(stream_, written));
  ok(device().copy_inside(stream_, second, first));
  settle(stream_);
  EXPECT_EQ(get(second), sent);
  ok(finish(written));
  ok(device().wait_ticket(stream_, written));  // Done long ago: no wait.
  settle(stream_);
  ok(device().release(memory));
}

TEST_P(DeviceContract, TicketsAreBoundedAndComeOnceEach) {
  std::vector<Ticket> out;
  bool was_full = false;
  for (int i = 0; i < 100'000 && !was_full; ++i) {
    Ticket ticket;
    const Status status = device().record(stream_, ticket);
    was_full = status.is_again();
    if (!was_full) out.push_back(ticket);
  }
  EXPECT_TRUE(was_full) << "as many tickets as one likes";
  for (const Ticket ticket : out) ok(finish(ticket));
  Ticket again;
  ok(device().record(stream_, again));
  ok(finish(again));
}

TEST_P(DeviceContract, TooMuchMemoryIsAStatus) {
  DeviceSpan memory;
  const Status status = device().allocate(world_->too_much_memory(), memory);
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.to_string();
  EXPECT_NE(status.message().find(std::to_string(world_->too_much_memory())), std::string::npos) << status.message();
  EXPECT_TRUE(device().health().is_ok());
  const DeviceSpan small = allocate(4096);
  put(small, std::vector<std::byte>(4096, std::byte{7}));
  ok(device().release(small));
}

TEST_P(DeviceContract, SharedMemoryIsTheSameForAllWhoImportIt) {
  DeviceSpan own, imported;
  int descriptor = -1;
  ok(device().allocate_shared(3 * kMiB + 5, own, descriptor));
  ASSERT_GE(descriptor, 0);
  ASSERT_EQ(own.bytes, 3 * kMiB + 5);
  ok(device().import_shared(descriptor, own.bytes, imported));
  close(descriptor);
  ASSERT_NE(own.address, imported.address);
  ASSERT_EQ(imported.bytes, own.bytes);
  const std::vector<std::byte> sent = pattern(kMiB + 3, 21);
  put(own.subspan(2 * kMiB + 2, sent.size()), sent);
  EXPECT_EQ(get(imported.subspan(2 * kMiB + 2, sent.size())), sent);
  // Who made it goes first.
  ok(device().release(own));
  EXPECT_EQ(get(imported.subspan(2 * kMiB + 2, sent.size())), sent);
  ok(device().release(imported));
  EXPECT_FALSE(device().release(imported).is_ok());
}

TEST_P(DeviceContract, WhatIsNoSharedMemoryIsRefused) {
  DeviceSpan memory;
  int descriptor = -1;
  EXPECT_EQ(device().allocate_shared(world_->too_much_memory(), memory, descriptor).code(), Code::kUnavailable);
  EXPECT_EQ(descriptor, -1);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const Status status = device().import_shared(pipe[0], kMiB, memory);
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.to_string();
  for (const int end : pipe) close(end);
  EXPECT_TRUE(device().health().is_ok());
  ok(device().release(allocate(4096)));
}

TEST_P(DeviceContract, PinnedIsToldFromPlainAndDeviceMemory) {
  HostPages pages(kMiB), plain(kMiB);
  const DeviceSpan memory = allocate(4096);
  const auto at = [](const HostPages& where) { return reinterpret_cast<std::uint64_t>(where.span().data() + 100); };
  ok(device().pin(pages.span()));
  EXPECT_EQ(device().kind_of(at(pages)), PointerKind::kPinned);
  EXPECT_EQ(device().kind_of(at(plain)), PointerKind::kUnknown);
  EXPECT_EQ(device().kind_of(memory.address + 100), PointerKind::kDevice);
  EXPECT_FALSE(device().pin(pages.span()).is_ok()) << "twice";
  ok(device().unpin(pages.span()));
  EXPECT_EQ(device().kind_of(at(pages)), PointerKind::kUnknown);
  ok(device().pin(pages.span()));
  ok(device().unpin(pages.span()));
  ok(device().release(memory));
}

TEST_P(DeviceContract, RefusedPinningLeavesTheDeviceUsable) {
  if (world_->too_much_pinned() == 0) GTEST_SKIP() << "the limit is not known";
  HostPages pages(world_->too_much_pinned());
  const Status status = device().pin(pages.span());
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.to_string();
  const DeviceSpan memory = allocate(4096);
  put(memory, pages.span().subspan(0, 4096));
  EXPECT_EQ(get(memory), std::vector<std::byte>(4096));
  ok(device().release(memory));
}

TEST_P(DeviceContract, CaptureIsSeen) {
  bool answer = true;
  ok(device().is_capturing(world_->plain_stream(), answer));
  EXPECT_FALSE(answer);
  const ForeignStream captured = world_->captured_stream();
  if (captured.value == 0) GTEST_SKIP() << "no stream of this world is captured";
  ok(device().is_capturing(captured, answer));
  EXPECT_TRUE(answer);
}

TEST_P(DeviceContract, PackCastsScalesAndSeesWhatIsNotFinite) {
  constexpr std::uint32_t kElements = 50'003;
  std::vector<float> values(kElements);
  std::mt19937 random(5);
  for (float& each : values) each = std::uniform_real_distribution<float>(-1e5f, 1e5f)(random);
  values[0] = std::numeric_limits<float>::infinity();
  values[1] = std::numeric_limits<float>::quiet_NaN();
  values[2] = 1e-41f;
  const DeviceSpan source = allocate(kElements * 4), target = allocate(kElements * 2), table = allocate(4096),
                   flag = allocate(4);
  put(source, std::as_bytes(std::span(values)));
  put(flag, std::vector<std::byte>(4));
  cuda::PackParameters parameters;
  parameters.source_type = cuda::Element::kFloat32;
  parameters.target_type = cuda::Element::kBFloat16;
  parameters.scale = 0.5;
  std::vector<cuda::Tile> tiles;
  cuda::cut_tiles(source.address, target.address, kElements, parameters.source_type, parameters.target_type, tiles);
  put(table.subspan(0, tiles.size() * sizeof(cuda::Tile)), std::as_bytes(std::span(tiles)));
  parameters.tiles = table.address;
  parameters.tile_count = static_cast<std::uint32_t>(tiles.size());
  parameters.flag = flag.address;
  ok(device().launch(stream_, KernelId::kPack, std::as_bytes(std::span(&parameters, 1)), parameters.tile_count));
  settle(stream_);

  std::vector<std::byte> wanted(kElements * 2);
  std::vector<cuda::Tile> here;
  cuda::cut_tiles(reinterpret_cast<std::uint64_t>(values.data()), reinterpret_cast<std::uint64_t>(wanted.data()),
                  kElements, parameters.source_type, parameters.target_type, here);
  std::uint32_t seen = 0;
  cuda::pack_twin(parameters, here, &seen);
  EXPECT_EQ(seen, 1u);
  EXPECT_EQ(get(target), wanted);
  EXPECT_EQ(get(flag)[0], std::byte{1});
  for (const DeviceSpan each : {source, target, table, flag}) ok(device().release(each));
}

TEST_P(DeviceContract, SumsInTheFixedTree) {
  constexpr std::uint64_t kElements = 10'007;
  constexpr std::uint32_t kSources = 5;
  std::vector<std::vector<std::byte>> inputs;
  std::vector<DeviceSpan> memory;
  cuda::SumParameters parameters, here;
  std::mt19937 random(8);
  for (std::uint32_t i = 0; i < kSources; ++i) {
    std::vector<float> values(kElements);
    for (float& each : values) each = std::normal_distribution<float>(0, 1000)(random);
    const auto bytes = std::as_bytes(std::span(values));
    inputs.emplace_back(bytes.begin(), bytes.end());
    memory.push_back(allocate(bytes.size()));
    put(memory.back(), inputs.back());
    parameters.sources[i] = memory.back().address;
    here.sources[i] = reinterpret_cast<std::uint64_t>(inputs.back().data());
  }
  std::vector<std::byte> wanted(kElements * 4);
  parameters.target = memory[0].address;  // In place.
  here.target = reinterpret_cast<std::uint64_t>(wanted.data());
  here.elements = parameters.elements = kElements;
  here.source_count = parameters.source_count = kSources;
  here.average_over = parameters.average_over = kSources;
  ok(device().launch(stream_, KernelId::kSum, std::as_bytes(std::span(&parameters, 1)), 8));
  settle(stream_);
  cuda::sum_twin(here);
  EXPECT_EQ(get(memory[0]), wanted);
  for (const DeviceSpan each : memory) ok(device().release(each));
}

TEST_P(DeviceContract, FailureEndsEveryTicketWithItsReason) {
  HostPages pages(kMiB);
  const DeviceSpan memory = allocate(kMiB);
  ok(device().copy_to_host(stream_, pages.span(), memory));
  Ticket ticket;
  ok(device().record(stream_, ticket));
  if (!world_->fail()) GTEST_SKIP() << "this world does not break its device";
  const Status status = finish(ticket);
  EXPECT_EQ(status.code(), Code::kTransport) << status.to_string();
  EXPECT_FALSE(device().health().is_ok());
  EXPECT_EQ(device().copy_to_host(stream_, pages.span(), memory).code(), Code::kTransport);
  EXPECT_EQ(device().record(stream_, ticket).code(), Code::kTransport);
  DeviceSpan more;
  EXPECT_FALSE(device().allocate(4096, more).is_ok());
}

TEST_P(DeviceContract, CopiesOfUnequalSizesAreRefused) {
  const DeviceSpan memory = allocate(4096);
  std::vector<std::byte> host(4095);
  EXPECT_EQ(device().copy_to_host(stream_, host, memory).code(), Code::kInvalidArgument);
  EXPECT_EQ(device().copy_to_device(stream_, memory, host).code(), Code::kInvalidArgument);
  EXPECT_TRUE(device().health().is_ok());
  ok(device().release(memory));
}

}  // namespace herring::testing
