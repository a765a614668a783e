#include <algorithm>
#include <chrono>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "cuda/kernels/tables.h"
#include "intra_node/meeting.h"
#include "runtime/host_reduction.h"

namespace herring::runtime {
namespace {

using staging::Piece;
using staging::PieceRange;

static_assert(PeerGroup::kMostMembers == cuda::kMostSources);

/// Slots that all ranks of the host have mapped, and Herring's kernel.
class PeerReduction final : public HostReduction {
 public:
  PeerReduction(Device& device, Options options)
      : device_(device),
        options_(std::move(options)),
        members_(static_cast<std::uint32_t>(options_.places.neighbors.size())),
        slots_(members_) {}

  void open(const Agree& agree) override {
    const std::vector<std::uint32_t>& ranks = options_.places.neighbors;
    const std::uint32_t index = options_.places.index;
    int descriptor = -1;
    const Status allocated = device_.allocate_shared(options_.memory_bytes, slots_[index], descriptor);
    intra_node::SharedDescriptors own;
    own.arena = intra_node::FileDescriptor(descriptor);
    intra_node::MeetingOptions meeting;
    meeting.local_rank = index;
    meeting.local_size = members_;
    meeting.token = static_cast<std::uint64_t>(agree(allocated, "cannot share memory of its GPU", some_number())[0]);
    meeting.arena_bytes = options_.memory_bytes;
    meeting.has_arena_alone = true;
    const std::vector<intra_node::SharedDescriptors> theirs = pass_on(meeting, own);
    Status imported;
    for (std::uint32_t i = 0; i < members_ && imported.is_ok(); ++i) {
      if (i == index) continue;
      imported = device_.import_shared(theirs[i].arena.get(), options_.memory_bytes, slots_[i]);
      if (imported.is_ok()) continue;
      imported = {imported.code(), "the memory of rank " + std::to_string(ranks[i]) + "'s GPU: " + imported.message()};
    }
    agree(imported, "cannot reach the memory of another rank's GPU", {});
  }

  DeviceSpan slot(const Piece& piece) const override {
    return slots_[options_.places.index].subspan(piece.slot_offset, piece.bytes);
  }
  PieceRange own_range(const Piece& piece) const override { return range_of(piece, options_.places.index); }
  bool waits_on_device() const override { return false; }
  StreamHandle stream(Step) const override { return options_.back; }

  Status begin(Step step, const Piece& piece, const OpDescriptor& descriptor, DeviceSpan tensor) override {
    switch (step) {
      case Step::kSumAll:
        return sum(piece, descriptor, {0, piece.bytes}, tensor.address);
      case Step::kSumOwn:
        return sum(piece, descriptor, own_range(piece), slot(piece).address + own_range(piece).offset);
      case Step::kGather:
        return gather(piece, tensor);
    }
    return Status::ok();
  }
  Status poll(Step, const Piece&, DeviceSpan) override { return Status::ok(); }

  Status health() override { return Status::ok(); }
  void abort() override {}
  bool has_aborted() const override { return true; }
  bool release(Instant) override {
    for (const DeviceSpan memory : slots_) {
      if (!memory.empty()) static_cast<void>(device_.release(memory));
    }
    return true;
  }

 private:
  static PeerNumbers some_number() {
    std::random_device random;
    return {static_cast<std::int64_t>(std::uint64_t{random()} << 32 | random())};
  }

  /// All ranks have come by now: who does not meet the others at once has died.
  static std::vector<intra_node::SharedDescriptors> pass_on(const intra_node::MeetingOptions& meeting,
                                                            const intra_node::SharedDescriptors& own) {
    constexpr std::chrono::seconds kLimit{20};
    try {
      return intra_node::meet(meeting, own, std::chrono::steady_clock::now() + kLimit);
    } catch (const Error& error) {
      if (error.status().code() != Code::kTimeout) throw;
      throw Error(Code::kTimeout, "a rank of this host did not share memory of its GPU within " +
                                      std::to_string(kLimit.count()) + " s; look at the output of the other ranks");
    }
  }

  PieceRange range_of(const Piece& piece, std::uint32_t member) const {
    return staging::range_of(piece.bytes, member, members_);
  }

  Status sum(const Piece& piece, const OpDescriptor& descriptor, PieceRange range, std::uint64_t target) {
    if (range.bytes == 0) return Status::ok();
    cuda::SumParameters parameters;
    for (std::uint32_t i = 0; i < members_; ++i) {
      parameters.sources[i] = slots_[i].address + piece.slot_offset + range.offset;
    }
    parameters.target = target;
    parameters.elements = range.bytes / element_bytes(descriptor.dtype);
    parameters.source_count = members_;
    parameters.type = static_cast<cuda::Element>(descriptor.dtype);
    parameters.average_over = descriptor.reduce == ReduceOp::kAverage ? members_ : 1;
    // No more than have anything to do.
    constexpr std::uint64_t kElementsOfBlock = std::uint64_t{cuda::kSumThreads} * 4;
    const std::uint64_t useful = (parameters.elements + kElementsOfBlock - 1) / kElementsOfBlock;
    const auto blocks = static_cast<std::uint32_t>(std::min<std::uint64_t>(options_.blocks, useful));
    return device_.launch(options_.back, KernelId::kSum, std::as_bytes(std::span(&parameters, 1)), blocks);
  }

  Status gather(const Piece& piece, DeviceSpan tensor) {
    Status status;
    for (std::uint32_t i = 0; i < members_ && status.is_ok(); ++i) {
      const PieceRange range = range_of(piece, i);
      const DeviceSpan theirs = slots_[i].subspan(piece.slot_offset, piece.bytes);
      status = device_.copy_inside(options_.back, tensor.subspan(range.offset, range.bytes),
                                   theirs.subspan(range.offset, range.bytes));
    }
    return status;
  }

  Device& device_;
  const Options options_;
  const std::uint32_t members_;
  std::vector<DeviceSpan> slots_;  ///< All members' memory as it is mapped here.
};

}  // namespace

std::unique_ptr<HostReduction> make_peer_reduction(Device& device, HostReduction::Options options) {
  return std::make_unique<PeerReduction>(device, std::move(options));
}

}  // namespace herring::runtime
