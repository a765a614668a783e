#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/operation.h"
#include "elastic/message.h"

/// What survivors do about the operations that were under way: a pure function, the same on all.
/// docs/adr/0006-elastic.md.
namespace herring::elastic {

/// What one worker remembers of an operation.
struct Record {
  enum class State : std::uint8_t {
    kPending = 1,   ///< Submitted; the source is there.
    kComplete = 2,  ///< The result is there.
    kFailed = 3,    ///< Its caller was told so.
  };
  OperationId id;
  State state = State::kPending;
  Collective collective = Collective::kAllReduce;
  std::uint64_t bytes = 0;    ///< Of the result.
  std::uint64_t root = 0;     ///< Broadcast: id of the worker whose data it is.
  std::uint32_t members = 0;  ///< Of the group, when it was submitted.
  std::uint64_t name = 0;     ///< Operations by name: the name's hash, and
  std::uint64_t use = 0;      ///< how often it had been used before.
  friend bool operator==(const Record&, const Record&) = default;
};

/// What one worker has submitted to a group.
struct GroupRecord {
  std::uint32_t group = 0;
  std::uint64_t next = 0;                       ///< Number of the next operation without a name.
  std::map<std::uint64_t, std::uint64_t> uses;  ///< Of each name.
  friend bool operator==(const GroupRecord&, const GroupRecord&) = default;
};

struct Summary {
  bool is_new = false;  ///< Has not been in the job before: knows of group 0 alone, with nothing in it.
  std::vector<GroupRecord> groups;
  GroupRecord start;  ///< Group 0 when new workers last came in: where they begin.
  std::vector<Record> operations;
  friend bool operator==(const Summary&, const Summary&) = default;
};
std::vector<std::byte> encode(const Summary& summary);
std::optional<Summary> decode_summary(std::span<const std::byte> bytes);

struct Step {
  enum class Kind : std::uint8_t {
    kDeliver,  ///< `from` has the result; it gives it to `to`.
    kRedo,     ///< Nobody has it: from the sources that are left.
    kFail,     ///< It cannot be had any more: everybody's fails. `reason` says why.
  };
  Kind kind = Kind::kRedo;
  OperationId id;
  std::uint32_t from = 0;         ///< Rank in the new generation, as all here.
  std::vector<std::uint32_t> to;  ///< Who lacks it: has it pending, or will submit it later.
  std::uint64_t bytes = 0;
  std::uint64_t root = 0;
  std::string reason;
  friend bool operator==(const Step&, const Step&) = default;
};

struct Plan {
  std::vector<Step> steps;  ///< By operation.
  GroupRecord start;        ///< Where who is new begins in group 0.
  /// By group: the number after the last that any worker has used. Messages of collectives below it went, at least in
  /// part, through the generation that is over.
  std::map<std::uint32_t, std::uint64_t> next;
};

/// `summaries` and `workers` (ids) by rank in the new generation.
Plan make_plan(std::span<const Summary> summaries, std::span<const std::uint64_t> workers);

}  // namespace herring::elastic
