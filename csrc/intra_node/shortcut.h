#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "core/operation.h"
#include "intra_node/local_message.h"

namespace herring::intra_node {

/// A small all-reduce or a barrier among ranks that wait for it at the same time: each sends its Ready, and sums what
/// the others' ReadyToAll carry where they lie. No other protocol than the engine's: it sends the very bytes that the
/// engine would, takes only what the engine would find to agree, and where anything else comes, or somebody does not
/// come soon, leaves the messages and the operation (LocalOperation::announced) to the engine. Pure, as the engine is.
class Shortcut final {
 public:
  /// As in a LocalOperation inside the host alone whose bytes travel in the messages (EngineConfig::inline_bytes).
  /// The engine must be untroubled, and the key one that is used once.
  Shortcut(const OpKey& key, const OpDescriptor& descriptor, std::span<const std::uint32_t> members,
           std::uint32_t average_over);

  /// What goes to each other member, before and after the operation's bytes.
  std::span<const std::byte> head() const { return ready_.head; }
  std::span<const std::byte> tail() const { return ready_.tail; }
  /// Another member's bytes, inside its message; nothing where it says anything else than that it has called the same.
  std::optional<std::span<const std::byte>> data_in(std::span<const std::byte> message) const;

 private:
  ReadyToAll ready_;
  std::size_t bytes_;
};

}  // namespace herring::intra_node
