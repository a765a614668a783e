#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <variant>
#include <vector>

#include "core/status.h"
#include "core/types.h"

/// How the ranks of one host reduce among themselves in the memory of their devices, which all of them reach: which
/// bytes are in which slot, and who sums what when. Pure: (event, now) -> actions. It moves no byte and knows no
/// device.
///
/// Every rank has kSlots slots of its device's memory that the others read. An operation goes in pieces of a slot's
/// size, one after the other; piece n of all operations is in slot n % kSlots of every rank:
///
///   small pieces    CopyIn -> Meet -> SumAll                                  every rank sums all, into its tensor
///   large pieces    CopyIn -> Meet -> SumOwn -> Share -> CopyResult           rank i sums range i, in its slot
///   several hosts   CopyIn -> Meet -> SumOwn -> Exchange -> Share -> CopyResult
///
/// Exchange takes rank i's range over the network: it is summed with those of the other hosts' ranks i.
///
/// Meet and Share end when all ranks have come to the same point, and so carry what is known of the others. A rank
/// meets for piece n when it reads no slot of piece n - kAhead any more. So when piece n has met, nobody reads piece n
/// - kAhead, and a copy into its slot may begin kSlots pieces later.
///
/// Sums begin in the order of the pieces, and so do the copies of results, on all ranks, in whatever order the answers
/// come: the kernels of a library wait for the other ranks', and know no piece by its number.
///
/// The first failure ends everything here for good: ranks may have come to different points, and nobody knows any more
/// who still reads which slot.
namespace herring::staging {

inline constexpr std::uint32_t kSlots = 4;
inline constexpr std::uint32_t kAhead = 2;
/// Ranges of a piece begin at multiples of it, so that they are aligned for wide accesses.
inline constexpr std::uint64_t kRangeAlignment = 64;

struct PeerOptions {
  std::uint32_t members = 2;
  std::uint64_t slot_bytes = 16 << 20;  ///< A multiple of kRangeAlignment.
  /// Pieces up to so many bytes are summed by every rank for itself: one round instead of two.
  std::uint64_t together_bytes = 256 << 10;
  bool has_network = false;  ///< There are other hosts.
};

using PeerOperationId = Id<struct PeerOperationKind>;

struct Piece {
  std::uint64_t number = 0;  ///< Over all operations, the same on all ranks.
  PeerOperationId operation;
  std::uint64_t offset = 0;  ///< In the operation's tensor.
  std::uint64_t bytes = 0;
  std::uint64_t slot_offset = 0;  ///< In every rank's memory.
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// From the tensor into our slot. Answer: on_copied_in.
struct CopyIn {
  Piece piece;
};
/// All ranks come to this point, and say what operation it is of. Answer: on_met.
struct Meet {
  Piece piece;
};
/// The sum of all ranks' slots into the tensor. Answers: on_result_submitted at once, on_result later.
struct SumAll {
  Piece piece;
};
/// The sum of our range of all ranks' slots into our slot. Answer: on_summed.
struct SumOwn {
  Piece piece;
};
/// Our range, which is in our slot, is to be the sum of all hosts', there. Answer: on_exchanged.
struct Exchange {
  Piece piece;
};
/// All ranks come to this point. Answer: on_shared.
struct Share {
  Piece piece;
};
/// Every rank's range from its slot into the tensor. Answers: on_result_submitted at once, on_result later.
struct CopyResult {
  Piece piece;
};
/// The operation's end, once. Where it went well, all that writes the tensor has been submitted.
struct PeerComplete {
  PeerOperationId operation;
  Status status;
};
/// Nothing of ours touches the operation's tensor any more. Once, after PeerComplete.
struct PeerRelease {
  PeerOperationId operation;
};
/// Nobody is to wait for this rank any more. Once.
struct Close {
  Status why;
};
using PeerAction =
    std::variant<CopyIn, Meet, SumAll, SumOwn, Exchange, Share, CopyResult, PeerComplete, PeerRelease, Close>;
using PeerActions = std::vector<PeerAction>;

class PeerEngine final {
 public:
  /// Throws Error(kInvalidArgument) for sizes that do not go.
  explicit PeerEngine(PeerOptions options);

  /// Operations are submitted in the same order on all ranks. `deadline`: when its tensor must be ready.
  Status submit(PeerOperationId id, std::uint64_t bytes, Instant deadline, PeerActions& actions);
  // The answers, by the piece's number. `status` not ok: it was refused, or went wrong.
  void on_copied_in(std::uint64_t piece, const Status& status, PeerActions& actions);
  void on_met(std::uint64_t piece, const Status& status, PeerActions& actions);
  void on_summed(std::uint64_t piece, const Status& status, PeerActions& actions);
  void on_exchanged(std::uint64_t piece, const Status& status, PeerActions& actions);
  void on_shared(std::uint64_t piece, const Status& status, PeerActions& actions);
  void on_result_submitted(std::uint64_t piece, const Status& status, PeerActions& actions);
  void on_result(std::uint64_t piece, const Status& status, PeerActions& actions);

  /// Ends everything, for good.
  void close(const Status& why, PeerActions& actions);
  /// The same, and no copy that is under way will end: the device does nothing any more.
  void lose_device(const Status& why, PeerActions& actions);
  /// Closes where a tensor is not ready at its deadline.
  void advance(Instant now, PeerActions& actions);

  /// Ok until it is closed.
  const Status& status() const { return failure_; }
  bool is_idle() const { return operations_.empty(); }

 private:
  enum class State : std::uint8_t {
    kWaiting,
    kCopyingIn,
    kIsIn,
    kMeeting,
    kMet,
    kSumming,
    kExchanging,
    kIsSummed,
    kSharing,
    kShared,
    kSubmitting,
    kResult,
    kDone
  };
  struct PieceState {
    Piece piece;
    State state = State::kWaiting;
  };
  struct Operation {
    Instant deadline;
    std::uint64_t left = 0;       ///< Pieces whose result has not been submitted.
    std::uint32_t under_way = 0;  ///< Copies and sums that touch the tensor.
    bool is_completed = false;
  };

  bool is_together(const Piece& piece) const;
  /// The piece, where it is in that state and the answer is Ok; else null, and closed where it is not Ok.
  PieceState* answered(std::uint64_t piece, State state, const Status& status, PeerActions& actions);
  PieceState* find(std::uint64_t piece);
  /// Nobody has a copy or sum that touches the tensor for this piece any more.
  void let_go(PieceState& state, PeerActions& actions);
  void start_sum(PieceState& state, PeerActions& actions);
  void start_result(PieceState& state, PeerActions& actions);
  /// Starts what may begin.
  void go_on(PeerActions& actions);
  bool may_copy_in(const PieceState& state) const;
  bool may_meet(const PieceState& state) const;
  void try_release(PeerOperationId id, PeerActions& actions);
  void release_all(PeerActions& actions);

  const PeerOptions options_;
  std::map<PeerOperationId, Operation> operations_;
  std::deque<PieceState> pieces_;  ///< Those that are not done, and up to kSlots that are, by number.
  std::uint64_t next_number_ = 0;
  Status failure_;
  bool is_lost_ = false;
};

/// Which bytes of a piece rank `member` of `members` sums: together they cover it.
struct PieceRange {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
PieceRange range_of(std::uint64_t piece_bytes, std::uint32_t member, std::uint32_t members);

}  // namespace herring::staging
