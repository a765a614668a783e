#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "elastic/plan.h"

/// What a worker has submitted and what became of it, until everybody is known to have it. Pure bookkeeping: data and
/// threads are the ElasticRuntime's.
namespace herring::elastic {

class Journal final {
 public:
  Journal();
  void add_group(std::uint32_t group) { groups_[group].group = group; }
  void remove_group(std::uint32_t group);

  struct Submission {
    std::uint32_t group = 0;
    std::optional<std::string_view> name;
    Collective collective = Collective::kAllReduce;
    std::uint64_t bytes = 0;
    std::uint64_t root = 0;
    std::uint32_t members = 1;
  };
  /// Each takes about 130 bytes here, and 32 for each worker while a job is put together anew.
  static constexpr std::size_t kMaxNames = std::size_t{1} << 18;
  /// Of all groups.
  std::size_t names() const { return names_; }
  /// False: the name is new to its group, and there are as many as there may be.
  bool has_room(std::uint32_t group, std::optional<std::string_view> name) const;
  /// The number that submit() would give.
  OperationId next(std::uint32_t group, std::optional<std::string_view> name) const;
  /// Numbers an operation and records it as pending. The group exists.
  OperationId submit(const Submission& submission);
  /// Numbers a collective that is made of messages: nothing of it is kept over the end of a generation.
  std::uint64_t take_number(std::uint32_t group) { return groups_.at(group).next++; }
  void complete(const OperationId& id) { records_.at(id).state = Record::State::kComplete; }
  void fail(const OperationId& id) { records_.at(id).state = Record::State::kFailed; }
  /// Broadcast: the worker whose data it is turns out to be another.
  void set_root(const OperationId& id, std::uint64_t root) { records_.at(id).root = root; }
  /// Everybody has it, or nobody will ask: it is not needed any more.
  void forget(const OperationId& id) { records_.erase(id); }
  const Record* find(const OperationId& id) const;

  /// Takes part in the job from now on.
  void settle_in() { is_new_ = false; }
  bool is_new() const { return is_new_; }
  /// New workers may come in at this point: they will have submitted what this one has.
  void mark_start() { start_ = groups_.at(0); }
  /// Forgets what was under way: this one begins again, with the others, above what any of them has submitted.
  void restart();
  /// This one is new: it begins there.
  void begin_at(const GroupRecord& start);

  Summary summary() const;
  const std::map<std::uint32_t, GroupRecord>& groups() const { return groups_; }
  const std::map<OperationId, Record>& records() const { return records_; }

 private:
  bool is_new_ = true;
  std::map<std::uint32_t, GroupRecord> groups_;
  std::size_t names_ = 0;
  GroupRecord start_;
  std::map<OperationId, Record> records_;
};

}  // namespace herring::elastic
