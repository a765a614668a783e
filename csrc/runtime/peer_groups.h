#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/types.h"
#include "runtime/communicator.h"
#include "runtime/peer_group.h"

namespace herring::runtime {

/// Groups of the communicator in which the ranks of a PeerGroup tell each other what they have to. They are known from
/// here on until leave(), also where this rank never reduces on its device: so ranks that wait for it there hear that
/// it has not called.
class PeerGroups final {
 public:
  /// `has_library`: as PeerGroup's options have one.
  PeerGroups(std::shared_ptr<Communicator> communicator, GroupId group, const PeerPlaces& places, bool has_library);
  /// Leaves, but in a forked child, which is in no group.
  ~PeerGroups();
  PeerGroups(const PeerGroups&) = delete;
  PeerGroups& operator=(const PeerGroups&) = delete;

  // Of the ranks of this host: to meet, to share, and with a library to see whether all are still there.
  GroupId meeting() const { return groups_[0].first; }
  GroupId sharing() const { return groups_[1].first; }
  GroupId watching() const { return groups_[2].first; }
  /// Of the ranks at this one's place on all hosts; several hosts.
  GroupId network() const { return groups_.back().first; }

  /// This rank calls nothing more there. Once.
  void leave();
  /// All that is pending there ends with `reason`, on all ranks.
  void abort(const std::string& reason);

 private:
  const std::shared_ptr<Communicator> communicator_;
  std::vector<std::pair<GroupId, std::vector<std::uint32_t>>> groups_;  ///< And their world ranks.
  const pid_t pid_;
  bool has_left_ = false;
};

}  // namespace herring::runtime
