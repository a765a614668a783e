#include "elastic/journal.h"

#include "runtime/communicator.h"

namespace herring::elastic {

Journal::Journal() { add_group(0); }

void Journal::remove_group(std::uint32_t group) {
  if (const auto found = groups_.find(group); found != groups_.end()) {
    names_ -= found->second.uses.size();
    groups_.erase(found);
  }
  std::erase_if(records_, [group](const auto& entry) { return entry.first.group == group; });
}

bool Journal::has_room(std::uint32_t group, std::optional<std::string_view> name) const {
  return !name || names_ < kMaxNames || groups_.at(group).uses.contains(runtime::name_key(*name));
}

OperationId Journal::next(std::uint32_t group, std::optional<std::string_view> name) const {
  const GroupRecord& record = groups_.at(group);
  if (!name) return {group, record.next};
  const std::uint64_t key = runtime::name_key(*name);
  const auto uses = record.uses.find(key);
  return {group, runtime::use_key(key, uses == record.uses.end() ? 0 : uses->second)};
}

OperationId Journal::submit(const Submission& submission) {
  GroupRecord& group = groups_.at(submission.group);
  Record record;
  record.id = next(submission.group, submission.name);
  record.collective = submission.collective;
  record.bytes = submission.bytes;
  record.root = submission.root;
  record.members = submission.members;
  if (submission.name) {
    record.name = runtime::name_key(*submission.name);
    const auto [uses, is_new] = group.uses.emplace(record.name, 0);
    if (is_new) ++names_;
    record.use = uses->second++;
  } else {
    ++group.next;
  }
  records_[record.id] = record;
  return record.id;
}

const Record* Journal::find(const OperationId& id) const {
  const auto found = records_.find(id);
  return found == records_.end() ? nullptr : &found->second;
}

void Journal::restart() {
  start_ = groups_.at(0);
  is_new_ = true;
  records_.clear();
}

void Journal::begin_at(const GroupRecord& start) {
  names_ += start.uses.size();
  names_ -= groups_.at(0).uses.size();
  groups_.at(0) = start;
  start_ = start;
}

Summary Journal::summary() const {
  Summary summary;
  summary.is_new = is_new_;
  summary.start = start_;
  for (const auto& [id, group] : groups_) summary.groups.push_back(group);
  for (const auto& [id, record] : records_) summary.operations.push_back(record);
  return summary;
}

}  // namespace herring::elastic
