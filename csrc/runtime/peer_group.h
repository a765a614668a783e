#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/device_collectives.h"
#include "core/operation.h"
#include "runtime/communicator.h"
#include "staging/collective_watch.h"

namespace herring::runtime {

/// Who is where, as one rank sees it.
struct PeerPlaces {
  std::vector<std::uint32_t> neighbors;  ///< World ranks of the members on this host, in group order.
  std::uint32_t index = 0;               ///< This rank's position there.
  std::vector<std::uint32_t> others;     ///< World ranks at this position, of all hosts in the group's order.
  std::uint32_t host = 0;                ///< This host's position there.
};
/// Of a group with these members (world ranks); `hosts` as Communicator::worker_hosts() gives it. Why there are none,
/// the same on all ranks, in `obstacle`.
PeerPlaces peer_places(std::span<const std::uint32_t> members, std::span<const std::uint32_t> hosts, std::uint32_t rank,
                       std::string& obstacle);

class PeerGroups;

/// Ranks that all-reduce in the memory of their devices: those of a host, which all reach each other's (CUDA calls such
/// devices peers), among themselves; then, where there are several hosts, rank i of each with the ranks i of the
/// others, a part of the data each. It is staging/peer_engine.h on a Device. What the ranks have to tell each other
/// goes through operations of the communicator, in groups made for it, so time-outs, lost ranks and mismatches are
/// errors as everywhere.
///
/// One thread at a time; another may take over.
class PeerGroup {
 public:
  struct Options {
    std::shared_ptr<Communicator> runtime;
    GroupId group;      ///< A framework's.
    PeerPlaces places;  ///< Of its members.
    /// What ranks tell each other goes through it. Null: made by open().
    std::shared_ptr<PeerGroups> groups;
    /// Opens the device and says which streams are used: for copies from tensors (`in`), for sums and what writes
    /// tensors (`back`). May throw Error.
    std::function<std::unique_ptr<Device>(StreamHandle& in, StreamHandle& back)> open;
    std::uint64_t memory_bytes = 64 << 20;  ///< Of the device, which the others read; the same on all ranks.
    std::uint32_t blocks = 8;               ///< Of threads that a sum may have: at most so many multiprocessors.
    Duration timeout{};                     ///< Of open().
    /// Sums by it instead of Herring's kernel, in its own order, and shares no memory.
    std::shared_ptr<DeviceCollectivesLibrary> library;
    staging::WatchOptions watch;  ///< Over what the library does.
    /// Several hosts: memory of the host that copies from and to the device are fast with.
    std::function<std::shared_ptr<std::byte>(std::size_t bytes)> host_memory;
  };
  struct Job {
    OpDescriptor descriptor;
    DeviceSpan tensor;  ///< Borrowed until `release`.
    Duration timeout{};
    std::function<void()> before;                 ///< Makes `in` wait until the tensor is ready.
    std::function<void(const Status&)> complete;  ///< Once; where it went well, all is in the back stream.
    std::function<void()> release;                ///< Once, after that; never where the device is lost.
  };

  static constexpr std::uint32_t kMostMembers = 8;

  /// All members call it; blocks until all have. Throws Error: kUnavailable where a rank cannot share its device's
  /// memory or reach that of another, on all ranks; kTimeout.
  static std::unique_ptr<PeerGroup> open(Options options);
  virtual ~PeerGroup() = default;

  /// An all-reduce of a type and an operator that the devices sum, with a byte at least. An average over several hosts
  /// is divided by servers, so none of theirs.
  static bool takes(const OpDescriptor& descriptor, bool has_network);

  /// In the same order on all ranks. Not Ok: nothing happened, and `complete` is not called.
  virtual Status submit(Instant now, Job job) = 0;
  /// Looks at the device, at the others and at the time; true where anything happened.
  virtual bool run(Instant now) = 0;
  /// What other ranks have to do before anything more happens here.
  virtual Awaited awaited() const = 0;
  /// Ok until something failed; then nothing is reduced here any more.
  virtual const Status& status() const = 0;
  /// Ends all with `why`, on all ranks.
  virtual void close(const Status& why) = 0;
  /// This rank calls nothing more here.
  virtual void leave() = 0;
};

}  // namespace herring::runtime
