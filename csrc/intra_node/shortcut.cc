#include "intra_node/shortcut.h"

#include <cstring>

#include "intra_node/exchange.h"

namespace herring::intra_node {
namespace {

std::array<std::byte, kReadyHeadBytes> make_head(const OpKey& key, const OpDescriptor& descriptor,
                                                 std::span<const std::uint32_t> members, std::uint32_t average_over) {
  const bool has_bytes = descriptor.part_bytes > 0;
  LocalMessage ready;
  ready.kind = MessageKind::kReady;
  ready.key = {key, 0};
  ready.descriptor = descriptor;
  ready.layout = layout_hash(members, average_over, descriptor.root, has_bytes ? Way::kInline : Way::kNothing);
  ready.location = has_bytes ? Location::kInline : Location::kNone;
  return encode_ready_head(ready);
}

}  // namespace

Shortcut::Shortcut(const OpKey& key, const OpDescriptor& descriptor, std::span<const std::uint32_t> members,
                   std::uint32_t average_over)
    : head_(make_head(key, descriptor, members, average_over)), bytes_(descriptor.part_bytes) {}

std::optional<std::span<const std::byte>> Shortcut::data_in(std::span<const std::byte> message) const {
  // All that the engine compares is in the head, and nothing in it differs between members that agree.
  if (message.size() != head_.size() + bytes_) return std::nullopt;
  if (std::memcmp(message.data(), head_.data(), head_.size()) != 0) return std::nullopt;
  return message.subspan(head_.size());
}

}  // namespace herring::intra_node
