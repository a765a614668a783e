#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "core/loan.h"
#include "core/operation.h"
#include "core/roster.h"
#include "core/status.h"
#include "core/types.h"
#include "wire/header.h"

/// What the pure engines ask their executor to do. The executor (csrc/runtime/pump.h over a real transport, or the
/// simulator) carries actions out in the order given and reports back through the engine's on_...() methods.
namespace herring {

/// Send header + body + payload to a peer's posted receive. `body` is owned by the action; `payload` is borrowed until
/// on_sent(token). The executor reports on_sent(token) exactly once.
struct SendAction {
  PeerId to;
  Tag tag;
  wire::Header header;          ///< magic, version, checksum are filled in by the executor.
  std::vector<std::byte> body;  ///< Small and owned: an encoded Announce, an error text. May be empty.
  std::span<const std::byte> payload;
  Token token;
  bool is_unregistered = false;  ///< `payload` is a copy of the engine's own; else its owner registered it for networks
                                 ///< that need that.
  /// `payload` is a device's, or whoever receives it wants it so: header and body go in one message, the payload in
  /// another, to wire::kApartTag.
  bool is_apart = false;
};

/// Post a receive of one header and at most payload.size() bytes, which land in `payload` with no copy. `payload` is
/// borrowed until on_received(token), or where it was cancelled until on_withdrawn(token).
struct PostReceiveAction {
  Tag tag;
  std::span<std::byte> payload;
  Token token;
  std::optional<PeerId> behind = {};  ///< Not before what was asked to be sent to this peer earlier is posted.
  PeerId from = kAnyPeer;             ///< Who sends it, where that is known.
  bool is_apart = false;              ///< As SendAction's: it comes in two messages.
  bool is_loan = false;               ///< `payload` is empty: the sender lends it (on_received()'s loan).
};

/// True where on_received() tells of a message that took the receive, whatever it was: the one that the receive was for
/// may still come. Else the transport does not take the receive.
inline bool has_arrived(const Status& status) {
  return status.is_ok() || status.code() == Code::kProtocol || status.code() == Code::kCorrupted;
}

/// Withdraw a posted receive. The executor reports on_withdrawn(token) exactly once, at once or much later (a transport
/// may be in the middle of a message): from then on nothing is written to its payload. on_received(token) may still
/// come before that, and counts for nothing. Nothing else waits for it.
struct CancelReceiveAction {
  Token token;
};

/// outputs[k][:] = finalize(tree-sum of inputs), for every k. Ends with on_reduced(token), now or later: until then all
/// these spans are in use. An output may be the same span as an input, never a partial overlap. All have the same size.
struct ReduceAction {
  Token token;
  ReduceSpec spec;
  bool check_finite = false;                       ///< Nothing is summed where an input is not finite; they are named.
  std::vector<std::span<const std::byte>> inputs;  ///< In the fixed order of summation.
  std::vector<std::span<std::byte>> outputs;
  std::shared_ptr<Loan> loan = {};  ///< What lies among these and is lent.
};

/// An input of a ReduceAction that is not finite, and its first such element.
struct NotFiniteInput {
  std::uint32_t input = 0;
  std::uint64_t element = 0;
};

/// Copies `from` to `to`, of the same size. With a token it ends with on_copied(token), now or later: until then both
/// are in use. Without, it is done before the next action is carried out.
struct CopyAction {
  std::span<const std::byte> from;
  std::span<std::byte> to;
  std::shared_ptr<const void> keep;  ///< What `to` belongs to, where nobody else keeps it.
  std::optional<Token> token = {};
};

/// A message's body that the engine has kept (its on_control()) is not needed any more.
struct ReleaseAction {
  Token token;
};

/// The operation is over for its submitter: the engine will not touch its memory again. Reported once for every submit.
struct CompleteAction {
  OpKey key;
  Status status;
  Roster roster = {};  ///< Of a join (worker::Operation::is_join) that ended well: who is in.
};

using Action = std::variant<SendAction, PostReceiveAction, CancelReceiveAction, ReduceAction, CopyAction, ReleaseAction,
                            CompleteAction>;
using Actions = std::vector<Action>;

}  // namespace herring
