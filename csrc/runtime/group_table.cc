#include "runtime/group_table.h"

#include <algorithm>
#include <utility>

#include "core/status.h"

namespace herring::runtime {
namespace {

bool has_sender(const Group& group, const HubEvent& event) {
  return std::ranges::find(group.route.ranks, event.member.rank) != group.route.ranks.end();
}

void take_early(Group& group, const HubEvent& event) {
  if (!has_sender(group, event)) return;
  if (event.kind == HubEvent::Kind::kGroupLeft) {
    group.left.push_back({event.calls, to_string(event)});
  } else if (group.closed.is_ok()) {
    group.closed = Status(Code::kCancelled, to_string(event));
  }
}

}  // namespace

std::uint32_t GroupTable::next_use(GroupId id) const {
  const auto used = uses_.find(id);
  const std::uint32_t removed = used == uses_.end() ? 0 : used->second;
  return groups_.contains(id) ? removed + 1 : removed;
}

bool GroupTable::add(GroupId id, GroupRoute route) {
  if (groups_.contains(id)) return false;
  auto group = std::make_shared<Group>();
  group->id = id;
  group->use = next_use(id);
  group->route = std::move(route);
  const UsedGroup added{id, group->use};
  for (const HubEvent& event : early_) {
    if (event.group == added) take_early(*group, event);
  }
  std::erase_if(early_, [&added](const HubEvent& event) { return event.group == added; });
  if (id == GroupId{0}) all_workers_ = group;
  groups_.emplace(id, std::move(group));
  return true;
}

std::shared_ptr<Group> GroupTable::find(GroupId id) const {
  if (id == GroupId{0}) return all_workers_;
  const auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second;
}

std::shared_ptr<Group> GroupTable::find(const HubEvent& event) {
  std::shared_ptr<Group> group = find(event.group.id);
  if (group && group->use == event.group.use) return group;
  if (event.group.use < next_use(event.group.id)) return nullptr;
  if (early_.size() == kMaxEarly) early_.pop_front();
  early_.push_back(event);
  return nullptr;
}

std::shared_ptr<Group> GroupTable::note_left(const HubEvent& event) {
  std::shared_ptr<Group> group = find(event);
  if (!group || !has_sender(*group, event)) return nullptr;
  group->left.push_back({event.calls, to_string(event)});
  return group;
}

Status GroupTable::end_of(GroupId id, std::optional<std::uint64_t> op) const {
  const std::shared_ptr<Group> group = find(id);
  if (!group || !group->closed.is_ok()) return group ? group->closed : Status::ok();
  const Group::Left* const left = op && (*op & kNamedKey) == 0 ? group->left_before(*op) : nullptr;
  return left == nullptr ? Status::ok() : Status(Code::kPeerLost, left->text);
}

bool GroupTable::remove(GroupId id) {
  if (groups_.erase(id) == 0) return false;
  if (id == GroupId{0}) all_workers_ = nullptr;
  ++uses_[id];
  return true;
}

}  // namespace herring::runtime
