#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/fake_collectives.h"
#include "device/fake_device.h"
#include "runtime/job.h"
#include "runtime/peer_group.h"

/// A rank of a PeerGroup on a fake device, in a job of real runtimes.
namespace herring::runtime::testing {

using herring::testing::FakeCollectives;
using herring::testing::FakeDevice;
using herring::testing::FakeGpu;
using herring::testing::FakeNeighbors;

inline constexpr GroupId kGroup{kFirstFrameworkGroup + 3};

/// One rank's device, group and tensors.
class PeerMember {
 public:
  explicit PeerMember(Runtime& runtime, std::size_t memory_bytes = 256 << 20)
      : runtime_(runtime), gpu_({.seed = runtime.rank() + 7, .memory_bytes = memory_bytes, .largest_piece = 1 << 20}) {
    options_.runtime = std::shared_ptr<Communicator>(std::shared_ptr<void>(), &runtime);
    options_.group = kGroup;
    std::vector<std::uint32_t> members;
    for (std::uint32_t rank = 0; rank < runtime.size(); ++rank) members.push_back(rank);
    std::string obstacle;
    options_.places = peer_places(members, runtime.worker_hosts(), runtime.rank(), obstacle);
    EXPECT_EQ(obstacle, "");
    options_.host_memory = [&runtime](std::size_t bytes) { return runtime.allocate(bytes); };
    options_.open = [this](StreamHandle& in, StreamHandle& back) {
      auto device = std::make_unique<FakeDevice>(gpu_, runtime_.rank());
      device_ = device.get();
      in = in_ = device->create_stream();
      back = device->create_stream();
      return device;
    };
    options_.memory_bytes = 1 << 20;
    options_.timeout = kPatience;
  }

  /// Sums by the fake of NCCL. `first`: done before this rank connects. `is_astray`: it connects to nobody.
  void use_library(std::function<void()> first = {}, bool is_astray = false) {
    FakeCollectives::World world{&gpu_, &mutex_, [kept = faults_](const std::string& text) { kept->push_back(text); }};
    world.neighbors = std::make_shared<FakeNeighbors>();
    world.has_failed = has_failed_;
    world.is_stuck = is_stuck_;
    world.is_abort_held = is_abort_held_;
    options_.library = std::make_shared<FakeLibrary>(std::move(world), std::move(first), is_astray);
    options_.watch = {.patience = std::chrono::milliseconds(200), .grace = std::chrono::milliseconds(300)};
  }
  /// The stream of its sums, by the order in which streams are made.
  std::uint64_t sums_stream() const { return in_.value + 2; }
  std::uint64_t gathers_stream() const { return sums_stream() + 1; }
  /// The library says from here on that it has failed, and no kernel of this rank ends.
  void break_library() { *has_failed_ = true; }
  /// Whether communicators of this rank come to their end.
  void set_stuck(bool is_stuck) { *is_stuck_ = is_stuck; }
  /// Whether communicators of this rank, where they are aborted, go on as before for now.
  void hold_abort(bool is_held) { *is_abort_held_ = is_held; }
  void set_timeout(Duration timeout) { options_.timeout = timeout; }

  void open() { group_ = PeerGroup::open(std::move(options_)); }
  void close() { group_.reset(); }

  OpDescriptor descriptor(DataType type, ReduceOp op, std::size_t elements) const {
    OpDescriptor descriptor;
    descriptor.dtype = type;
    descriptor.reduce = op;
    const auto count = static_cast<std::int64_t>(elements);
    set_shape(descriptor, std::span(&count, 1));
    return descriptor;
  }

  /// Of bits drawn by the rank and `number`, without NaN.
  std::vector<std::byte> values(const OpDescriptor& descriptor, std::uint64_t number) const {
    std::mt19937_64 random(number * 100 + runtime_.rank());
    std::vector<std::byte> bytes(descriptor.op_bytes);
    for (std::byte& each : bytes) each = static_cast<std::byte>(random() % 0x70);
    return bytes;
  }

  void submit(const OpDescriptor& descriptor, std::span<const std::byte> bytes, Duration timeout = kPatience) {
    DeviceSpan tensor;
    device_->allocate(bytes.size(), tensor).or_throw();
    std::ranges::copy(bytes, gpu_.alias(tensor.address, bytes.size()));
    const std::size_t index = ends_.size();
    ends_.emplace_back();
    tensors_.push_back(tensor);
    released_.push_back(false);
    PeerGroup::Job job;
    job.descriptor = descriptor;
    job.tensor = tensor;
    job.timeout = timeout;
    job.complete = [this, index](const Status& status) { ends_[index] = status; };
    job.release = [this, index] { released_[index] = true; };
    const Status status = group_->submit(std::chrono::steady_clock::now(), std::move(job));
    if (!status.is_ok()) ends_[index] = status;
  }

  /// Until all that was submitted has ended, and is released where that is asked for.
  void finish(bool with_release = true) {
    const Instant limit = testing::in_seconds(30);
    const auto is_over = [&] {
      for (std::size_t i = 0; i < ends_.size(); ++i) {
        if (!ends_[i] || (with_release && ends_[i]->is_ok() && !released_[i])) return false;
      }
      return true;
    };
    while (!is_over() && std::chrono::steady_clock::now() < limit) {
      group_->run(std::chrono::steady_clock::now());
      std::this_thread::yield();
    }
    if (!is_over()) throw std::runtime_error("it never ended");
  }

  std::vector<std::byte> result(std::size_t index) {
    const std::byte* const there = gpu_.alias(tensors_[index].address, tensors_[index].bytes);
    return {there, there + tensors_[index].bytes};
  }
  bool is_released(std::size_t index) const { return released_[index]; }
  const Status& end(std::size_t index) const { return *ends_[index]; }
  FakeGpu& gpu() { return gpu_; }
  const std::vector<std::string>& faults() const { return faults_->empty() ? gpu_.faults() : *faults_; }
  PeerGroup& group() { return *group_; }
  StreamHandle in() const { return in_; }

 private:
  static constexpr std::chrono::seconds kPatience{20};
  struct FakeLibrary final : DeviceCollectivesLibrary {
    FakeLibrary(FakeCollectives::World its_world, std::function<void()> done_first, bool is_it_astray)
        : world(std::move(its_world)), first(std::move(done_first)), is_astray(is_it_astray) {}
    std::string description() const override { return "a fake NCCL"; }
    Id make_id() override { return FakeCollectives::make_id(); }
    std::unique_ptr<DeviceCollectives> connect(const Id& id, std::uint32_t members, std::uint32_t index,
                                               std::uint32_t) override {
      if (first) first();
      return std::make_unique<FakeCollectives>(world, is_astray ? make_id() : id, members, index);
    }
    const FakeCollectives::World world;
    const std::function<void()> first;
    const bool is_astray;
  };

  Runtime& runtime_;
  FakeGpu gpu_;
  std::recursive_mutex mutex_;
  const std::shared_ptr<std::vector<std::string>> faults_ = std::make_shared<std::vector<std::string>>();
  const std::shared_ptr<std::atomic<bool>> has_failed_ = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<std::atomic<bool>> is_stuck_ = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<std::atomic<bool>> is_abort_held_ = std::make_shared<std::atomic<bool>>(false);
  FakeDevice* device_ = nullptr;
  StreamHandle in_;
  PeerGroup::Options options_;
  std::unique_ptr<PeerGroup> group_;
  std::vector<std::optional<Status>> ends_;
  std::vector<DeviceSpan> tensors_;
  std::vector<bool> released_;
};

/// What the same all-reduce gives on the host.
inline std::vector<std::byte> on_host(Runtime& runtime, const OpDescriptor& descriptor, std::vector<std::byte> bytes) {
  Request request;
  request.descriptor = descriptor;
  request.input = request.output = bytes;
  const std::shared_ptr<Work> work = runtime.submit(request);
  testing::wait_to_the_end(*work);
  work->status().or_throw();
  return bytes;
}

inline void expect_no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace herring::runtime::testing
