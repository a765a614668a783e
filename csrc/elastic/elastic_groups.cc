// Groups of workers: known to all generations, and the end of what is under way in one that is left or given up.

#include <algorithm>
#include <utility>
#include <vector>

#include "core/status.h"
#include "elastic/elastic_impl.h"
#include "elastic/elastic_runtime.h"

namespace herring::elastic {

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
  if (is_stable) present.runtime->add_group(id, ranks);  // Else the next generation gets it.
  if (old.runtime) old.runtime->add_group(id, ranks);
  groups.emplace(id, std::move(group));
  journal.add_group(id.value);
}

/// When it returns nothing touches the memory of the group's operations any more.
void ElasticRuntime::Impl::remove_group(GroupId id) {
  const Status removed(Code::kCancelled, "its group was removed");
  std::vector<std::shared_ptr<runtime::Runtime>> runtimes;
  {
    const std::scoped_lock lock(mutex);
    if (id.value == 0 || groups.erase(id) == 0) return;
    end_left_behind(id, removed);
    if (is_stable) runtimes.push_back(present.runtime);
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
  begin_ready();
}

/// Of a group that is over: those that run in no generation.
void ElasticRuntime::Impl::end_left_behind(GroupId id, const Status& why) {
  for (auto it = operations.begin(); it != operations.end();) {
    Operation& operation = it->second;
    if (it->first.group != id.value || operation.run != 0) {
      ++it;
      continue;
    }
    if (!operation.work->is_done()) {
      --unfinished;
      may_begin |= order->leave(*operation.call);
      operation.work->complete(why);
    }
    if (operation.result) kept_bytes -= operation.result->size();
    it = operations.erase(it);
  }
}

/// Those of its operations that run end with their generation's word.
void ElasticRuntime::Impl::abort_group(GroupId id, const std::string& reason) {
  if (id.value == 0) return abort(reason);
  const std::scoped_lock lock(mutex);
  const auto found = groups.find(id);
  if (found == groups.end() || !found->second.closed.is_ok()) return;
  found->second.closed = Status(Code::kCancelled, reason);
  found->second.is_own_abort = true;
  if (is_stable) present.runtime->abort_group(id, reason);  // Else the next generation hears of it.
  if (old.runtime) old.runtime->abort_group(id, reason);
  end_left_behind(id, found->second.closed);
  begin_ready();
}

}  // namespace herring::elastic
