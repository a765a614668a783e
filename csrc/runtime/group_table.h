#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/types.h"
#include "runtime/control.h"
#include "runtime/group.h"

/// The groups that this rank is in, by id. What other ranks say of a group may come before this rank has added it:
/// nothing orders the two. The table keeps such news until then. Not safe from several threads.
namespace herring::runtime {

class GroupTable final {
 public:
  /// News of groups that this rank is not in are never asked for: the oldest make room for new ones. Who misses one
  /// waits for the time-out.
  static constexpr std::size_t kMaxEarly = 4096;

  /// False where the id has a group already.
  bool add(GroupId id, GroupRoute route);

  /// Null where there is none.
  std::shared_ptr<Group> find(GroupId id) const;

  /// The group that an event (kGroupAborted, kGroupLeft) is about. Null where this rank has removed it, is not in it,
  /// or has not added it yet; add() then takes the event into account.
  std::shared_ptr<Group> find(const HubEvent& event);

  /// find(), and it knows from now on that a rank of it has left. Null also where that is no rank of it.
  std::shared_ptr<Group> note_left(const HubEvent& event);

  /// Why nothing can be called in the group any more, or why not this numbered operation; else Ok.
  Status end_of(GroupId id, std::optional<std::uint64_t> op) const;

  /// False where there was none. The id may be used again.
  bool remove(GroupId id);

  const std::map<GroupId, std::shared_ptr<Group>>& all() const { return groups_; }

 private:
  std::uint32_t next_use(GroupId id) const;

  std::map<GroupId, std::shared_ptr<Group>> groups_;
  std::shared_ptr<Group> all_workers_;     ///< Group 0, which nearly every call is in.
  std::map<GroupId, std::uint32_t> uses_;  ///< Of ids that had a group before.
  std::deque<HubEvent> early_;
};

}  // namespace herring::runtime
