#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "collectives/fusion.h"
#include "core/config.h"
#include "core/status.h"
#include "core/types.h"
#include "runtime/communicator.h"

namespace herring::collectives {

/// Every group's operations as a door hands them over: small reductions by name travel together (Fusion), the rest goes
/// to the runtime as it is. Uses of one name follow each other in their order, whichever way each of them goes. Safe
/// from any thread.
class Operations final {
 public:
  /// Of a job whose ranks stay: in an elastic one `config.fusion_bytes` has to be 0.
  Operations(std::shared_ptr<runtime::Communicator> runtime, const Config& config);
  ~Operations();  ///< close()
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;

  /// Small reductions by name of this group travel together from now on; for its ranks, before its first operation by
  /// name. The runtime knows `id` already, and learns of one more group: see fused_group(). Group 0 is there.
  void open(GroupId id, std::span<const std::uint32_t> ranks);
  /// On all ranks of the group. What all of them have called ends first, or at the deadline with an error; what some of
  /// them lack ends with an error. Nothing where the group is not open.
  void close(GroupId id, Instant deadline);
  void close(Instant deadline);  ///< All groups, before this rank leaves the job.

  /// Memory for tensors of this group by name, one after the other, which are reduced in place: see Fusion::place().
  TensorRow place(GroupId group, std::span<const NamedBytes> tensors);

  /// As Communicator's; throws Error(kInvalidArgument) where a pending operation uses the memory. A reduction travels
  /// with others where it has a name and no time-out of its own, nobody waits for it at once, and it is of
  /// HERRING_FUSION_BYTES and 1 MB or less, or lies in memory of place().
  std::shared_ptr<runtime::Work> submit(const runtime::Request& request);
  std::shared_ptr<runtime::Work> run(const runtime::Request& request, Status& status);
  /// By itself, in its turn.
  std::shared_ptr<runtime::Work> submit_alone(const runtime::Request& request);

  /// The runtime's group for the rounds and buckets of `id`.
  static constexpr GroupId fused_group(GroupId id) { return GroupId{id.value + kFirstFusedGroup}; }

  const std::shared_ptr<runtime::Communicator>& runtime() const noexcept { return runtime_; }

 private:
  void close(GroupId id, Instant deadline, Fusion::Leaving leaving);
  std::shared_ptr<Fusion> fusion_of(const runtime::Request& request) const;
  std::shared_ptr<runtime::Work> submit_outside(const std::shared_ptr<Fusion>& fusion, const runtime::Request& request);
  std::shared_ptr<runtime::Work> begin_outside(const std::shared_ptr<Fusion>& fusion, const runtime::Request& request);

  const std::shared_ptr<runtime::Communicator> runtime_;
  const FusionSettings settings_;  // bucket_bytes 0: nothing travels together.
  mutable std::mutex mutex_;
  std::map<std::uint32_t, std::shared_ptr<Fusion>> groups_;  // guarded by mutex_
};

}  // namespace herring::collectives
