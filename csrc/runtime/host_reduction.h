#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/device.h"
#include "core/device_collectives.h"
#include "core/operation.h"
#include "runtime/peer_agreement.h"
#include "runtime/peer_group.h"
#include "staging/peer_engine.h"

/// What the ranks of a host do with the pieces in their slots: who sums them, and how each rank comes to what others
/// have. PeerGroup says when.
namespace herring::runtime {

class HostReduction {
 public:
  enum class Step : std::uint8_t {
    kSumAll,  ///< The sum of all ranks' pieces into the tensor.
    kSumOwn,  ///< The sum of our range of all ranks' pieces into our slot.
    kGather,  ///< All ranks' ranges, which are summed, into the tensor.
  };
  /// agree() of the ranks of this host.
  using Agree = std::function<PeerNumbers(const Status& own, const char* what, const PeerNumbers& said)>;

  struct Options {
    PeerPlaces places;
    std::uint64_t memory_bytes = 0;  ///< Of slots, on each rank.
    std::uint32_t blocks = 8;
    StreamHandle back;  ///< For sums and what writes tensors.
    Duration timeout{};
    /// While ranks come together: not Ok where one of them is gone. Asked again and again.
    std::function<Status()> are_others_there;
    std::shared_ptr<DeviceCollectivesLibrary> library;
  };

  virtual ~HostReduction() = default;

  /// Collective, and blocks. Throws Error on all ranks where it goes wrong on one.
  virtual void open(const Agree& agree) = 0;

  /// This rank's, as long as the piece.
  virtual DeviceSpan slot(const staging::Piece& piece) const = 0;
  /// What this rank sums of it.
  virtual staging::PieceRange own_range(const staging::Piece& piece) const = 0;
  /// Whether steps wait on the device for the other ranks, so that one is known to come to its end only when it has.
  /// Then ranks take steps of one lane in the same order.
  virtual bool waits_on_device() const = 0;

  static constexpr std::size_t kLanes = 2;
  static std::size_t lane(Step step) { return step == Step::kGather ? 1 : 0; }
  virtual StreamHandle stream(Step step) const = 0;
  /// Puts the step on its stream. kAgain: it has begun, and poll() says how it goes on; nothing else begins in its lane
  /// until then.
  virtual Status begin(Step step, const staging::Piece& piece, const OpDescriptor& descriptor, DeviceSpan tensor) = 0;
  virtual Status poll(Step step, const staging::Piece& piece, DeviceSpan tensor) = 0;

  /// What goes wrong while steps are on the device, and no call says.
  virtual Status health() = 0;

  /// Steps that are on the device begin to end, whatever the other ranks do.
  virtual void abort() = 0;
  /// After abort(): no step comes to the device any more.
  virtual bool has_aborted() const = 0;
  /// Nothing of it is under way. Gives the memory back. False where that cannot be soon after the deadline: somebody
  /// still uses the device, which is to be kept with this.
  virtual bool release(Instant deadline) = 0;
};

/// By Herring's kernel, in the servers' fixed tree: each rank reads the others' memory.
std::unique_ptr<HostReduction> make_peer_reduction(Device& device, HostReduction::Options options);
/// By a library of collectives (NCCL), in its own order.
std::unique_ptr<HostReduction> make_library_reduction(Device& device, HostReduction::Options options);

}  // namespace herring::runtime
