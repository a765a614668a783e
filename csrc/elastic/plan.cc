#include "elastic/plan.h"

#include <algorithm>
#include <utility>

#include "control/frame.h"

namespace herring::elastic {
namespace {

using control::BodyReader;
using control::BodyWriter;

constexpr std::uint64_t kNamed = std::uint64_t{1} << 63;

/// What the members of the group know about one operation.
struct Knowledge {
  std::vector<std::uint32_t> pending;
  std::vector<std::uint32_t> complete;
  std::vector<std::uint32_t> failed;
  std::vector<std::uint32_t> unknown;  // No record of it here.
  const Record* example = nullptr;
  std::uint32_t most_members = 0;
  std::uint32_t members = 0;

  bool has(std::uint32_t rank) const {
    for (const auto* ranks : {&pending, &complete, &failed}) {
      if (std::find(ranks->begin(), ranks->end(), rank) != ranks->end()) return true;
    }
    return false;
  }
};

const GroupRecord* find_group(const Summary& summary, std::uint32_t group) {
  const auto found = std::find_if(summary.groups.begin(), summary.groups.end(),
                                  [group](const GroupRecord& each) { return each.group == group; });
  return found == summary.groups.end() ? nullptr : &*found;
}

/// It has been submitted there, and forgotten since: everybody is known to have completed it.
bool is_forgotten(const GroupRecord& group, const Record& record) {
  if ((record.id.key & kNamed) == 0) return record.id.key < group.next;
  const auto uses = group.uses.find(record.name);
  return uses != group.uses.end() && record.use < uses->second;
}

std::string reason_to_fail(const Knowledge& knowledge, std::span<const std::uint64_t> workers) {
  const Record& record = *knowledge.example;
  if (!knowledge.failed.empty()) return "it failed on another rank before the job was set up again";
  if (record.collective == Collective::kAllGather && knowledge.members < knowledge.most_members) {
    return "its output has a block for each worker, and a worker is lost; call it again for those that are left";
  }
  if (record.collective == Collective::kBroadcast &&
      std::find(workers.begin(), workers.end(), record.root) == workers.end()) {
    return "its root is lost; call it again with another root";
  }
  return "";
}

std::optional<Step> decide(const OperationId& id, const Knowledge& knowledge, std::span<const Summary> summaries,
                           std::span<const std::uint64_t> workers) {
  Step step;
  step.id = id;
  step.bytes = knowledge.example->bytes;
  step.root = knowledge.example->root;
  step.to = knowledge.pending;
  for (const std::uint32_t rank : knowledge.unknown) {
    if (is_forgotten(*find_group(summaries[rank], id.group), *knowledge.example)) return std::nullopt;
    step.to.push_back(rank);
  }
  std::sort(step.to.begin(), step.to.end());
  if (step.to.empty()) return std::nullopt;
  if (!knowledge.complete.empty()) {
    step.kind = Step::Kind::kDeliver;
    step.from = knowledge.complete.front();
    return step;
  }
  step.reason = reason_to_fail(knowledge, workers);
  step.kind = step.reason.empty() ? Step::Kind::kRedo : Step::Kind::kFail;
  return step;
}

/// Who is new is taken to have submitted what all had when it came in.
std::vector<Summary> with_start(std::span<const Summary> summaries, const GroupRecord& start) {
  std::vector<Summary> result(summaries.begin(), summaries.end());
  for (Summary& summary : result) {
    if (summary.is_new) summary.groups = {start};
  }
  return result;
}

/// As who was there says; where nobody was (a first generation, or all begin again), above all.
GroupRecord find_start(std::span<const Summary> summaries) {
  const bool all_new =
      std::all_of(summaries.begin(), summaries.end(), [](const Summary& summary) { return summary.is_new; });
  GroupRecord start;
  for (const Summary& summary : summaries) {
    if (summary.is_new && !all_new) continue;
    start.next = std::max(start.next, summary.start.next);
    for (const auto& [name, uses] : summary.start.uses) start.uses[name] = std::max(start.uses[name], uses);
  }
  return start;
}

}  // namespace

Plan make_plan(std::span<const Summary> given, std::span<const std::uint64_t> workers) {
  Plan plan;
  plan.start = find_start(given);
  const std::vector<Summary> summaries = with_start(given, plan.start);
  for (const Summary& summary : summaries) {
    for (const GroupRecord& group : summary.groups) {
      plan.next[group.group] = std::max(plan.next[group.group], group.next);
    }
  }
  std::map<OperationId, Knowledge> known;
  for (std::uint32_t rank = 0; rank < summaries.size(); ++rank) {
    for (const Record& record : summaries[rank].operations) {
      Knowledge& knowledge = known[record.id];
      if (knowledge.example == nullptr) knowledge.example = &record;
      knowledge.most_members = std::max(knowledge.most_members, record.members);
      switch (record.state) {
        case Record::State::kPending:
          knowledge.pending.push_back(rank);
          break;
        case Record::State::kComplete:
          knowledge.complete.push_back(rank);
          break;
        case Record::State::kFailed:
          knowledge.failed.push_back(rank);
          break;
      }
    }
  }
  for (auto& [id, knowledge] : known) {
    for (std::uint32_t rank = 0; rank < summaries.size(); ++rank) {
      if (find_group(summaries[rank], id.group) == nullptr) continue;
      ++knowledge.members;
      if (!knowledge.has(rank)) knowledge.unknown.push_back(rank);
    }
    if (auto step = decide(id, knowledge, summaries, workers)) plan.steps.push_back(std::move(*step));
  }
  return plan;
}

namespace {

void put(BodyWriter& writer, const GroupRecord& group) {
  writer.u32(group.group).u64(group.next).u32(static_cast<std::uint32_t>(group.uses.size()));
  for (const auto& [name, uses] : group.uses) writer.u64(name).u64(uses);
}

GroupRecord get_group(BodyReader& reader) {
  GroupRecord group;
  group.group = reader.u32();
  group.next = reader.u64();
  const std::uint32_t names = reader.u32();
  for (std::uint32_t i = 0; i < names && reader.ok(); ++i) {
    const std::uint64_t name = reader.u64();
    group.uses[name] = reader.u64();
  }
  return group;
}

}  // namespace

std::vector<std::byte> encode(const Summary& summary) {
  BodyWriter writer;
  writer.u8(summary.is_new ? 1 : 0).u32(static_cast<std::uint32_t>(summary.groups.size()));
  for (const GroupRecord& group : summary.groups) put(writer, group);
  put(writer, summary.start);
  writer.u32(static_cast<std::uint32_t>(summary.operations.size()));
  for (const Record& record : summary.operations) {
    writer.u32(record.id.group)
        .u64(record.id.key)
        .u8(static_cast<std::uint8_t>(record.state))
        .u8(static_cast<std::uint8_t>(record.collective))
        .u64(record.bytes)
        .u64(record.root)
        .u32(record.members)
        .u64(record.name)
        .u64(record.use);
  }
  return writer.take();
}

std::optional<Summary> decode_summary(std::span<const std::byte> bytes) {
  BodyReader reader(bytes);
  Summary summary;
  summary.is_new = reader.u8() != 0;
  const std::uint32_t groups = reader.u32();
  for (std::uint32_t i = 0; i < groups && reader.ok(); ++i) summary.groups.push_back(get_group(reader));
  summary.start = get_group(reader);
  const std::uint32_t operations = reader.u32();
  for (std::uint32_t i = 0; i < operations && reader.ok(); ++i) {
    Record record;
    record.id.group = reader.u32();
    record.id.key = reader.u64();
    const std::uint8_t state = reader.u8();
    record.collective = static_cast<Collective>(reader.u8());
    if (state < 1 || state > 3 || !is_known(record.collective)) return std::nullopt;
    record.state = static_cast<Record::State>(state);
    record.bytes = reader.u64();
    record.root = reader.u64();
    record.members = reader.u32();
    record.name = reader.u64();
    record.use = reader.u64();
    if (!reader.ok() || find_group(summary, record.id.group) == nullptr) return std::nullopt;
    summary.operations.push_back(record);
  }
  if (!reader.done()) return std::nullopt;
  return summary;
}

}  // namespace herring::elastic
