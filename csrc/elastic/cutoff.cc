#include "elastic/cutoff.h"

#include <algorithm>

namespace herring::elastic {

Cutoff::Cutoff(std::span<const Summary> submitted, const std::function<bool(std::uint32_t)>& is_known) {
  for (const Summary& summary : submitted) {
    for (const GroupRecord& group : summary.groups) {
      if (!is_known(group.group)) continue;
      GroupRecord& most = limits_[group.group];
      most.next = std::max(most.next, group.next);
      for (const auto& [name, uses] : group.uses) most.uses[name] = std::max(most.uses[name], uses);
    }
  }
}

bool Cutoff::covers(const Record& record) const {
  const auto limit = limits_.find(record.id.group);
  if (limit == limits_.end()) return false;
  if (record.name == 0) return record.id.key < limit->second.next;
  const auto uses = limit->second.uses.find(record.name);
  return uses != limit->second.uses.end() && record.use < uses->second;
}

bool Cutoff::is_passed(const Groups& submitted) const {
  return std::all_of(limits_.begin(), limits_.end(), [&submitted](const auto& entry) {
    const GroupRecord& limit = entry.second;
    const auto group = submitted.find(entry.first);
    if (group == submitted.end()) return true;
    if (group->second.next < limit.next) return false;
    return std::all_of(limit.uses.begin(), limit.uses.end(), [&group](const auto& use) {
      const auto found = group->second.uses.find(use.first);
      return found != group->second.uses.end() && found->second >= use.second;
    });
  });
}

}  // namespace herring::elastic
