// The life of an operation on the thread in the seat: begun or held, and how it ends.

#include "runtime/pending_operations.h"

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "runtime/durations.h"
#include "runtime/pending_operations_part.h"

namespace herring::runtime {

PendingOperations::PendingOperations(PendingOperationsOptions options)
    : options_(std::move(options)), host_(options_.host), servers_(options_.servers) {}

PendingOperations::~PendingOperations() = default;

void PendingOperations::start(Instant now, const Operation& operation) {
  if (operation->call.waits_for > 0) {
    held_.push_back(operation);
    held_deadline_ = std::min(held_deadline_, operation->deadline);
  } else {
    begin(now, operation);
  }
}

bool PendingOperations::knows(const Operation& operation) const {
  return operation->work->is_done() || std::ranges::find(operations_, operation) != operations_.end() ||
         std::ranges::find(held_, operation) != held_.end();
}

/// Nobody that it would have to wait for is pending.
void PendingOperations::begin(Instant now, const Operation& operation) {
  const Status left = check_left(*operation);
  if (!left.is_ok() && !operation->announced) return end(operation, left);
  const Status status = check_departed(*operation);
  // One that is announced may be over on the rank that has left, which waited for nothing but that.
  if (!status.is_ok() && !operation->announced) return end(operation, status);
  plan_parts(*operation);
  operation->overdue = Overdue(operation->deadline);
  operations_.push_back(operation);
  if (operation->has_backup) {
    start_join(now, operation);
  } else {
    start_parts(now, operation);
  }
  if (!left.is_ok()) {  // What is announced here is taken back.
    give_up(now, operation, left, left);
    run_host(now);
  }
  if (status.is_ok()) return;
  for (const auto& [rank, text] : departed_) {
    if (host_ != nullptr) host_->end_without(now, rank, text);
  }
}

std::vector<PendingOperations::Operation> PendingOperations::take_ready() {
  may_begin_ = false;
  std::vector<Operation> ready;
  std::erase_if(held_, [&ready](const Operation& operation) {
    if (operation->call.waits_for > 0) return false;
    ready.push_back(operation);
    return true;
  });
  return ready;
}

void PendingOperations::end(const Operation& operation, const Status& status) {
  if (operation->is_declared) {
    // Whatever ends it beside these, the messages end with it or tell better why.
    const OpKey key{operation->group->id, operation->op, 0};
    if (status.code() == Code::kMismatch || !check_left(*operation).is_ok()) refused_.emplace_back(key, status);
    return;
  }
  may_begin_ |= options_.order->leave(operation->call);
  ++(status.is_ok() ? options_.counters->ops_completed : options_.counters->ops_failed);
  options_.before_complete();
  operation->work->complete(status);
  options_.on_complete();
}

void PendingOperations::end_held(const Operation& operation, const Status& status) {
  std::erase(held_, operation);
  end(operation, status);
}

void PendingOperations::tick(Instant now) {
  expire_held(now);
  expire_departed(now);
  CompleteAction action;
  while (servers_ != nullptr && servers_->next_completion(action)) network_done(now, action);
}

void PendingOperations::expire_held(Instant now) {
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

void PendingOperations::expire_departed(Instant now) {
  if (departed_.empty()) return;  // Engines keep the ordinary deadlines.
  for (const Operation& operation : std::vector(operations_)) {
    const Status gone = check_departed(*operation);
    if (gone.is_ok() || operation->deadline > now || !operation->failure.is_ok()) continue;
    operation->failure = gone;
    abort_parts(now, *operation, gone);
  }
  run_host(now);
}

Instant PendingOperations::next_deadline() const {
  Instant next = held_deadline_;
  if (departed_.empty()) return next;
  for (const Operation& operation : operations_) next = std::min(next, operation->deadline);
  return next;
}

std::string PendingOperations::stuck(Instant now, Duration patience) {
  std::string what;
  for (const Operation& operation : operations_) {
    if (operation->overdue.look(now, patience)) what = to_string(operation->descriptor);
  }
  return what;
}

bool PendingOperations::note_departed(std::uint32_t rank, const std::string& how) {
  if (std::ranges::find(departed_, rank, &Departed::rank) != departed_.end()) return false;
  departed_.push_back({rank, how});
  return true;
}

/// What they took part in is finished on their side and on its way here; what they did not join never comes. The
/// engines know which is which, but for groups that a lane does not know yet.
void PendingOperations::await_departed(Instant now) {
  const Duration grace = dead_after(options_.config);
  for (const Operation& operation : operations_) {
    if (!check_departed(*operation).is_ok()) operation->deadline = std::min(operation->deadline, now + grace);
  }
}

Status PendingOperations::check_departed(const PendingOperation& operation) const {
  for (const auto& [rank, text] : departed_) {
    const auto& ranks = operation.group->route.ranks;
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
      return Status(Code::kPeerLost, text + " and cannot take part in " + to_string(operation.descriptor));
    }
  }
  return Status::ok();
}

Status PendingOperations::check_left(const PendingOperation& operation) const {
  if (!operation.is_counted) return Status::ok();
  const Group::Left* const left = operation.group->left_before(operation.op);
  if (left == nullptr) return Status::ok();
  return Status(Code::kPeerLost, left->text + " and cannot take part in " + to_string(operation.descriptor));
}

/// What that rank has called goes on.
void PendingOperations::end_uncalled(Instant now, const std::shared_ptr<Group>& group) {
  for (const Operation& operation : std::vector(held_)) {
    if (operation->group != group) continue;
    if (const Status gone = check_left(*operation); !gone.is_ok()) end_held(operation, gone);
  }
  for (const Operation& operation : std::vector(operations_)) {
    if (operation->group != group) continue;
    if (const Status gone = check_left(*operation); !gone.is_ok()) give_up(now, operation, gone, gone);
  }
  run_host(now);
}

void PendingOperations::end_group(Instant now, GroupId group, const Status& here, const Status& elsewhere) {
  for (const Operation& operation : std::vector(held_)) {
    if (operation->group->id == group) end_held(operation, here);
  }
  for (const Operation& operation : std::vector(operations_)) {
    if (operation->group->id == group) give_up(now, operation, here, elsewhere);
  }
  run_host(now);
}

bool PendingOperations::has_pending(GroupId group) const {
  return std::ranges::any_of(operations_, [group](const Operation& each) { return each->group->id == group; });
}

/// What others wait for this rank to do ends for them too: also the parts that they may have begun and this one has
/// not.
void PendingOperations::give_up(Instant now, const Operation& operation, const Status& here, const Status& elsewhere) {
  if (!operation->failure.is_ok()) return;
  const std::uint32_t last = std::min(operation->parts, operation->next_part + kMostAhead);
  while (operation->next_part < last) start_part(now, operation, operation->next_part++);
  operation->failure = here;
  operation->overdue = Overdue(now);
  if (servers_ != nullptr && operation->path == GroupRoute::Path::kHostFirst) {
    // Other hosts have no other way to hear of a part that is still inside this one.
    for (const auto& [key, part] : parts_) {
      if (part->operation != operation || part->network == Part::Network::kUnderWay) continue;
      servers_->abort(now, network_operation(now, *part, {}), elsewhere);
    }
  }
  abort_parts(now, *operation, elsewhere);
  if (servers_ != nullptr) servers_->flush(now);
}

void PendingOperations::declare(const WaitingCollective& waiting) {
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

void PendingOperations::begin_declared(Instant now) {
  for (const Operation& operation : std::exchange(declarations_, {})) begin(now, operation);
}

void PendingOperations::end_declared(Instant now, const OpKey& key) {
  const auto found = std::ranges::find_if(operations_, [&key](const Operation& operation) {
    return operation->is_declared && operation->group->id == key.group && operation->op == key.op;
  });
  if (found != operations_.end()) {
    const Operation operation = *found;  // NOLINT(performance-unnecessary-copy-initialization): give_up() takes it out.
    const std::string text = "rank " + std::to_string(options_.rank) + " has ended " +
                             to_string(operation->descriptor) + ", which it called as " + to_string(key);
    const Status over(Code::kCancelled, text);
    give_up(now, operation, over, over);
    run_host(now);
  }
  if (host_ != nullptr) host_->forget(key);
}

std::string PendingOperations::name_of(const OpKey& key) const {
  const Part* const part = find(key);
  return part == nullptr ? "" : part->operation->name;
}

std::string PendingOperations::listed() const {
  constexpr std::size_t kNamed = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(operations_.size(), kNamed); ++i) {
    const PendingOperation& operation = *operations_[i];
    text += (i == 0 ? ": " : ", ") + (operation.name.empty() ? "" : "'" + operation.name + "' ") +
            to_string(operation.descriptor);
  }
  return text + (operations_.size() > kNamed ? ", ..." : "");
}

std::vector<PendingOperations::Operation> PendingOperations::close() {
  parts_.clear();
  for (const Operation& operation : operations_) operation->holds.clear();
  std::vector<Operation> all = std::exchange(operations_, {});
  std::erase_if(all, [](const Operation& operation) { return operation->is_declared; });
  all.insert(all.end(), held_.begin(), held_.end());
  held_.clear();
  held_deadline_ = Instant::max();
  declarations_.clear();
  refused_.clear();
  return all;
}

}  // namespace herring::runtime
