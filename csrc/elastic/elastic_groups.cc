// Groups of workers: known to all generations, and the end of what is under way in one that is left or given up.

#include <algorithm>
#include <utility>
#include <vector>

#include "core/status.h"
#include "elastic/elastic_impl.h"
#include "elastic/elastic_runtime.h"

namespace herring::elastic {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostPartings = 256;  // Who misses one waits for its time-out.
constexpr Duration kNewsPatience = std::chrono::seconds(1);

}  // namespace

void ElasticRuntime::Impl::add_group(GroupId id, std::span<const std::uint32_t> ranks) {
  const std::scoped_lock lock(mutex);
  if (groups.contains(id)) {
    throw Error(Code::kInvalidArgument, "group " + std::to_string(id.value) + " exists already");
  }
  Group group{id, {}, {ranks.begin(), ranks.end()}, 0, ranks.size()};
  for (const std::uint32_t rank : ranks) {
    if (rank >= present.members.size()) {
      throw Error(Code::kInvalidArgument, "there is no rank " + std::to_string(rank) + "; the job has " +
                                              std::to_string(present.members.size()) + " workers now");
    }
    group.members.push_back(present.members[rank]);
    if (present.members[rank] == own_id) group.index = static_cast<std::uint32_t>(group.members.size() - 1);
  }
  std::erase_if(partings, [id](const Parting& parting) { return parting.id == id; });
  if (life.tells_groups()) present.runtime->add_group(id, ranks);  // Else the next generation gets it.
  if (old.runtime) old.runtime->add_group(id, ranks);
  groups.emplace(id, std::move(group));
  journal.add_group(id.value);
}

void ElasticRuntime::Impl::leave_group(GroupId id) {
  const std::scoped_lock lock(mutex);
  const auto found = groups.find(id);
  if (id.value == 0 || found == groups.end()) return;
  const std::uint64_t calls = journal.groups().at(id.value).next;
  if (partings.size() == kMostPartings) partings.pop_front();
  partings.push_back({id, found->second.closed, calls});
  if (life.tells_groups()) present.runtime->leave_group(id, calls);  // Else they hear of it in the next generation.
  if (old.runtime) old.runtime->leave_group(id, calls);
}

/// To who comes along into a new generation. What this worker called in the group before runs in a planned one's
/// predecessor, and else not any more. The caller holds the mutex.
void ElasticRuntime::Impl::tell_partings(bool is_planned) const {
  for (const Parting& parting : partings) {
    if (groups.contains(parting.id)) continue;
    if (!parting.abort.is_ok()) {
      present.runtime->report_aborted_before(parting.id, parting.abort.message());
    } else {
      present.runtime->report_left_before(parting.id, is_planned ? parting.calls : 0);
    }
  }
}

/// Why the operation cannot be done, for all that its generation knows: its group is over, or somebody has left that.
/// The caller holds the mutex.
Status ElasticRuntime::Impl::end_of(const OperationId& id, std::uint64_t run) {
  const auto found = groups.find(GroupId{id.group});
  if (found == groups.end()) return Status(Code::kCancelled, "its group was removed");
  Group& group = found->second;
  if (!group.closed.is_ok()) return group.closed;
  const auto& runtime = run == present.number ? present.runtime : old.runtime;
  if (!runtime) return Status::ok();
  group.closed = runtime->group_end(group.id);
  return group.closed.is_ok() ? runtime->group_end(group.id, id.key) : group.closed;
}

/// The present generation is over for it; the next will do it again. The caller holds the mutex.
void ElasticRuntime::Impl::break_off(Operation& operation, const Status& status) {
  operation.run = 0;
  life.break_off(status.message());
  rendezvous->wake();
}

/// Another rank's word on an operation may come sooner than the news why.
void ElasticRuntime::Impl::decide_doubtful() {
  const std::scoped_lock lock(mutex);
  for (auto it = doubtful.begin(); it != doubtful.end();) {
    const auto [id, doubt] = *it;
    const auto found = operations.find(id);
    if (found == operations.end() || found->second.run != doubt.run) {
      it = doubtful.erase(it);
      continue;
    }
    const auto& runtime = doubt.run == present.number ? present.runtime : old.runtime;
    const bool is_over = !end_of(id, doubt.run).is_ok();
    const bool is_broken = !runtime || !runtime->failure().is_ok() || Clock::now() - doubt.since > kNewsPatience;
    if (!is_over && !is_broken) {
      ++it;
      continue;
    }
    it = doubtful.erase(it);
    if (doubt.run == old.number && old_unfinished > 0) --old_unfinished;
    if (is_over) {
      end_operation(id, found->second, doubt.status);
    } else {
      break_off(found->second, doubt.status);
    }
  }
}

/// Nobody looks at them any more: they end as they are. The caller holds the mutex.
void ElasticRuntime::Impl::doubts_are_over() {
  for (const auto& [id, doubt] : std::exchange(doubtful, {})) {
    const auto found = operations.find(id);
    if (found != operations.end() && found->second.run == doubt.run) end_operation(id, found->second, doubt.status);
  }
}

/// When it returns nothing touches the memory of the group's operations any more.
void ElasticRuntime::Impl::remove_group(GroupId id) {
  const Status removed(Code::kCancelled, "its group was removed");
  report_completed();  // Those who stay in it need not keep that.
  std::vector<std::shared_ptr<runtime::Runtime>> runtimes;
  {
    const std::scoped_lock lock(mutex);
    const auto found = groups.find(id);
    if (id.value == 0 || found == groups.end()) return;
    leaving[id] = found->second.members.size();
    groups.erase(found);
    end_left_behind(id, removed);
    if (life.tells_groups()) runtimes.push_back(present.runtime);
    if (old.runtime) runtimes.push_back(old.runtime);
  }
  for (const auto& runtime : runtimes) runtime->remove_group(id);
  std::unique_lock lock(mutex);
  // Each ends with its generation, or by its deadline. Those of one that is over run in none any more.
  changed.wait(lock, [&] {
    return std::none_of(operations.begin(), operations.end(),
                        [id](const auto& entry) { return entry.first.group == id.value && entry.second.run != 0; });
  });
  end_left_behind(id, removed);
  journal.remove_group(id.value);
  lock.unlock();
  report_completed();
  lock.lock();
  leaving.erase(id);
}

/// Of a group that is over: those that run in no generation.
void ElasticRuntime::Impl::end_left_behind(GroupId id, const Status& why) {
  bool frees_others = false;
  for (auto it = operations.begin(); it != operations.end();) {
    Operation& operation = it->second;
    if (it->first.group != id.value || operation.run != 0) {
      ++it;
      continue;
    }
    if (!operation.work->is_done()) {
      if (leaving.contains(id)) report(it->first);  // This one will never ask for it.
      --unfinished;
      frees_others |= order->leave(*operation.call);
      operation.work->complete(why);
    }
    if (operation.result) kept_bytes -= operation.result->size();
    it = operations.erase(it);
  }
  if (frees_others) begin_ready();
}

/// Those of its operations that run end with their generation's word.
void ElasticRuntime::Impl::abort_group(GroupId id, const std::string& reason) {
  if (id.value == 0) return abort(reason);
  const std::scoped_lock lock(mutex);
  const auto found = groups.find(id);
  if (found == groups.end() || !found->second.closed.is_ok()) return;
  found->second.closed = Status(Code::kCancelled, reason);
  if (life.tells_groups()) present.runtime->abort_group(id, reason);  // Else the next generation hears of it.
  if (old.runtime) old.runtime->abort_group(id, reason);
  end_left_behind(id, found->second.closed);
}

void ElasticRuntime::Impl::give_up_pending(GroupId id, const std::string& reason) {
  const std::scoped_lock lock(mutex);
  if (!groups.contains(id)) return;
  if (present.runtime) present.runtime->give_up_pending(id, reason);
  if (old.runtime) old.runtime->give_up_pending(id, reason);
  end_left_behind(id, Status(Code::kCancelled, reason));
}

}  // namespace herring::elastic
