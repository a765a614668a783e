// From one generation to the next: what runs ends, all journals make one plan, and what is pending is done again.

#include <algorithm>
#include <set>
#include <utility>

#include "core/status.h"
#include "core/text.h"
#include "elastic/elastic_impl.h"

namespace herring::elastic {
namespace {

using runtime::Work;
using Clock = std::chrono::steady_clock;

constexpr Duration kGoPatience = std::chrono::seconds(150);
// Messages between workers that hand results on; above what frameworks use in group 0, and met by no other receive.
constexpr std::uint64_t kDeliveryTag = (std::uint64_t{1} << 63) | (std::uint64_t{1} << 62);

}  // namespace

void ElasticRuntime::Impl::switch_over(const std::string& reason) {
  leave_present(reason);
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
      if (life.has_ended()) return std::nullopt;
    }
    Message message;
    if (!rendezvous->next(message, deadline)) continue;
    if (obey(message) == Lifecycle::Command::kJoin) return message;
  }
  return std::nullopt;
}

/// Nothing runs in the present generation any more when it returns, and nothing writes to anybody's memory.
void ElasticRuntime::Impl::leave_present(const std::string& reason) {
  drop_beside();
  Generation draining;
  Departure how = Departure::kBroken;
  {
    const std::scoped_lock lock(mutex);
    how = life.departure();
    draining = std::exchange(old, {});
    old_unfinished = 0;
  }
  const Status why(Code::kPeerLost, reason);
  if (how != Departure::kBoundary) {
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
    for (auto& [id, operation] : operations) operation.run = 0;
    changed.notify_all();  // Who leaves a group waits for it.
    if (how == Departure::kAnew) forget_everything();
  }
  report_completed();  // Others wait until all have what they have, or will never ask for it.
  {
    const std::scoped_lock lock(mutex);
    if (!life.advance(Event::kHaveLeft)) return;
  }
  send(MessageKind::kReady, present.number, "", how != Departure::kBroken);
}

Status ElasticRuntime::Impl::join(const Message& go, const std::string& reason, Instant deadline) {
  if (go.at_boundary) {
    const std::scoped_lock lock(mutex);
    if (!journal.is_new()) mark_start();
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
      if (life.starts_operations()) throw;  // It is in; what failed is worse than to join.
      static_cast<void>(life.advance(Event::kFailToJoin));
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
    if (!life.advance(Event::kPlan)) throw Error(life.end());
    summary = journal.summary();
  }
  return make_plan(exchange(*next.runtime, "herring.elastic.journal", summary), next.members);
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
  if (life.has_ended()) throw Error(life.end());
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
  reports.clear();
  for (const auto& [id, record] : journal.records()) {
    if (record.state != Record::State::kPending) reports.add(id);
  }
  newcomers = 0;
  static_cast<void>(life.advance(Event::kInstall));
  restart_operations();
  tell_change(go, before, reason);
  changed.notify_all();
}

void ElasticRuntime::Impl::restart_operations() {
  std::vector<OperationId> waiting;
  for (const auto& [id, operation] : operations) {
    if (operation.run != 0 || operation.work->is_done()) continue;
    if (operation.has_begun && groups.contains(GroupId{id.group}))
      waiting.push_back(id);  // Else its group is being left.
  }
  for (const OperationId& id : waiting) {
    const auto found = operations.find(id);
    if (found == operations.end() || found->second.run != 0 || found->second.work->is_done()) continue;
    Operation& operation = found->second;
    const OpDescriptor& descriptor = operation.request.descriptor;
    const bool fits =
        descriptor.collective != Collective::kAllGather ||
        operation.request.output.size() == operation.request.input.size() * groups.at(GroupId{id.group}).members.size();
    if (!fits) {
      end_operation(id, operation, Status(Code::kPeerLost, to_string(descriptor) + kOthersAreIn));
    } else if (start(id, operation)) {
      begin_ready();
    }
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
    const std::string what = "the job goes on with " + counted(change.size, "worker") + " (" +
                             std::to_string(change.lost) + " lost, " + std::to_string(change.joined) + " new)";
    logger.log(LogLevel::kWarning, reason.empty() ? what : what + ": " + reason);
  }
  if (change_callback) callbacks->run([callback = change_callback, change] { callback(change); });
}

}  // namespace herring::elastic
