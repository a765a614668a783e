// From one generation to the next: the only thread that listens to the rendezvous.

#include <pthread.h>

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>

#include "core/status.h"
#include "elastic/elastic_impl.h"

namespace herring::elastic {
namespace {

using runtime::Work;
using Clock = std::chrono::steady_clock;

constexpr Duration kReportEvery = std::chrono::milliseconds(50);
constexpr Duration kGoPatience = std::chrono::seconds(150);
constexpr std::size_t kReportSize = 16384;
// Messages between workers that hand results on; above what frameworks use in group 0, and met by no other receive.
constexpr std::uint64_t kDeliveryTag = (std::uint64_t{1} << 63) | (std::uint64_t{1} << 62);

bool lies_below(const GroupRecord& limit, const GroupRecord& submitted) {
  if (submitted.next < limit.next) return false;
  return std::all_of(limit.uses.begin(), limit.uses.end(), [&submitted](const auto& use) {
    const auto found = submitted.uses.find(use.first);
    return found != submitted.uses.end() && found->second >= use.second;
  });
}

/// What is no Error of ours (no memory, no thread) ends an attempt as well, and not the process.
Status status_of(const std::exception& error) {
  const auto* const own = dynamic_cast<const Error*>(&error);
  return own != nullptr ? own->status() : Status(Code::kInternal, error.what());
}

std::vector<Summary> decode_all(const std::vector<std::vector<std::byte>>& blobs) {
  std::vector<Summary> summaries;
  for (std::size_t rank = 0; rank < blobs.size(); ++rank) {
    auto summary = decode_summary(blobs[rank]);
    if (!summary) throw Error(Code::kProtocol, "worker " + std::to_string(rank) + " sent an unreadable journal");
    summaries.push_back(std::move(*summary));
  }
  return summaries;
}

}  // namespace

void ElasticRuntime::Impl::send(MessageKind kind, std::uint64_t generation, const std::string& text, bool at_boundary) {
  Message message;
  message.kind = kind;
  message.generation = generation;
  message.text = text;
  message.at_boundary = at_boundary;
  rendezvous->send(std::move(message));
}

void ElasticRuntime::Impl::supervise() {
  pthread_setname_np(pthread_self(), "herring-superv");
  for (;;) {
    bool is_due = false;
    bool wants_boundary = false;
    {
      const std::scoped_lock lock(mutex);
      // Who has said that it is connected beside is counted on: the others go over with it, or nobody does.
      if ((!supervises && !beside) || !ended.is_ok()) break;
      is_due = !unreported.empty() || !doubtful.empty();
      wants_boundary = is_ready_for_boundary();
    }
    if (wants_boundary) {
      switch_over(true, "");
      continue;
    }
    Message message;
    if (rendezvous->next(message, is_due ? Clock::now() + kReportEvery : Instant::max())) handle(message);
    decide_doubtful();
    report_broken();
    report_completed();
    retire_if_drained();
  }
  {
    const std::scoped_lock lock(mutex);
    is_supervising = false;
    doubts_are_over();
    changed.notify_all();
  }
  stay_out();
  // An abort, or what cannot go on: for the others this process is lost.
  const std::scoped_lock lock(mutex);
  if (!ended.is_ok()) rendezvous->close();
}

/// While this one ends its last generation it goes to no other: the others shall not wait for it.
void ElasticRuntime::Impl::stay_out() {
  for (;;) {
    {
      const std::scoped_lock lock(mutex);
      if (is_gone || !ended.is_ok()) return;
    }
    Message message;
    if (!rendezvous->next(message, Instant::max())) continue;
    if (message.kind == MessageKind::kGo && message.is_planned) {
      send(MessageKind::kBroken, message.generation, "it has finished");
    }
    if (message.kind == MessageKind::kEnd) return;
  }
}

void ElasticRuntime::Impl::handle(const Message& message) {
  switch (message.kind) {
    case MessageKind::kBreak:
      if (message.is_planned) return drop_beside();
      if (message.generation >= present.number) switch_over(false, message.text);
      return;
    case MessageKind::kGo:
      if (message.is_planned) build_beside(message);
      return;
    case MessageKind::kSwitch:
      return go_over(message);
    case MessageKind::kNewcomers: {
      const std::scoped_lock lock(mutex);
      newcomers = message.workers;
      return;
    }
    case MessageKind::kSettled:
      return settle(message);
    case MessageKind::kEnd:
      return give_up(Status(Code::kPeerLost, message.text));
    default:
      return;
  }
}

void ElasticRuntime::Impl::settle(const Message& message) {
  const std::scoped_lock lock(mutex);
  for (const OperationId& id : message.operations) {
    forget(id);
    straddling.erase(id);
  }
  changed.notify_all();
}

void ElasticRuntime::Impl::report_completed() {
  std::vector<Message> reports;
  {
    const std::scoped_lock lock(mutex);
    if (!is_stable || !ended.is_ok()) return;
    for (const OperationId& id : std::exchange(unreported, {})) {
      const auto group = groups.find(GroupId{id.group});
      const auto left = leaving.find(GroupId{id.group});
      if (group == groups.end() && left == leaving.end()) continue;
      const std::size_t members = group != groups.end() ? group->second.members.size() : left->second;
      if (reports.empty() || reports.back().operations.size() == kReportSize) {
        reports.emplace_back();
        reports.back().kind = MessageKind::kCompleted;
        reports.back().generation = present.number;
      }
      reports.back().operations.push_back(id);
      reports.back().counts.push_back(static_cast<std::uint32_t>(members));
    }
  }
  for (Message& report : reports) rendezvous->send(std::move(report));
}

void ElasticRuntime::Impl::report_broken() {
  std::string reason;
  {
    const std::scoped_lock lock(mutex);
    if (broken.empty() || reported_broken == present.number) return;
    reason = broken;
    reported_broken = present.number;
  }
  send(MessageKind::kBroken, present.number, reason);  // It says kBreak to all, this one too.
}

void ElasticRuntime::Impl::switch_over(bool at_boundary, const std::string& reason) {
  leave_present(at_boundary, reason);
  for (;;) {
    const std::optional<Message> go = await_go(Clock::now() + kGoPatience);
    if (!go) {
      give_up(Status(Code::kTimeout, "the rendezvous did not set up the job again in time, after: " + reason));
      return;
    }
    const Status joined = join(*go, reason.empty() ? go->text : reason, Clock::now() + join_timeout);
    if (joined.is_ok()) return;
    send(MessageKind::kBroken, go->generation, joined.message());
    send(MessageKind::kReady, go->generation);
  }
}

std::optional<Message> ElasticRuntime::Impl::await_go(Instant deadline) {
  while (Clock::now() < deadline) {
    {
      const std::scoped_lock lock(mutex);
      if (!ended.is_ok()) return std::nullopt;
    }
    Message message;
    if (!rendezvous->next(message, deadline)) continue;
    switch (message.kind) {
      case MessageKind::kGo:
        if (!message.is_planned) return message;
        break;
      case MessageKind::kEnd:
        give_up(Status(Code::kPeerLost, message.text));
        return std::nullopt;
      case MessageKind::kSettled:
        settle(message);
        break;
      default:
        break;  // Of a generation that this one has left.
    }
  }
  return std::nullopt;
}

/// Nothing runs in the present generation any more when it returns, and nothing writes to anybody's memory.
void ElasticRuntime::Impl::leave_present(bool at_boundary, const std::string& reason) {
  drop_beside();
  Generation draining;
  bool gives_up = !at_boundary;
  {
    const std::scoped_lock lock(mutex);
    gives_up = gives_up || starts_again;
    is_stable = false;
    draining = std::exchange(old, {});
    old_unfinished = 0;
  }
  const Status why(Code::kPeerLost, reason);
  if (gives_up) {
    present.runtime->give_up(why);
    if (draining.runtime) draining.runtime->give_up(why);
  }
  present.runtime->shutdown();
  if (draining.runtime) draining.runtime->shutdown();
  wait_for_retired();
  {
    const std::scoped_lock lock(mutex);
    for (auto& [id, group] : groups) {
      if (group.closed.is_ok()) group.closed = present.runtime->group_end(id);
    }
    doubtful.clear();
    count_in(draining.runtime);
    broken.clear();
    for (auto& [id, operation] : operations) operation.run = 0;
    changed.notify_all();  // Who leaves a group waits for it.
    if (at_boundary && starts_again) forget_everything();
  }
  send(MessageKind::kReady, present.number, "", at_boundary);
}

Status ElasticRuntime::Impl::join(const Message& go, const std::string& reason, Instant deadline) {
  if (go.at_boundary) {
    const std::scoped_lock lock(mutex);
    if (!journal.is_new()) mark_start();
    boundary_reached = true;
  }
  Generation next;
  try {
    next = build(home, go, deadline, [this, &go] { return rendezvous->has_broken(go.generation); });
    Plan plan;
    std::vector<Data> received;
    if (elastic) {
      plan = make_common_plan(next);
      received = deliver(next, plan);
    }
    install(next, go, plan, received, reason);
    return Status::ok();
  } catch (const std::exception& error) {
    {
      const std::scoped_lock lock(mutex);
      is_planning = false;
      changed.notify_all();
    }
    if (next.runtime) {
      next.runtime->give_up(status_of(error));
      next.runtime->shutdown();
    }
    logger.log(LogLevel::kInfo, "generation " + std::to_string(go.generation) + " could not start: " + error.what());
    return status_of(error);
  }
}

/// Every rank has everything that it has called so far: that is what makes it a boundary.
void ElasticRuntime::Impl::mark_start() {
  journal.mark_start();
  std::vector<OperationId> all;
  for (const auto& [id, operation] : operations) all.push_back(id);
  for (const OperationId& id : all) forget(id);
  outcomes.clear();
  straddling.clear();
}

Plan ElasticRuntime::Impl::make_common_plan(Generation& next) {
  Summary summary;
  {
    const std::scoped_lock lock(mutex);
    is_planning = true;
    summary = journal.summary();
  }
  const auto summaries = decode_all(gather(*next.runtime, "herring.elastic.journal", encode(summary)));
  return make_plan(summaries, next.members);
}

/// Results that this rank lacks, by step; gives those that others lack.
std::vector<Data> ElasticRuntime::Impl::deliver(const Generation& next, const Plan& plan) {
  const std::uint32_t rank = next.runtime->rank();
  std::vector<Data> received(plan.steps.size());
  std::vector<std::shared_ptr<Work>> works;
  std::vector<Data> kept;  // Until they are sent.
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    if (step.kind != Step::Kind::kDeliver || step.bytes == 0) continue;
    const std::uint64_t tag = kDeliveryTag | i;
    if (step.from == rank) {
      Data result;
      {
        const std::scoped_lock lock(mutex);
        if (const auto found = operations.find(step.id); found != operations.end()) result = found->second.result;
      }
      if (!result) throw Error(Code::kInternal, "a result that others need is not kept here");
      kept.push_back(result);
      for (const std::uint32_t to : step.to) works.push_back(next.runtime->send({GroupId{0}, to, tag, *result}));
    } else if (std::find(step.to.begin(), step.to.end(), rank) != step.to.end()) {
      auto memory = std::make_shared<std::vector<std::byte>>(step.bytes);
      works.push_back(next.runtime->receive({GroupId{0}, step.from, tag, *memory}));
      received[i] = std::move(memory);
    }
  }
  for (const auto& work : works) work->wait(Instant::max());  // Each has a deadline.
  for (const auto& work : works) work->status().or_throw();
  return received;
}

void ElasticRuntime::Impl::apply(const Step& step, bool concerns_me, const Data& received) {
  if (!concerns_me) return;
  Outcome outcome;
  if (step.kind == Step::Kind::kRedo) {
    if (step.root == 0) return;  // No broadcast.
    if (const auto found = operations.find(step.id); found != operations.end()) {
      found->second.root = step.root;
    } else {
      straddling[step.id] = step.root;
    }
    return;
  }
  if (step.kind == Step::Kind::kFail) {
    const OpKey key{GroupId{step.id.group}, step.id.key, 0};
    outcome.status = Status(Code::kPeerLost, to_string(key) + ": " + step.reason);
  }
  outcome.result = received;
  outcomes[step.id] = std::move(outcome);
  const auto found = operations.find(step.id);
  if (found != operations.end() && !found->second.work->is_done()) take_outcome(step.id, found->second);
}

/// `next` is what counts from here on. The caller holds the mutex.
void ElasticRuntime::Impl::adopt(Generation next, bool is_planned) {
  if (present.runtime != old.runtime) count_in(present.runtime);
  present = std::move(next);
  own_id = present.members[present.runtime->rank()];
  groups.at(GroupId{0}).members = present.members;
  for (auto& [id, group] : groups) {
    std::vector<std::uint64_t> left;
    group.ranks.clear();
    for (const std::uint64_t member : group.members) {
      const auto place = std::find(present.members.begin(), present.members.end(), member);
      if (place == present.members.end()) continue;
      if (member == own_id) group.index = static_cast<std::uint32_t>(left.size());
      left.push_back(member);
      group.ranks.push_back(static_cast<std::uint32_t>(place - present.members.begin()));
    }
    group.members = std::move(left);
    group.most_members = std::max(group.most_members, group.members.size());
    if (id.value != 0) present.runtime->add_group(id, group.ranks);
    if (!group.closed.is_ok()) present.runtime->abort_group(id, group.closed.message());
  }
  tell_partings(is_planned);
}

void ElasticRuntime::Impl::install(Generation next, const Message& go, const Plan& plan,
                                   const std::vector<Data>& received, const std::string& reason) {
  const std::scoped_lock lock(mutex);
  const std::vector<std::uint64_t> before = present.members;
  const std::uint32_t rank = next.runtime->rank();
  if (elastic && journal.is_new()) journal.begin_at(plan.start);
  journal.settle_in();
  adopt(std::move(next), false);
  for (auto& [id, group] : groups) {
    const auto called = plan.next.find(id.value);
    if (called != plan.next.end()) group.first_of_messages = called->second;
  }
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    apply(step, std::find(step.to.begin(), step.to.end(), rank) != step.to.end(), received[i]);
  }
  // Who has come or gone since has other counts: everybody says again what it has.
  unreported.clear();
  for (const auto& [id, record] : journal.records()) {
    if (record.state != Record::State::kPending) unreported.push_back(id);
  }
  newcomers = 0;
  is_planning = false;
  is_stable = true;
  restart_operations();
  if (boundary_reached) boundary_wanted = false;
  tell_change(go, before, reason);
  changed.notify_all();
}

void ElasticRuntime::Impl::restart_operations() {
  for (auto& [id, operation] : operations) {
    if (operation.run != 0 || operation.work->is_done()) continue;
    if (!operation.has_begun || !groups.contains(GroupId{id.group})) continue;  // It waits; its group is being left.
    const Group& group = groups.at(GroupId{id.group});
    const OpDescriptor& descriptor = operation.request.descriptor;
    const bool fits = descriptor.collective != Collective::kAllGather ||
                      operation.request.output.size() == operation.request.input.size() * group.members.size();
    if (!fits) {
      end_operation(id, operation, Status(Code::kPeerLost, to_string(descriptor) + kOthersAreIn));
      continue;
    }
    start(id, operation);
  }
}

void ElasticRuntime::Impl::tell_change(const Message& go, const std::vector<std::uint64_t>& before,
                                       const std::string& reason) {
  if (before.empty()) return;  // It has only just come in.
  Change change;
  change.generation = go.generation;
  change.rank = present.runtime->rank();
  change.size = present.runtime->size();
  change.reason = reason;
  const std::set<std::uint64_t> then(before.begin(), before.end());
  const std::set<std::uint64_t> here(present.members.begin(), present.members.end());
  change.lost = static_cast<std::uint32_t>(
      std::count_if(then.begin(), then.end(), [&here](std::uint64_t id) { return !here.contains(id); }));
  change.joined = static_cast<std::uint32_t>(
      std::count_if(here.begin(), here.end(), [&then](std::uint64_t id) { return !then.contains(id); }));
  if (change.rank == 0) {
    const std::string what = "the job goes on with " + std::to_string(change.size) + " workers (" +
                             std::to_string(change.lost) + " lost, " + std::to_string(change.joined) + " new)";
    logger.log(LogLevel::kWarning, reason.empty() ? what : what + ": " + reason);
  }
  if (change_callback) callbacks->run([callback = change_callback, change] { callback(change); });
}

void ElasticRuntime::Impl::give_up(const Status& status) {
  const std::scoped_lock lock(mutex);
  if (!ended.is_ok()) return;
  ended = status;
  doubts_are_over();
  for (auto& [id, operation] : operations) {
    if (operation.work->is_done()) continue;
    // Those that run end with their runtime, which lets go of their memory first.
    if (operation.run == 0) {
      --unfinished;
      order->leave(*operation.call);
      operation.work->complete(status);
    }
  }
  if (present.runtime) present.runtime->give_up(status);
  if (old.runtime) old.runtime->give_up(status);
  changed.notify_all();
}

void ElasticRuntime::Impl::build_beside(const Message& go) {
  drop_beside();
  {
    const std::scoped_lock lock(mutex);
    // Which messages belong to which generation cannot be told: servers have to wait for another occasion.
    if (messages_used == 0) holds_messages = true;
  }
  if (!holds_messages) {
    return send(MessageKind::kBroken, go.generation, "it sends messages from worker to worker");
  }
  try {
    beside =
        build(home, go, Clock::now() + join_timeout, [this, &go] { return rendezvous->has_broken(go.generation); });
    send(MessageKind::kBuilt, go.generation);
  } catch (const std::exception& error) {
    drop_beside();
    send(MessageKind::kBroken, go.generation, error.what());
  }
}

void ElasticRuntime::Impl::drop_beside() {
  if (beside) {
    beside->runtime->give_up(Status(Code::kCancelled, "the new servers could not join"));
    beside->runtime->shutdown();
    beside.reset();
  }
  const std::scoped_lock lock(mutex);
  holds_messages = false;
  changed.notify_all();
}

/// All are connected in the generation beside: what nobody has submitted yet goes through it.
void ElasticRuntime::Impl::go_over(const Message& message) {
  if (!beside || beside->number != message.generation) return;
  Summary submitted;
  {
    const std::scoped_lock lock(mutex);
    is_stable = false;
    for (const auto& [id, group] : journal.groups()) submitted.groups.push_back(group);
  }
  std::vector<Summary> all;
  try {
    wait_for_retired();
    all = decode_all(gather(*beside->runtime, "herring.elastic.switch", encode(submitted)));
  } catch (const std::exception& error) {
    if (elastic) return switch_over(false, error.what());
    return give_up(Status(Code::kPeerLost, std::string("while new servers joined: ") + error.what()));
  }
  const std::scoped_lock lock(mutex);
  cutoff.clear();
  for (const Summary& summary : all) {
    for (const GroupRecord& group : summary.groups) {
      GroupRecord& most = cutoff[group.group];
      most.next = std::max(most.next, group.next);
      for (const auto& [name, uses] : group.uses) most.uses[name] = std::max(most.uses[name], uses);
    }
  }
  std::erase_if(cutoff, [this](const auto& entry) { return !groups.contains(GroupId{entry.first}); });
  old_unfinished = 0;
  for (const auto& [id, operation] : operations) {
    if (operation.run == present.number && !operation.work->is_done()) ++old_unfinished;
  }
  old = present;
  adopt(std::move(*beside), true);
  beside.reset();
  is_stable = true;
  holds_messages = false;
  restart_operations();
  if (present.runtime->rank() == 0) {
    logger.log(LogLevel::kWarning,
               "the job goes on with " + std::to_string(present.hub->servers().size()) + " server processes");
  }
  changed.notify_all();
}

void ElasticRuntime::Impl::retire_if_drained() {
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex);
    if (!old.runtime || old_unfinished > 0) return;
    for (const auto& [id, limit] : cutoff) {
      const auto submitted = journal.groups().find(id);
      if (submitted != journal.groups().end() && !lies_below(limit, submitted->second)) return;
    }
    retired = std::exchange(old, {}).runtime;
    number = present.number;
  }
  try {
    retiring = std::async(std::launch::async, [this, runtime = retired, number] { retire(runtime, number); });
  } catch (const std::system_error&) {
    retire(retired, number);  // No thread can be started: then here, while nothing else is listened to.
  }
}

/// The rendezvous keeps its hub until all have said so.
void ElasticRuntime::Impl::retire(std::shared_ptr<runtime::Runtime> runtime, std::uint64_t next) {
  runtime->shutdown();
  {
    const std::scoped_lock lock(mutex);
    count_in(runtime);
    retired.reset();
  }
  send(MessageKind::kSwitched, next);
}

/// It is over; the caller holds the mutex.
void ElasticRuntime::Impl::count_in(const std::shared_ptr<runtime::Runtime>& runtime) {
  if (runtime) past += runtime->stats();
}

void ElasticRuntime::Impl::wait_for_retired() {
  if (retiring.valid()) retiring.get();
}

}  // namespace herring::elastic
