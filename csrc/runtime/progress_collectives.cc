// Collectives that are made of messages, as far as those that are not can meet them by mistake: a rank that has waited
// long in one calls an operation of the same number that says what it is doing.

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "runtime/progress.h"

namespace herring::runtime {

void Progress::watch_collectives(MessagesOptions& options) {
  options.on_long_wait = [this](const WaitingCollective& waiting) { declare(waiting); };
  options.on_collective_end = [this](const OpKey& key) { ended_collectives_.push_back(key); };
}

void Progress::declare(const WaitingCollective& waiting) {
  if (waiting.group->route.path == GroupRoute::Path::kAlone) return;
  auto operation = std::make_shared<PendingOperation>();
  operation->group = waiting.group;
  operation->op = waiting.call->number;
  operation->descriptor = waiting.call->descriptor;
  operation->deadline = waiting.deadline;
  operation->is_counted = true;
  operation->is_declared = true;
  declarations_.push_back(std::move(operation));
}

/// Whatever ends it beside these, the messages end with it or tell better why.
void Progress::declared_end(const PendingOperation& operation, const Status& status) {
  const OpKey key{operation.group->id, operation.op, 0};
  if (status.code() == Code::kMismatch || !check_left(operation).is_ok())
    refused_collectives_.emplace_back(key, status);
}

bool Progress::end_collectives(Instant now) {
  if (declarations_.empty() && refused_collectives_.empty() && ended_collectives_.empty()) return false;
  if (!messages_) {  // Everything has failed.
    declarations_.clear();
    refused_collectives_.clear();
    ended_collectives_.clear();
    return false;
  }
  for (const auto& operation : std::exchange(declarations_, {})) begin(now, operation);
  for (const auto& [key, why] : std::exchange(refused_collectives_, {})) {
    messages_->end_collective(now, key, why);
  }
  for (const OpKey& key : std::exchange(ended_collectives_, {})) {
    const auto found = std::ranges::find_if(operations_, [&key](const auto& operation) {
      return operation->is_declared && operation->group->id == key.group && operation->op == key.op;
    });
    if (found != operations_.end()) {
      const auto operation = *found;  // NOLINT(performance-unnecessary-copy-initialization): give_up() takes it out.
      const std::string text = "rank " + std::to_string(options_.rank) + " has ended " +
                               to_string(operation->descriptor) + ", which it called as " + to_string(key);
      const Status over(Code::kCancelled, text);
      give_up(now, operation, over, over);
      run_local_actions(now);
    }
    if (local_) local_->forget(key);
  }
  if (pump_) pump_->flush(now);
  return true;
}

}  // namespace herring::runtime
