#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/communicator.h"

/// Collectives that are made of messages: which of them a member sends and receives, and in which order. Nothing is
/// sent here.
namespace herring::collectives {

/// What the messages of one call have in common.
struct MessageCall {
  GroupId group;
  std::uint32_t size = 1;   ///< Of the group.
  std::uint32_t index = 0;  ///< This member.
  std::uint64_t tag = 0;
  std::optional<Duration> timeout = {};
  std::optional<DataType> dtype = {};
  std::shared_ptr<runtime::Composed> collective = {};  ///< Its number of messages is counted here.
};

struct MessagePlan {
  std::vector<runtime::Receive> receives;  ///< Before the sends: a message that finds its receive waiting is not kept.
  std::vector<runtime::Send> sends;
  /// What this member keeps of its own: equally many bytes, or none.
  std::span<const std::byte> own_source;
  std::span<std::byte> own_target;

  /// Copies what this member keeps.
  void copy_own() const;
};

// Block i is for member i, or from it. Members that disagree about a size are told by the message that they do not meet
// in.
using Blocks = std::span<const std::span<std::byte>>;
using ConstBlocks = std::span<const std::span<const std::byte>>;

/// All with all: inputs[i] goes to member i, whose block for this one comes into outputs[i].
/// `skips_empty`: sizes have been agreed, so what has no bytes needs no message.
MessagePlan exchange(const MessageCall& call, Blocks outputs, ConstBlocks inputs, bool skips_empty);
/// All to the root, which alone has outputs.
MessagePlan gather(const MessageCall& call, std::uint32_t root, Blocks outputs, std::span<const std::byte> input);
/// The root, which alone has inputs, to all.
MessagePlan scatter(const MessageCall& call, std::uint32_t root, std::span<std::byte> output, ConstBlocks inputs);

}  // namespace herring::collectives
