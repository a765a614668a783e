#include "runtime/awaited_calls.h"

#include <algorithm>
#include <utility>

namespace herring::runtime {
namespace {

std::string text_of(const OrderedCall& call) {
  if (!call.name.empty()) return "'" + call.name + "'";
  std::string text = to_string(call.descriptor) + " (call " + std::to_string(call.use + 1);
  if (call.group != GroupId{0}) text += " of group " + std::to_string(call.group.value);
  return text + ")";
}

}  // namespace

BackgroundCallers background_callers(const GroupTable& groups) {
  BackgroundCallers callers;
  for (const auto& [id, group] : groups.all()) {
    if (auto caller = group->caller.lock()) callers.emplace(id, std::move(caller));
  }
  return callers;
}

Outlooks ask(const BackgroundCallers& callers) {
  Outlooks outlooks;
  for (const auto& [id, caller] : callers) outlooks.emplace(id, caller->outlook());
  return outlooks;
}

std::optional<WaitingReport> report_waiting(const std::vector<Awaited>& awaited, const Outlooks& outlooks,
                                            const OperationOrder& order, const GroupTable& groups) {
  std::vector<const Awaited*> all;
  const auto add = [&all](const Awaited& one) {
    if (std::ranges::none_of(all, [&](const Awaited* each) { return each->work == one.work; })) all.push_back(&one);
  };
  for (const Awaited& each : awaited) add(each);
  for (const auto& [id, outlook] : outlooks) {
    if (outlook.is_about_to_call) return std::nullopt;
    if (outlook.awaited.work != nullptr) add(outlook.awaited);
  }
  if (all.size() > WaitingReport::kMostCalls) return std::nullopt;
  WaitingReport report;
  for (const Awaited* each : all) {
    const auto call = each->work == nullptr ? nullptr : order.waiting_for(each->work);
    if (!call || call->has_number) return std::nullopt;
    const std::shared_ptr<Group> group = groups.find(call->group);
    if (!group || group->has_own_keys) return std::nullopt;
    AwaitedCall& said = report.calls[report.count++];
    said.group = call->group.value;
    said.group_use = group->use;
    said.name = call->is_keyed ? call->key.op : 0;
    said.number = call->use;
    said.set_text(each->text.empty() ? text_of(*call) : each->text);
  }
  return report;
}

std::uint64_t calls_not_called(const DeadlockList& list, const Outlooks& outlooks, const GroupTable& groups) {
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(list.count, DeadlockList::kMostCalls); ++i) {
    const AwaitedCall& call = list.calls[i];
    const std::shared_ptr<Group> group = groups.find(GroupId{call.group});
    if (!group || group->use != call.group_use || group->has_own_keys) continue;
    const auto outlook = outlooks.find(GroupId{call.group});
    if (outlook != outlooks.end() && !outlook->second.is_quiet) continue;
    const std::uint64_t calls = call.name != 0 ? group->name_uses.count(call.name) : group->next_op.load();
    if (calls <= call.number) bits |= std::uint64_t{1} << i;
  }
  return bits;
}

}  // namespace herring::runtime
