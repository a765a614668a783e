#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/status.h"
#include "runtime/host_reduction.h"

namespace herring::runtime {
namespace {

using staging::Piece;
using staging::PieceRange;

/// A communicator's end, on a thread of its own. The library frees memory of the device there, for which that waits for
/// kernels of all other communicators on it: they may be about to be ended by the thread that calls here.
class Ending final {
 public:
  Ending(Device& device, std::shared_ptr<DeviceCollectives> communicator, std::function<void(DeviceCollectives&)> call)
      : is_over_(std::make_shared<std::atomic<bool>>(false)) {
    const auto run = [&device, communicator = std::move(communicator), call = std::move(call), is_over = is_over_] {
      {
        const std::shared_ptr<void> current = device.make_current();
        call(*communicator);
      }
      *is_over = true;
    };
    try {
      thread_ = std::thread(run);
    } catch (const std::system_error&) {
      run();
    }
  }
  /// Where it is not over the thread goes on, and uses the device.
  ~Ending() {
    if (!thread_.joinable()) return;
    is_over() ? thread_.join() : thread_.detach();
  }
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

  bool is_over() const { return *is_over_; }

 private:
  const std::shared_ptr<std::atomic<bool>> is_over_;
  std::thread thread_;
};

/// Slots of this rank alone, and collectives of a library: a communicator and a stream for each lane, as ranks come to
/// the steps of one lane at another time than to those of the other.
class LibraryReduction final : public HostReduction {
 public:
  LibraryReduction(Device& device, Options options)
      : device_(device),
        options_(std::move(options)),
        members_(static_cast<std::uint32_t>(options_.places.neighbors.size())) {}

  void open(const Agree& agree) override {
    agree(prepare(), "cannot use its GPU with the others", {});
    for (Lane& lane : lanes_) {
      DeviceCollectivesLibrary::Id id{};
      const Status made = options_.places.index == 0 ? make_id(id) : Status::ok();
      share(id, made, agree);
      agree(begin_to_connect(lane, id), kConnect, {});
      agree(connected(lane), kConnect, {});
    }
    is_open_ = true;
  }

  DeviceSpan slot(const Piece& piece) const override { return memory_.subspan(piece.slot_offset, piece.bytes); }
  PieceRange own_range(const Piece& piece) const override {
    const std::uint64_t begin = std::min(share_bytes(piece) * options_.places.index, piece.bytes);
    return {begin, std::min(share_bytes(piece), piece.bytes - begin)};
  }
  bool waits_on_device() const override { return true; }
  StreamHandle stream(Step step) const override { return lanes_[lane(step)].stream; }

  Status begin(Step step, const Piece& piece, const OpDescriptor& descriptor, DeviceSpan tensor) override {
    const Lane& on = lanes_[lane(step)];
    const DeviceSpan whole = memory_.subspan(piece.slot_offset, share_bytes(piece) * members_);
    const DeviceSpan own = whole.subspan(share_bytes(piece) * options_.places.index, share_bytes(piece));
    switch (step) {
      case Step::kSumAll:
        return on.communicator->all_reduce(on.stream, tensor, slot(piece), descriptor.dtype, descriptor.reduce);
      case Step::kSumOwn:
        return on.communicator->reduce_scatter(on.stream, own, whole, descriptor.dtype, descriptor.reduce);
      case Step::kGather:
        return then_copy(on.communicator->all_gather(on.stream, whole, own), piece, tensor);
    }
    return Status::ok();
  }

  Status poll(Step step, const Piece& piece, DeviceSpan tensor) override {
    const Status status = lanes_[lane(step)].communicator->poll();
    return step == Step::kGather ? then_copy(status, piece, tensor) : status;
  }

  Status health() override {
    for (const Lane& lane : lanes_) {
      if (!lane.communicator || lane.ending) continue;
      if (Status status = lane.communicator->poll(); !status.is_ok() && !status.is_again()) return status;
    }
    return Status::ok();
  }

  void abort() override {
    is_aborting_ = true;
    end_by([](DeviceCollectives& communicator) { communicator.abort(); });
  }
  bool has_aborted() const override { return is_aborting_ && are_endings_over(); }

  bool release(Instant deadline) override {
    if (!is_open_) abort();  // Nobody else comes to an end that nobody waits for.
    end_by([deadline](DeviceCollectives& communicator) { communicator.close(deadline); });
    while (!are_endings_over()) {
      if (std::chrono::steady_clock::now() > deadline + kToAbort) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    if (!memory_.empty()) static_cast<void>(device_.release(memory_));
    return true;
  }

 private:
  struct Lane {
    StreamHandle stream;
    std::shared_ptr<DeviceCollectives> communicator;
    std::unique_ptr<Ending> ending;  ///< Nothing else is asked of the communicator any more.
  };
  static constexpr std::chrono::seconds kToAbort{1};
  static constexpr const char* kConnect = "cannot connect to the other ranks of its host with NCCL";

  /// All at once: each may wait for the others.
  void end_by(const std::function<void(DeviceCollectives&)>& call) {
    for (Lane& lane : lanes_) {
      if (lane.communicator && !lane.ending) lane.ending = std::make_unique<Ending>(device_, lane.communicator, call);
    }
  }

  bool are_endings_over() const {
    return std::ranges::all_of(lanes_, [](const Lane& lane) { return !lane.ending || lane.ending->is_over(); });
  }

  /// What each rank sums of a piece: the same for all, so that the last may have less that counts.
  std::uint64_t share_bytes(const Piece& piece) const {
    const std::uint64_t units = (piece.bytes + staging::kRangeAlignment - 1) / staging::kRangeAlignment;
    return (units + members_ - 1) / members_ * staging::kRangeAlignment;
  }

  Status prepare() {
    try {
      for (Lane& lane : lanes_) lane.stream = device_.create_stream();
    } catch (const Error& error) {
      return error.status();
    }
    return device_.allocate(options_.memory_bytes, memory_);
  }

  Status make_id(DeviceCollectivesLibrary::Id& id) {
    try {
      id = options_.library->make_id();
    } catch (const Error& error) {
      return {Code::kUnavailable, error.status().message()};
    }
    return Status::ok();
  }

  /// The first one's becomes everybody's.
  static void share(DeviceCollectivesLibrary::Id& id, const Status& made, const Agree& agree) {
    static_assert(sizeof(id) % sizeof(PeerNumbers) == 0);
    for (std::size_t at = 0; at < id.size(); at += sizeof(PeerNumbers)) {
      PeerNumbers part;
      std::memcpy(&part, id.data() + at, sizeof(part));
      part = agree(made, kConnect, part);
      std::memcpy(id.data() + at, &part, sizeof(part));
    }
  }

  Status begin_to_connect(Lane& lane, const DeviceCollectivesLibrary::Id& id) {
    try {
      lane.communicator = options_.library->connect(id, members_, options_.places.index, options_.blocks);
    } catch (const Error& error) {
      return {Code::kUnavailable, error.status().message()};
    }
    return Status::ok();
  }

  Status connected(Lane& lane) {
    const Instant deadline = deadline_after(std::chrono::steady_clock::now(), options_.timeout);
    while (true) {
      const Status status = lane.communicator->poll();
      if (status.is_ok()) return status;
      if (!status.is_again()) return {Code::kUnavailable, status.message()};
      if (Status others = options_.are_others_there(); !others.is_ok()) return others;
      if (std::chrono::steady_clock::now() >= deadline) {
        return {Code::kTimeout, options_.library->description() + " did not connect the ranks of this host in time"};
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  /// Where the gather is on its stream, what it brings into the slot goes to the tensor.
  Status then_copy(const Status& gathered, const Piece& piece, DeviceSpan tensor) {
    if (!gathered.is_ok()) return gathered;
    return device_.copy_inside(lanes_[lane(Step::kGather)].stream, tensor, slot(piece));
  }

  Device& device_;
  const Options options_;
  const std::uint32_t members_;
  DeviceSpan memory_;
  bool is_open_ = false;
  bool is_aborting_ = false;
  std::array<Lane, kLanes> lanes_;
};

}  // namespace

std::unique_ptr<HostReduction> make_library_reduction(Device& device, HostReduction::Options options) {
  return std::make_unique<LibraryReduction>(device, std::move(options));
}

}  // namespace herring::runtime
