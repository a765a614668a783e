// What the ranks of a host say to each other: from the engine into the rings, and out of them.

#include <algorithm>

#include "intra_node/pieces.h"
#include "runtime/messages.h"
#include "runtime/progress.h"

namespace herring::runtime {

bool Progress::take_local_messages(Instant now) {
  if (!options_.neighborhood) return false;
  intra_node::Neighborhood::Message message;
  bool any = false;
  // Bounded, so that a chatty neighbour cannot starve the network. After a failure messages are only drained.
  for (int i = 0; i < 256 && options_.neighborhood->receive(message); ++i) {
    any = true;
    if (!message.bytes.empty() && message.bytes.front() == kLocalEndpointChannel) {
      if (messages_) messages_->deliver(message.from, message.bytes);
    } else if (local_) {
      local_->on_message(now, message.from, message.bytes);
    }
  }
  return any;
}

bool Progress::run_local_actions(Instant now) {
  if (!local_) return false;
  bool any = false;
  intra_node::LocalActions actions;
  while (local_) {
    actions.clear();
    local_->take_actions(actions);
    if (actions.empty()) break;
    any = true;
    for (intra_node::LocalAction& action : actions) execute(now, action);
  }
  options_.neighborhood->flush();
  return any;
}

void Progress::send_local(std::uint32_t to, std::span<const std::byte> first, std::span<const std::byte> second,
                          std::span<const std::byte> third) {
  if (left_.contains(neighbours_[to])) return;  // Nobody reads it.
  auto& backlog = local_backlog_[to];
  Status sent = Status::again();
  if (backlog.empty()) {
    local_writes_.for_others(
        second.size(), [&](bool streams) { sent = options_.neighborhood->send(to, first, second, third, streams); });
  }
  if (sent.is_again()) backlog.push_back(intra_node::join_pieces(first, second, third));
}

/// To all other ranks of the host, the same.
void Progress::send_to_all(std::span<const std::byte> first, std::span<const std::byte> second,
                           std::span<const std::byte> third) {
  bool sent = false;
  local_writes_.for_others(
      second.size(), [&](bool streams) { sent = options_.neighborhood->send_to_all(first, second, third, streams); });
  if (sent) return;
  for (std::uint32_t to = 0; to < neighbours_.size(); ++to) {
    if (neighbours_[to] != options_.rank) send_local(to, first, second, third);
  }
  options_.neighborhood->flush();
}

/// Messages to ranks of this host for which there was no room yet.
bool Progress::has_local_backlog() const {
  return std::ranges::any_of(local_backlog_, [](const auto& backlog) { return !backlog.empty(); });
}

bool Progress::flush_local_backlog() {
  bool any = false;
  for (std::uint32_t to = 0; to < local_backlog_.size(); ++to) {
    auto& backlog = local_backlog_[to];
    while (!backlog.empty() && !options_.neighborhood->send(to, backlog.front()).is_again()) {
      backlog.pop_front();
      any = true;
    }
  }
  if (any) options_.neighborhood->flush();
  return any;
}

}  // namespace herring::runtime
