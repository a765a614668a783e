// Operations: from the call through one generation after the other to the end that all know of.

#include <algorithm>
#include <optional>
#include <utility>

#include "core/clock.h"
#include "core/copy.h"
#include "core/status.h"
#include "elastic/elastic_impl.h"
#include "elastic/elastic_runtime.h"
#include "runtime/name_uses.h"
#include "runtime/validate.h"

namespace herring::elastic {
namespace {

using runtime::Request;
using runtime::Work;
using Clock = std::chrono::steady_clock;

/// Nothing where it is lost.
std::optional<std::uint32_t> rank_in(const Group& group, std::uint64_t member) {
  const auto place = std::find(group.members.begin(), group.members.end(), member);
  if (place == group.members.end()) return std::nullopt;
  return static_cast<std::uint32_t>(place - group.members.begin());
}

/// An all_gather for more workers than there are left.
bool has_blocks_of_the_lost(const Request& request, const Group& group) {
  if (request.descriptor.collective != Collective::kAllGather || request.input.empty()) return false;
  const std::size_t blocks = request.output.size() / request.input.size();
  return blocks > group.members.size() && blocks <= group.most_members;
}

/// What ends with one of these was cut short by the end of its generation; it is nobody's fault who called.
bool is_break(Code code) {
  return code == Code::kPeerLost || code == Code::kTransport || code == Code::kShutdown || code == Code::kCancelled;
}

}  // namespace

void ElasticRuntime::Impl::wait_for_room(std::unique_lock<std::mutex>& lock) {
  if (!elastic || kept_bytes <= home.config.journal_bytes) return;
  // Others are slower, or the report is still to go; never for ever: they have a deadline for each operation.
  rendezvous->wake();
  changed.wait_for(lock, duration_of(home.config.timeout_s),
                   [this] { return kept_bytes <= home.config.journal_bytes || !life.refusal().is_ok(); });
}

/// What is called now is either in the plan that is being made, for all ranks alike, or after it: never beside it.
void ElasticRuntime::Impl::wait_for_plan(std::unique_lock<std::mutex>& lock) {
  changed.wait(lock, [this] { return !life.holds_calls(); });
}

/// The caller may not know yet who is in the group now: where others called before that changed, what they said counts.
Status ElasticRuntime::Impl::check(Request& request) const {
  if (Status refused = life.refusal(); !refused.is_ok()) return refused;
  const auto found = groups.find(request.group);
  if (found == groups.end()) {
    return {Code::kInvalidArgument, "group " + std::to_string(request.group.value) + " does not exist on this rank"};
  }
  const Group& group = found->second;
  if (!group.closed.is_ok()) return group.closed;
  if (!journal.has_room(request.group.value, request.name)) {
    return runtime::no_room_for_name(*request.name, journal.names());
  }
  const OperationId id = journal.next(request.group.value, request.name);
  if (outcomes.contains(id)) return Status::ok();  // Nothing of this call is asked for any more.
  if (const auto root = straddling.find(id); root != straddling.end()) {
    request.descriptor.root = rank_in(group, root->second).value_or(request.descriptor.root);
  }
  runtime::GroupRoute route;
  route.ranks = group.ranks;
  route.index = group.index;
  Status status = runtime::validate(request, route);
  if (!status.is_ok() && has_blocks_of_the_lost(request, group)) {
    return {Code::kPeerLost, to_string(request.descriptor) + kOthersAreIn};
  }
  return status;
}

std::shared_ptr<Work> ElasticRuntime::Impl::submit(const Request& request) {
  auto work = std::make_shared<runtime::PendingWork>(callbacks);
  std::unique_lock lock(mutex);
  wait_for_room(lock);
  wait_for_plan(lock);
  Operation operation;
  operation.request = request;
  Status status = check(operation.request);
  if (status.is_ok()) {
    operation.call = std::make_shared<runtime::OrderedCall>(
        runtime::OperationOrder::call_of(operation.request, groups.at(request.group).index));
    status = order->check(*operation.call);
  }
  if (!status.is_ok()) {
    work->complete(status);
    return work;
  }
  operation.request.name.reset();
  operation.request.is_waited_for = false;
  operation.work = work;
  const Group& group = groups.at(request.group);
  if (request.descriptor.collective == Collective::kBroadcast) {
    const std::uint32_t root = operation.request.descriptor.root;
    operation.root = root < group.members.size() ? group.members[root] : 0;  // Settled already.
  }
  Journal::Submission submission;
  submission.group = request.group.value;
  if (request.name) submission.name = *request.name;
  submission.collective = request.descriptor.collective;
  submission.bytes = request.output.size();
  submission.root = operation.root;
  submission.members = static_cast<std::uint32_t>(group.members.size());
  const OperationId id = journal.submit(submission);
  Operation& kept = operations.insert_or_assign(id, std::move(operation)).first->second;
  ++unfinished;
  order->enter(kept.call);
  if (!take_outcome(id, kept) && kept.call->waits_for == 0 && begin(id, kept)) begin_ready();
  return work;
}

/// What it reads is what it is to read from now on. True where it has ended at once and others may begin.
bool ElasticRuntime::Impl::begin(const OperationId& id, Operation& operation) {
  const Request& request = operation.request;
  operation.has_begun = true;
  if (elastic && runtime::overlap(request.input, request.output)) {
    operation.source.assign(request.input.begin(), request.input.end());
  }
  return life.starts_operations() && start(id, operation);
}

/// Those that have waited for others which have ended.
void ElasticRuntime::Impl::begin_ready() {
  for (bool again = true; std::exchange(again, false);) {
    std::vector<OperationId> ready;
    for (const auto& [id, operation] : operations) {
      if (!operation.has_begun && operation.call->waits_for == 0 && !operation.work->is_done()) ready.push_back(id);
    }
    for (const OperationId& id : ready) {
      if (const auto found = operations.find(id); found != operations.end()) again |= begin(id, found->second);
    }
  }
}

/// True where it was settled before this rank called it.
bool ElasticRuntime::Impl::take_outcome(const OperationId& id, Operation& operation) {
  if (const auto root = straddling.find(id); root != straddling.end()) {
    operation.root = root->second;
    journal.set_root(id, operation.root);
    straddling.erase(root);
  }
  const auto found = outcomes.find(id);
  if (found == outcomes.end()) return false;
  Outcome outcome = std::move(found->second);
  outcomes.erase(found);
  const std::size_t bytes = outcome.result ? outcome.result->size() : 0;
  if (outcome.status.is_ok() && bytes != operation.request.output.size()) {
    outcome.status = Status(Code::kMismatch, to_string(operation.request.descriptor) + ": on other ranks it has " +
                                                 std::to_string(bytes) + " bytes, here " +
                                                 std::to_string(operation.request.output.size()));
  }
  if (outcome.status.is_ok()) {
    if (bytes > 0) copy_bytes(*outcome.result, operation.request.output);
    operation.result = outcome.result;
    kept_bytes += bytes;
  }
  end_operation(id, operation, outcome.status);
  return true;
}

bool ElasticRuntime::Impl::is_old(const OperationId& id) const {
  const Record* record = journal.find(id);
  return old.runtime && record != nullptr && cutoff.covers(*record);
}

/// As begin().
bool ElasticRuntime::Impl::start(const OperationId& id, Operation& operation) {
  Request request = operation.request;
  request.key = id.key;
  if (!operation.source.empty()) request.input = operation.source;
  const Group& group = groups.at(request.group);
  if (request.descriptor.collective == Collective::kBroadcast) {
    if (const auto root = rank_in(group, operation.root)) {
      request.descriptor.root = *root;
    } else if (request.descriptor.root < group.members.size()) {
      // It is gone, and nobody else had called yet: the number means what it means to those who call only now.
      operation.root = group.members[request.descriptor.root];
      journal.set_root(id, operation.root);
    } else {
      return close_operation(id, operation,
                             Status(Code::kPeerLost, to_string(request.descriptor) + ": its root is lost"));
    }
  }
  // All get the sum, and who wants it is another number to those who call after a loss: it is not compared.
  if (request.descriptor.collective == Collective::kReduce) request.descriptor.root = 0;
  const bool goes_old = is_old(id);
  const Generation& generation = goes_old ? old : present;
  if (goes_old) ++old_unfinished;
  const std::uint64_t run = generation.number;
  operation.run = run;
  generation.runtime->submit(request)->on_done([this, id, run](const Status& status) { finished(id, run, status); });
  return false;
}

/// On a thread of the generation's runtime.
void ElasticRuntime::Impl::finished(const OperationId& id, std::uint64_t run, const Status& status) {
  std::span<const std::byte> output;
  {
    const std::scoped_lock lock(mutex);
    const auto found = operations.find(id);
    if (found == operations.end() || found->second.run != run) return;
    output = found->second.request.output;
  }
  // Its caller does not know yet that it is done: nobody else touches the memory.
  Data result;
  if (status.is_ok() && elastic) result = std::make_shared<std::vector<std::byte>>(output.begin(), output.end());
  const std::scoped_lock lock(mutex);
  const auto found = operations.find(id);
  if (found == operations.end() || found->second.run != run) return;
  Operation& operation = found->second;
  const bool is_cut_short = elastic && !life.has_ended() && !status.is_ok() && is_break(status.code());
  if (is_cut_short && id.group != 0 && life.weighs_doubts() && end_of(id, run).is_ok()) {
    doubtful.insert_or_assign(id, Doubt{run, status, Clock::now()});
    rendezvous->wake();
    return;
  }
  if (run == old.number && old_unfinished > 0) --old_unfinished;
  if (is_cut_short && end_of(id, run).is_ok()) return break_off(operation, status);
  if (result) {
    kept_bytes += result->size();
    operation.result = std::move(result);
  }
  end_operation(id, operation, status);
}

/// True where others may begin.
bool ElasticRuntime::Impl::close_operation(const OperationId& id, Operation& operation, const Status& status) {
  --unfinished;
  operation.run = 0;
  operation.source = {};
  const bool frees_others = order->leave(*operation.call);
  operation.work->complete(status);
  if (status.is_ok()) {
    journal.complete(id);
  } else {
    journal.fail(id);
  }
  const auto group = groups.find(GroupId{id.group});
  bool is_over = group == groups.end() || !group->second.closed.is_ok();  // Nobody calls it any more.
  if (!is_over && !status.is_ok()) is_over = !end_of(id, present.number).is_ok();
  if (elastic && !is_over) {
    report(id);
  } else {
    if (elastic && group == groups.end()) report(id);  // Those who stay in the group keep it until all have it.
    forget(id);
    if (old.runtime) rendezvous->wake();
  }
  changed.notify_all();
  return frees_others;
}

/// Others wait for it, for memory or to come to a boundary, and this rank may have nothing else to say.
void ElasticRuntime::Impl::report(const OperationId& id) {
  if (reports.empty() || is_journal_full()) rendezvous->wake();
  reports.add(id);
}

void ElasticRuntime::Impl::end_operation(const OperationId& id, Operation& operation, const Status& status) {
  if (close_operation(id, operation, status)) begin_ready();
}

void ElasticRuntime::Impl::forget(const OperationId& id) {
  const auto found = operations.find(id);
  if (found == operations.end() || !found->second.work->is_done()) return;
  if (found->second.result) kept_bytes -= found->second.result->size();
  operations.erase(found);
  journal.forget(id);
}

std::optional<std::uint64_t> ElasticRuntime::Impl::take_number(GroupId id) {
  std::unique_lock lock(mutex);
  wait_for_plan(lock);
  return groups.contains(id) ? std::optional(journal.take_number(id.value)) : std::nullopt;
}

/// Nothing runs any more.
void ElasticRuntime::Impl::forget_everything() {
  for (auto& [id, operation] : operations) {
    if (operation.work->is_done()) continue;
    reports.add(id);  // This one will never ask for it.
    --unfinished;
    order->leave(*operation.call);
    operation.work->complete(Status(Code::kCancelled, "the job starts again from an earlier state"));
  }
  operations.clear();
  outcomes.clear();
  straddling.clear();
  kept_bytes = 0;
  journal.restart();
}

}  // namespace herring::elastic
