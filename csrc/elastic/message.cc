#include "elastic/message.h"

#include "control/frame.h"

namespace herring::elastic {
namespace {

using control::BodyReader;
using control::BodyWriter;

constexpr std::size_t kMaxText = 4096;
constexpr std::size_t kMaxMembers = 65536;
constexpr std::uint8_t kElastic = 1;
constexpr std::uint8_t kBoundary = 2;
constexpr std::uint8_t kPlanned = 4;

bool is_known(std::uint8_t kind) { return (kind >= 1 && kind <= 8) || (kind >= 16 && kind <= 22); }

}  // namespace

std::vector<std::byte> encode(const Message& message) {
  BodyWriter writer;
  const int flags =
      (message.is_elastic ? kElastic : 0) | (message.at_boundary ? kBoundary : 0) | (message.is_planned ? kPlanned : 0);
  writer.u8(static_cast<std::uint8_t>(message.kind))
      .u8(static_cast<std::uint8_t>(message.role))
      .u8(static_cast<std::uint8_t>(flags))
      .u64(message.generation)
      .u32(message.rank)
      .u32(message.pid)
      .u32(message.workers)
      .u32(message.servers)
      .u16(message.port)
      .text(message.host, kMaxText)
      .text(message.text, kMaxText)
      .u32(static_cast<std::uint32_t>(message.members.size()));
  for (const std::uint64_t member : message.members) writer.u64(member);
  writer.u32(static_cast<std::uint32_t>(message.operations.size())).u8(message.counts.empty() ? 0 : 1);
  for (std::size_t i = 0; i < message.operations.size(); ++i) {
    writer.u32(message.operations[i].group).u64(message.operations[i].key);
    if (!message.counts.empty()) writer.u32(message.counts[i]);
  }
  return writer.take();
}

std::optional<Message> decode_message(std::span<const std::byte> body) {
  BodyReader reader(body);
  Message message;
  const std::uint8_t kind = reader.u8();
  const std::uint8_t role = reader.u8();
  const std::uint8_t flags = reader.u8();
  if (!is_known(kind) || role < 1 || role > 2 || flags > (kElastic | kBoundary | kPlanned)) return std::nullopt;
  message.kind = static_cast<MessageKind>(kind);
  message.role = static_cast<control::Role>(role);
  message.is_elastic = (flags & kElastic) != 0;
  message.at_boundary = (flags & kBoundary) != 0;
  message.is_planned = (flags & kPlanned) != 0;
  message.generation = reader.u64();
  message.rank = reader.u32();
  message.pid = reader.u32();
  message.workers = reader.u32();
  message.servers = reader.u32();
  message.port = reader.u16();
  message.host = reader.words(kMaxText);
  message.text = reader.words(kMaxText);
  const std::uint32_t members = reader.u32();
  if (members > kMaxMembers) return std::nullopt;
  for (std::uint32_t i = 0; i < members && reader.ok(); ++i) message.members.push_back(reader.u64());
  const std::uint32_t operations = reader.u32();
  const std::uint8_t has_counts = reader.u8();
  if (operations > kMaxOperations || has_counts > 1) return std::nullopt;
  for (std::uint32_t i = 0; i < operations && reader.ok(); ++i) {
    const std::uint32_t group = reader.u32();
    message.operations.push_back({group, reader.u64()});
    if (has_counts != 0) message.counts.push_back(reader.u32());
  }
  if (!reader.done() || (message.rank > kMaxMembers && message.kind == MessageKind::kEnter)) return std::nullopt;
  return message;
}

}  // namespace herring::elastic
