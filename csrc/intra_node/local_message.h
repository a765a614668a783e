#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/operation.h"
#include "core/status.h"

/// What the engines of one host say to each other. Version 3, native byte order (one machine), a head of 32 bytes:
///
///   offset  size
///        0     1  version
///        1     1  kind
///        2     1  flags: bit 0 reply (Error), bit 1 patient (Ready)
///        3     1  location (Ready), code (Error), else 0
///        4     4  group
///        8     8  op
///       16     4  part
///       20     4  0
///       24     4  keys that follow (Done), else 0
///       28     4  0
///
/// then Ready: layout u64, offset u64, descriptor (88 bytes, see the codec), and for kInline the data.
///      Reduced: nothing.  Done: keys of 24 bytes (op u64, group u32, part u32, 0 u64).  Error: text.
///
/// A Ready that every member gets alike (ReadyToAll) is turned round, so that a small one is told from others and read
/// by its first cache line: version and kind (1 byte each), 6 zero bytes, a digest of the Ready without its data (u64),
/// the data, and the Ready without its data.
///
/// decode() never trusts: what it returns lies inside the message; offsets are checked against the arena by whoever
/// uses them. All numbers are copied out of shared memory before they are looked at.
namespace herring::intra_node {

enum class MessageKind : std::uint8_t {
  kReady = 1,    ///< I have called it; my data is there.
  kReduced = 2,  ///< My range is reduced and where everybody looks for it; I have read all that I need of yours.
  kDone = 3,     ///< I have copied what I needed out of your staging memory, for these keys.
  kError = 4,    ///< I have given it up and touch nobody's memory for it any more.
  kReadyToAll = 5,
};

enum class Location : std::uint8_t {
  kNone = 0,     ///< Nothing to read from this rank.
  kInPlace = 1,  ///< At `offset` of its arena; results are written there.
  kStaged = 2,   ///< A copy is at `offset` of its arena.
  kInline = 3,   ///< In the message.
};

struct LocalMessage {
  MessageKind kind = MessageKind::kReady;
  OpKey key;
  // Ready
  OpDescriptor descriptor;
  std::uint64_t layout = 0;  ///< Hash of members, ranges and way; must be equal on all members.
  Location location = Location::kNone;
  std::uint64_t offset = 0;
  std::span<const std::byte> data;  ///< Borrowed.
  bool is_patient = false;          ///< The others may come when they like.
  // Done
  std::vector<OpKey> keys;
  // Error
  Code code = Code::kOk;
  bool reply = false;  ///< Answers an Error; is not answered.
  std::string text;
};

/// A ReadyToAll but for its data, which comes between the two.
struct ReadyToAll {
  std::array<std::byte, 16> head;
  std::array<std::byte, 136> tail;
};
/// `ready.data` is not looked at.
ReadyToAll encode_to_all(const LocalMessage& ready);

std::vector<std::byte> encode(const LocalMessage& message);
/// Nothing where it is not a message of this version. A ReadyToAll becomes a Ready.
std::optional<LocalMessage> decode(std::span<const std::byte> bytes);

}  // namespace herring::intra_node
