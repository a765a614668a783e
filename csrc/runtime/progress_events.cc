// What the hub says of others, and the end of groups that are left.

#include <algorithm>
#include <utility>

#include "core/log.h"
#include "core/status.h"
#include "runtime/deadlock.h"
#include "runtime/progress.h"

namespace herring::runtime {

bool Progress::take_hub_events(Instant now) {
  HubEvent event;
  bool any = false;
  while (options_.hub != nullptr && !hub_lost_ && options_.hub->next_event(event)) {
    any = true;
    const std::string who = to_string(event.member);
    switch (event.kind) {
      case HubEvent::Kind::kFinished:
        // With backup workers who is late has the results of operations that others have finished long ago.
        if (options_.placement->backup_workers > 0) break;
        [[fallthrough]];
      case HubEvent::Kind::kLeft:
        member_left(now, event);
        break;
      case HubEvent::Kind::kLost:
        if (lose_server(now, event)) break;
        if (event.member.role == Role::kWorker)
          options_.on_peer_lost(PeerId{event.member.rank}, who + " is lost: " + event.reason);
        fail_everything(Status(Code::kPeerLost, who + " is lost: " + event.reason));
        break;
      case HubEvent::Kind::kFailed:
        if (lose_server(now, event)) break;
        fail_everything(event.reason.starts_with(kDeadlockText)
                            ? Status(Code::kMismatch, event.reason)
                            : Status(Code::kPeerLost, who + " failed: " + event.reason));
        break;
      case HubEvent::Kind::kGroupAborted:
        group_aborted(now, event);
        break;
      case HubEvent::Kind::kGroupLeft:
        group_left(now, event);
        break;
      case HubEvent::Kind::kHubLost:
        hub_lost_ = true;
        if (!left_.contains(0)) {
          fail_everything(Status(Code::kPeerLost, to_string(event)));
        }
        break;
    }
  }
  return any;
}

/// True where the event is the end of a server whose work others go on with.
bool Progress::lose_server(Instant now, const HubEvent& event) {
  if (event.member.role != Role::kServer || !options_.placement->failover || !servers_) return false;
  const std::string text = to_string(event.member) + " is lost: " + event.reason;
  if (!servers_->lose_server(now, event.member.rank, text)) return false;
  if (options_.rank == 0) {
    Logger(logger_options(config_, "rank 0")).log(LogLevel::kWarning, text + ". Its work goes on at the other servers");
  }
  return true;
}

void Progress::member_left(Instant now, const HubEvent& event) {
  const std::string text = to_string(event);
  if (lose_server(now, event)) return;
  if (event.member.role == Role::kServer) {
    fail_everything(Status(Code::kPeerLost, text + " while workers still need it"));
    return;
  }
  const std::uint32_t rank = event.member.rank;
  if (event.kind == HubEvent::Kind::kLeft) {
    left_.insert(rank);
    if (host_) host_->rank_gone(rank);
  }
  if (operations_->note_departed(rank, text)) {
    if (host_) {
      // All that it has sent to ranks of its host is in their rings by now.
      while (host_->take_messages(now)) {
      }
      host_->run_actions(now);
    }
    options_.on_peer_left(PeerId{rank}, text);
    if (host_) host_->end_without(now, rank, text);
  }
  if (messages_) messages_->worker_left(now, rank, text, left_.contains(rank));
  operations_->await_departed(now);
}

void Progress::report_unreachable(std::span<const std::uint32_t> members, std::uint32_t of, const Unreachable& found) {
  if (options_.hub != nullptr && !hub_lost_ && !members.empty()) {
    options_.hub->report_unreachable(members, of, found.answering, found.silent);
  }
}

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
    commands_.closed_groups.push_back(std::move(closing));
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

void Progress::start_closing(Instant now, const ClosingGroup& closing) {
  closing_.push_back(closing);  // First: fail_everything() finds it there where the rest throws.
  end_group(now, closing.group, closing.end);
  end_closing();
}

void Progress::end_group(Instant now, GroupId group, const GroupEnd& end) {
  operations_->end_group(now, group, end.here, end.elsewhere);
  if (messages_) messages_->close_group(now, group, end.messages);
}

/// What other ranks of the group do in it they do in vain: all of it ends, whoever joined it.
void Progress::group_aborted(Instant now, const HubEvent& event) {
  const Status status(Code::kCancelled, to_string(event));
  if (!options_.on_group_aborted(event, status)) return;
  take_commands(now);  // Nothing of this group comes after these.
  end_group(now, event.group.id, {status, status, status});
}

void Progress::group_left(Instant now, const HubEvent& event) {
  const std::shared_ptr<Group> group = options_.on_group_left(event);
  if (group == nullptr) return;
  operations_->end_uncalled(now, group);
  if (!messages_) return;
  messages_->end_collectives_from(now, event.group.id, event.calls, Status(Code::kPeerLost, to_string(event)));
  messages_->member_left(now, event.group.id, event.member.rank, to_string(event));
}

void Progress::end_closing() {
  std::erase_if(closing_, [this](const ClosingGroup& closing) {
    const bool is_pending =
        (messages_ && messages_->has_pending(closing.group)) || operations_->has_pending(closing.group);
    if (!is_pending) closing.closed->set();
    return !is_pending;
  });
}

}  // namespace herring::runtime
