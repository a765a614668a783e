#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <fcntl.h>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/device_collectives.h"
#include "cuda/kernels/twins.h"
#include "device/fake_gpu.h"

/// What NCCL does, on FakeGpus of one process or of several: kernels that wait for the other members', an order of
/// summation of its own (the last member first), calls that are in progress until all members have made theirs, and
/// memory that others read until they have closed, too. Members that ask for different things are written down. To end
/// a communicator frees memory, which waits for all other communicators' kernels on the GPU.
namespace herring::testing {

inline constexpr std::size_t kMostFakeMembers = 8;
inline constexpr std::size_t kMostFakeBytes = 8 << 20;

/// In memory that all members map.
struct FakeMeeting {
  struct Member {
    std::atomic<std::uint64_t> asked, posted, done, has_joined, has_closed;
    std::array<std::atomic<std::uint64_t>, 2> bytes;
  };
  std::array<Member, kMostFakeMembers> members;

  static constexpr std::size_t kHeader = 64 << 10;
  static constexpr std::size_t kBytes = kHeader + 2 * kMostFakeMembers * kMostFakeBytes;
  std::byte* area(std::uint64_t number, std::size_t member) {
    return reinterpret_cast<std::byte*>(this) + kHeader + (number % 2 * kMostFakeMembers + member) * kMostFakeBytes;
  }
};
static_assert(sizeof(FakeMeeting) <= FakeMeeting::kHeader);

/// Of the communicators of one GPU.
struct FakeKernels {
  std::atomic<bool> is_aborted = false;
  std::atomic<int> waiting = 0;
};
struct FakeNeighbors {
  std::mutex mutex;
  std::vector<std::shared_ptr<FakeKernels>> all;
};

class FakeCollectives final : public DeviceCollectives {
 public:
  static constexpr std::chrono::seconds kForEver{15};

  /// `gpu` is used under `lock`, and `fault` is told what no correct user does.
  struct World {
    FakeGpu* gpu;
    std::recursive_mutex* mutex;
    std::function<void(std::string)> fault;
    bool is_slow = true;                         ///< Every third call is in progress until all members have made it.
    const std::atomic<bool>* is_held = nullptr;  ///< While it is true, kernels of this member do not begin.
    std::shared_ptr<FakeNeighbors> neighbors = {};
    std::shared_ptr<std::atomic<bool>> has_failed =
        {};                                            ///< Once it is true, poll() says so; its kernels wait for ever.
    std::shared_ptr<std::atomic<bool>> is_stuck = {};  ///< While it is true, close() does not return.
    std::shared_ptr<std::atomic<bool>> is_abort_held = {};  ///< While it is true, abort() has not begun.
  };

  /// The maker's process keeps the memory for the life of it.
  static DeviceCollectivesLibrary::Id make_id() {
    const int file = memfd_create("herring-fake-nccl", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, FakeMeeting::kBytes) != 0) throw std::runtime_error("fake nccl: no memfd");
    DeviceCollectivesLibrary::Id id{};
    const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
    std::memcpy(id.data(), path.c_str(), path.size());
    return id;
  }

  FakeCollectives(World world, const DeviceCollectivesLibrary::Id& id, std::uint32_t members, std::uint32_t index)
      : world_(std::move(world)), members_(members), index_(index), state_(std::make_shared<State>()) {
    const int file = open(reinterpret_cast<const char*>(id.data()), O_RDWR | O_CLOEXEC);
    if (file < 0) throw Error(Code::kUnavailable, "fake nccl: nobody made this id");
    void* const memory = mmap(nullptr, FakeMeeting::kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    if (memory == MAP_FAILED) throw std::runtime_error("fake nccl: no mapping");
    state_->meeting = std::shared_ptr<FakeMeeting>(static_cast<FakeMeeting*>(memory),
                                                   [](FakeMeeting* of) { munmap(of, FakeMeeting::kBytes); });
    own().has_joined = 1;
    if (!world_.neighbors) return;
    const std::lock_guard lock(world_.neighbors->mutex);
    world_.neighbors->all.push_back(std::shared_ptr<FakeKernels>(state_, &state_->kernels));
  }
  ~FakeCollectives() override { abort(); }

  Status poll() override {
    if (state_->kernels.is_aborted) return {Code::kTransport, "fake nccl: used after it was aborted"};
    if (world_.has_failed && *world_.has_failed) return {Code::kTransport, "fake nccl: a link is broken"};
    for (std::uint32_t i = 0; i < members_; ++i) {
      if (is_closing_ && member(i).has_closed == 0) return Status::again();
      if (member(i).has_joined == 0 || (pending_ && member(i).asked < asked_)) return Status::again();
    }
    if (pending_) std::exchange(pending_, nullptr)();
    return Status::ok();
  }

  Status all_reduce(StreamHandle stream, DeviceSpan to, DeviceSpan from, DataType type, ReduceOp reduce) override {
    return ask(stream, from,
               [this, to, type, reduce](std::uint64_t number) { sum(number, at(to), 0, to.bytes, type, reduce); });
  }
  Status reduce_scatter(StreamHandle stream, DeviceSpan to, DeviceSpan from, DataType type, ReduceOp reduce) override {
    if (from.bytes != to.bytes * members_) world_.fault("fake nccl: a share that is not the members' part");
    return ask(stream, from, [this, to, type, reduce](std::uint64_t number) {
      sum(number, at(to), to.bytes * index_, to.bytes, type, reduce);
    });
  }
  Status all_gather(StreamHandle stream, DeviceSpan to, DeviceSpan from) override {
    if (to.bytes != from.bytes * members_) world_.fault("fake nccl: a share that is not the members' part");
    return ask(stream, from, [this, to, from](std::uint64_t number) {
      for (std::uint32_t i = 0; i < members_; ++i) {
        std::memcpy(at(to) + i * from.bytes, state_->meeting->area(number, i), from.bytes);
      }
    });
  }

  void abort() override {
    while (world_.is_abort_held && *world_.is_abort_held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (state_->kernels.is_aborted.exchange(true)) return;
    pending_ = nullptr;
    const Instant limit = std::chrono::steady_clock::now() + kForEver;
    while (are_others_waiting()) {
      if (std::chrono::steady_clock::now() > limit) {
        return world_.fault("fake nccl: to end a communicator waits for ever for another one's kernel");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  void close(Instant deadline) override {
    if (state_->kernels.is_aborted) return;
    while (world_.is_stuck && *world_.is_stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    begin_to_close();
    while (poll().is_again() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    abort();
  }
  /// poll() then says whether all have come to it.
  void begin_to_close() {
    is_closing_ = true;
    own().has_closed = 1;
  }

 private:
  struct State {
    std::shared_ptr<FakeMeeting> meeting;
    FakeKernels kernels;
  };
  using Finish = std::function<void(std::uint64_t number)>;

  FakeMeeting::Member& member(std::uint32_t index) { return state_->meeting->members[index]; }
  FakeMeeting::Member& own() { return member(index_); }
  std::byte* at(DeviceSpan span) const { return world_.gpu->alias(span.address, span.bytes); }

  bool are_others_waiting() const {
    if (!world_.neighbors) return false;
    const std::lock_guard lock(world_.neighbors->mutex);
    for (const auto& each : world_.neighbors->all) {
      if (!each->is_aborted && each->waiting > 0) return true;
    }
    return false;
  }

  Status ask(StreamHandle stream, DeviceSpan from, Finish finish) {
    if (state_->kernels.is_aborted) return {Code::kTransport, "fake nccl: used after it was aborted"};
    if (pending_) world_.fault("fake nccl: asked while it is in progress");
    if (from.bytes > kMostFakeBytes) world_.fault("fake nccl: more bytes than it has room for");
    const std::uint64_t number = ++asked_;
    own().asked = number;
    pending_ = [this, stream, from, finish, number] { launch(stream, from, finish, number); };
    if (world_.is_slow && number % 3 == 1) return Status::again();
    std::exchange(pending_, nullptr)();
    return Status::ok();
  }

  /// The kernel: hands over what is ours once nobody reads what was there before, then waits for the others'.
  void launch(StreamHandle stream, DeviceSpan from, const Finish& finish, std::uint64_t number) {
    const std::lock_guard lock(*world_.mutex);
    const auto all = [state = state_, members = members_](auto which, std::uint64_t least) {
      for (std::uint32_t i = 0; i < members; ++i) {
        if ((state->meeting->members[i].*which).load() < least) return false;
      }
      return true;
    };
    ++state_->kernels.waiting;
    world_.gpu->launch_until(stream.value, [this, state = state_, all, from, finish, number] {
      if (state->kernels.is_aborted) return true;
      if (world_.has_failed && *world_.has_failed) return false;
      if (world_.is_held != nullptr && *world_.is_held) return false;
      FakeMeeting::Member& own_place = state->meeting->members[index_];
      if (own_place.posted < number) {
        if (number > 2 && !all(&FakeMeeting::Member::done, number - 2)) return false;
        std::memcpy(state->meeting->area(number, index_), at(from), from.bytes);
        own_place.bytes[number % 2] = from.bytes;
        own_place.posted = number;
      }
      if (!all(&FakeMeeting::Member::posted, number)) return false;
      for (std::uint32_t i = 0; i < members_; ++i) {
        if (member(i).bytes[number % 2] != from.bytes) world_.fault("fake nccl: members asked for different sizes");
      }
      finish(number);
      own_place.done = number;
      --state->kernels.waiting;
      return true;
    });
  }

  void sum(std::uint64_t number, std::byte* to, std::size_t offset, std::size_t bytes, DataType type, ReduceOp reduce) {
    const auto area = [&](std::uint32_t i) {
      return reinterpret_cast<std::uint64_t>(state_->meeting->area(number, i) + offset);
    };
    std::memcpy(to, state_->meeting->area(number, members_ - 1) + offset, bytes);
    for (std::uint32_t i = members_ - 1; i > 0; --i) {
      cuda::SumParameters parameters;
      parameters.sources[0] = reinterpret_cast<std::uint64_t>(to);
      parameters.sources[1] = area(i - 1);
      parameters.target = reinterpret_cast<std::uint64_t>(to);
      parameters.elements = bytes / element_bytes(type);
      parameters.source_count = 2;
      parameters.type = static_cast<cuda::Element>(type);
      parameters.average_over = i == 1 && reduce == ReduceOp::kAverage ? members_ : 1;
      cuda::sum_twin(parameters);
    }
  }

  const World world_;
  const std::uint32_t members_;
  const std::uint32_t index_;
  const std::shared_ptr<State> state_;
  std::uint64_t asked_ = 0;
  std::function<void()> pending_;
  bool is_closing_ = false;
};

}  // namespace herring::testing
