#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/status.h"
#include "runtime/host_reduction.h"

namespace herring::runtime {
namespace {

using staging::Piece;
using staging::PieceRange;

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

  void abort() override {
    for (Lane& lane : lanes_) {
      if (lane.communicator) lane.communicator->abort();
    }
  }

  void release(Instant deadline) override {
    if (!is_open_) abort();  // Nobody else comes to an end that nobody waits for.
    for (Lane& lane : lanes_) {
      if (lane.communicator) lane.communicator->close(deadline);
    }
    if (!memory_.empty()) static_cast<void>(device_.release(memory_));
  }

 private:
  struct Lane {
    StreamHandle stream;
    std::unique_ptr<DeviceCollectives> communicator;
  };
  static constexpr const char* kConnect = "cannot connect to the other ranks of its host with NCCL";

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
  std::array<Lane, kLanes> lanes_;
};

}  // namespace

std::unique_ptr<HostReduction> make_library_reduction(Device& device, HostReduction::Options options) {
  return std::make_unique<LibraryReduction>(device, std::move(options));
}

}  // namespace herring::runtime
