// Operations that wait for others, and the end of what is pending in a group that this rank leaves.

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "runtime/progress.h"
#include "runtime/progress_part.h"

namespace herring::runtime {

std::shared_ptr<GroupClosed> Progress::close_group(GroupId group) {
  const std::string self = "rank " + std::to_string(options_.rank);
  return ask_to_close({group,
                       {Status(Code::kCancelled, "its group was removed on this rank while it was pending"),
                        Status(Code::kMismatch, self + " removed the group while the operation was pending there"),
                        Status(Code::kCancelled, self + " has left the group")}});
}

void Progress::abort_group(GroupId group, const std::string& reason) {
  const Status elsewhere(Code::kCancelled, "rank " + std::to_string(options_.rank) + " aborted the group: " + reason);
  static_cast<void>(ask_to_close({group, {Status(Code::kCancelled, reason), elsewhere, elsewhere}}));
}

void Progress::give_up_pending(GroupId group, const std::string& reason) {
  const Status elsewhere(Code::kCancelled, "rank " + std::to_string(options_.rank) + " gave it up: " + reason);
  static_cast<void>(ask_to_close({group, {Status(Code::kCancelled, reason), elsewhere, elsewhere}}));
}

std::shared_ptr<GroupClosed> Progress::ask_to_close(ClosingGroup closing) {
  const std::shared_ptr<GroupClosed> closed = closing.closed;
  {
    const std::scoped_lock lock(mutex_);
    message_commands_.closed_groups.push_back(std::move(closing));
  }
  wake_up(true);
  return closed;
}

void GroupClosed::set() {
  {
    const std::scoped_lock lock(mutex_);
    is_set_ = true;
  }
  changed_.notify_all();
}

void GroupClosed::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_set_; });
}

/// In call order, as what they waited for has ended.
bool Progress::begin_held(Instant now) {
  may_begin_ = false;
  std::vector<std::shared_ptr<PendingOperation>> ready;
  std::erase_if(held_, [&ready](const auto& operation) {
    if (operation->call.waits_for > 0) return false;
    ready.push_back(operation);
    return true;
  });
  start_all(now, ready);
  if (pump_ && !ready.empty()) pump_->flush(now);
  return !ready.empty();
}

void Progress::end_held(const std::shared_ptr<PendingOperation>& operation, const Status& status) {
  std::erase(held_, operation);
  end(operation, status);
}

void Progress::expire_held(Instant now) {
  if (now < held_deadline_) return;
  for (const auto& operation : std::vector(held_)) {
    if (operation->deadline > now) continue;
    end_held(operation, Status(Code::kTimeout,
                               to_string(operation->descriptor) +
                                   " waited for an earlier operation here that uses the same memory or name and did "
                                   "not end in time"));
  }
  held_deadline_ = Instant::max();
  for (const auto& operation : held_) held_deadline_ = std::min(held_deadline_, operation->deadline);
}

/// What others wait for this rank to do ends for them too: also the parts that they may have begun and this one has
/// not.
void Progress::give_up(Instant now, const std::shared_ptr<PendingOperation>& operation, const Status& here,
                       const Status& elsewhere) {
  if (!operation->failure.is_ok()) return;
  const std::uint32_t last = std::min(operation->parts, operation->next_part + kMostAhead);
  while (operation->next_part < last) start_part(now, operation, operation->next_part++);
  operation->failure = here;
  operation->overdue = Overdue(now);
  if (network_ && operation->path == GroupRoute::Path::kHostFirst) {
    // Other hosts have no other way to hear of a part that is still inside this one.
    for (const auto& [key, part] : parts_) {
      if (part->operation != operation || part->network == Part::Network::kUnderWay) continue;
      network_->abort(now, network_operation(now, *part, {}), elsewhere);
    }
  }
  abort_parts(now, *operation, elsewhere);
  if (pump_) pump_->flush(now);
}

void Progress::start_closing(Instant now, const ClosingGroup& closing) {
  end_group(now, closing.group, closing.end);
  closing_.push_back(closing);
  end_closing();
}

void Progress::end_group(Instant now, GroupId group, const GroupEnd& end) {
  for (const auto& operation : std::vector(held_)) {
    if (operation->group->id == group) end_held(operation, end.here);
  }
  for (const auto& operation : std::vector(operations_)) {
    if (operation->group->id == group) give_up(now, operation, end.here, end.elsewhere);
  }
  run_local_actions(now);
  if (messages_) messages_->close_group(now, group, end.messages);
}

/// Nothing more comes from this rank: what it has not called on this host ends.
void Progress::end_local_without(Instant now, std::uint32_t rank, const std::string& why) {
  const auto neighbour = std::ranges::find(neighbours_, rank);
  if (!local_ || neighbour == neighbours_.end()) return;
  local_->on_peer_left(now, static_cast<std::uint32_t>(neighbour - neighbours_.begin()), why);
  run_local_actions(now);
}

/// What other ranks of the group do in it they do in vain: all of it ends, whoever joined it.
void Progress::group_aborted(Instant now, const HubEvent& event) {
  const Status status(Code::kCancelled, to_string(event));
  if (!options_.on_group_aborted(event, status)) return;
  take_commands(now);  // Nothing of this group comes after these.
  end_group(now, event.group.id, {status, status, status});
}

Status Progress::check_left(const PendingOperation& operation) const {
  if (!operation.is_counted) return Status::ok();
  const Group::Left* const left = operation.group->left_before(operation.op);
  if (left == nullptr) return Status::ok();
  return Status(Code::kPeerLost, left->text + " and cannot take part in " + to_string(operation.descriptor));
}

/// What that rank has called goes on; what it has not, it never will.
void Progress::group_left(Instant now, const HubEvent& event) {
  const std::shared_ptr<Group> group = options_.on_group_left(event);
  if (group == nullptr) return;
  for (const auto& operation : std::vector(held_)) {
    if (operation->group != group) continue;
    if (const Status gone = check_left(*operation); !gone.is_ok()) end_held(operation, gone);
  }
  for (const auto& operation : std::vector(operations_)) {
    if (operation->group != group) continue;
    if (const Status gone = check_left(*operation); !gone.is_ok()) give_up(now, operation, gone, gone);
  }
  run_local_actions(now);
  if (!messages_) return;
  messages_->end_collectives_from(now, event.group.id, event.calls, Status(Code::kPeerLost, to_string(event)));
  messages_->member_left(now, event.group.id, event.member.rank, to_string(event));
}

void Progress::end_closing() {
  std::erase_if(closing_, [this](const ClosingGroup& closing) {
    const bool is_pending =
        (messages_ && messages_->has_pending(closing.group)) ||
        std::ranges::any_of(operations_, [&](const auto& operation) { return operation->group->id == closing.group; });
    if (!is_pending) closing.closed->set();
    return !is_pending;
  });
}

}  // namespace herring::runtime
