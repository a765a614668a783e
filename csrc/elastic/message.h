#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "control/hub.h"

/// What a job's processes and its rendezvous say to each other: docs/wire-control.md, "The rendezvous".
namespace herring::elastic {

/// One collective operation of a job, the same on all ranks and in all generations.
struct OperationId {
  std::uint32_t group = 0;
  std::uint64_t key = 0;
  friend constexpr auto operator<=>(const OperationId&, const OperationId&) = default;
};

/// Numbers are part of the wire format and are never reused.
enum class MessageKind : std::uint8_t {
  // To the rendezvous.
  kEnter = 1,      ///< The first: role, rank (a wish), pid, host, is_elastic, workers.
  kReady = 2,      ///< Has left `generation` and waits for the next; at_boundary: others may come in.
  kBroken = 3,     ///< Cannot go on in `generation`: text.
  kCompleted = 4,  ///< These operations are complete here; `operations` with `counts` (members of the group).
  kLeave = 5,      ///< Goes for good, all being well.
  kBuilt = 6,      ///< Planned switch: is connected in `generation` as well.
  kSwitched = 7,   ///< Planned switch: has gone over to `generation`, and nothing is left in the one before.
  kQuery = 8,      ///< Whom does it wait for? Answered with kMissing.
  // From it.
  kGo = 16,         ///< The next generation: rank, workers, servers, port, members, at_boundary, is_planned.
  kBreak = 17,      ///< `generation` is over: text says why. is_planned: it never came to be, the one before goes on.
  kNewcomers = 18,  ///< So many workers wait to be let in: workers.
  kSettled = 19,    ///< These operations are complete on all.
  kEnd = 20,        ///< The job is over for this process: text; is_elastic: all is well.
  kSwitch = 21,     ///< Planned switch: all are connected in `generation`; go over.
  kMissing = 22,    ///< To who asked: text; generation: the present one, 0 before the first.
};

/// One layout for all kinds; what a kind does not name is zero.
struct Message {
  MessageKind kind = MessageKind::kEnter;
  std::uint64_t generation = 0;
  control::Role role = control::Role::kWorker;
  bool is_elastic = false;
  bool at_boundary = false;
  bool is_planned = false;
  std::uint32_t rank = 0;
  std::uint32_t pid = 0;
  std::uint32_t workers = 0;
  std::uint32_t servers = 0;
  std::uint16_t port = 0;
  std::string host;
  std::string text;
  std::vector<std::uint64_t> members;  ///< Ids of the generation's workers by rank, never used again for others.
  std::vector<OperationId> operations;
  std::vector<std::uint32_t> counts;  ///< Empty, or one for each operation.
  friend bool operator==(const Message&, const Message&) = default;
};

/// So many operations fit a message.
inline constexpr std::size_t kMaxOperations = 32768;

std::vector<std::byte> encode(const Message& message);
/// Nothing for a body that no correct process sends.
std::optional<Message> decode_message(std::span<const std::byte> body);

}  // namespace herring::elastic
