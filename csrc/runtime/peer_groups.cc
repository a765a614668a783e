#include "runtime/peer_groups.h"

#include <unistd.h>

#include <utility>

#include "core/operation.h"
#include "runtime/peer_records.h"

namespace herring::runtime {

PeerGroups::PeerGroups(std::shared_ptr<Communicator> communicator, GroupId group, const PeerPlaces& places,
                       bool has_library)
    : communicator_(std::move(communicator)), pid_(getpid()) {
  const std::uint32_t first = places.host * kGroupsOfHost;
  const std::uint32_t count = has_library ? kGroupsOfHost : kGroupsOfHost - 1;
  for (std::uint32_t i = 0; i < count; ++i) groups_.emplace_back(peer_group(group, first + i), places.neighbors);
  if (places.others.size() > 1)
    groups_.emplace_back(peer_group(group, kFirstNetworkGroup + places.index), places.others);
  for (const auto& [id, ranks] : groups_) communicator_->add_group(id, ranks);
}

PeerGroups::~PeerGroups() {
  if (getpid() == pid_) leave();
}

void PeerGroups::leave() {
  if (std::exchange(has_left_, true)) return;
  for (const auto& [id, ranks] : groups_) {
    communicator_->leave_group(id);
    communicator_->remove_group(id);
  }
}

void PeerGroups::abort(const std::string& reason) {
  for (const auto& [id, ranks] : groups_) communicator_->abort_group(id, reason);
}

}  // namespace herring::runtime
