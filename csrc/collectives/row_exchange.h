#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/rows.h"
#include "runtime/communicator.h"

namespace herring::collectives {

/// One call of a collective by name, as one rank makes it.
struct NamedCall {
  GroupId group;
  std::vector<std::uint32_t> ranks;      ///< Of the job, in the group's order.
  std::uint32_t index = 0;               ///< Of this one.
  std::string name;                      ///< The same on all ranks, unlike any other call's in flight.
  std::uint64_t use = 0;                 ///< How often it has been used before.
  std::optional<Duration> timeout = {};  ///< Of each step.
};

/// For messages of a call: another one for each use of the name, so that none meets what an earlier use left behind.
std::uint64_t message_tag(std::string_view name, std::uint64_t use);

/// An all-gather of tensors that have different numbers of rows on different ranks, or an all-to-all: the ranks tell
/// each other how many, then the rows go. Between the two the door makes the memory for what comes, with whatever lock
/// that takes, and on whichever thread goes on with the call. Not safe from two threads at once.
class RowExchange final {
 public:
  using Works = std::vector<std::shared_ptr<runtime::Work>>;

  /// An all-gather of each of the tensors; with `splits` (checked_splits()) an all-to-all of the one, of which
  /// splits[i] rows go to member i. Throws Error(kInvalidArgument) for dimensions that cannot be told.
  RowExchange(NamedCall call, std::vector<RowsSpec> tensors,
              const std::optional<std::vector<std::int64_t>>& splits = std::nullopt);

  /// The first step; this lives until it has ended.
  std::shared_ptr<runtime::Work> tell(runtime::Communicator& runtime);
  /// After it: how many rows come from each member. Throws Error(kMismatch) on all ranks where tensors differ
  /// otherwise.
  std::vector<std::int64_t> counts(std::size_t tensor) const;
  /// The second step; `output` has room for all of these rows, in the order of members. Both are borrowed until the
  /// end.
  Works move(runtime::Communicator& runtime, std::size_t tensor, std::span<const std::byte> input,
             std::span<std::byte> output) const;

 private:
  runtime::Request request(Collective collective, DataType dtype, std::span<const std::int64_t> shape,
                           const std::string& step) const;
  Works gather(runtime::Communicator& runtime, std::size_t tensor, std::span<const std::byte> input,
               std::span<std::byte> output) const;
  Works all_to_all(runtime::Communicator& runtime, std::span<const std::byte> input, std::span<std::byte> output) const;

  const NamedCall call_;
  const std::vector<RowsSpec> tensors_;
  const bool is_all_to_all_;
  RowTable table_;
};

}  // namespace herring::collectives
