#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "core/status.h"
#include "core/types.h"

/// How operations on device memory go through host memory: which part is in which slot, and what is copied when. Pure:
/// (event, now) -> actions. It moves no byte and knows no device.
///
///   submit -> CopyOut ... on_copied_out -> Reduce ... on_reduced -> CopyBack ... on_copied_back
///
/// A slot is one part's from its CopyOut until nothing can touch it any more: not the copy engine (the copy's ticket
/// has ended) and not the reduction (on_reduced). That holds after failures, cancellations and time-outs too, so the
/// memory of a copy in flight is never given to another part. When the device is lost no ticket will end: its slots
/// stay out of use.
///
/// Parts take slots in order, operations in the order of their submission. Where no slot is left, an operation without
/// any still gets one of its own (Grow): ranks may submit in different orders, and if the operations that hold the
/// slots on one rank waited for those that wait for slots on another, none would ever end.
namespace herring::staging {

using OperationId = Id<struct StagedOperationKind>;
using SlotId = Id<struct StagingSlotKind>;

struct Options {
  std::uint32_t slots = 8;
  std::uint64_t part_bytes = 1 << 20;  ///< Of a slot. The same on all ranks: parts are what ranks reduce together.
  std::uint32_t most_operations = 4096;
  /// How long the copies of an operation that failed may take until it is said that the device hangs.
  Duration drain = std::chrono::seconds(30);
};

struct Part {
  OperationId operation;
  std::uint32_t index = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  SlotId slot;
  friend bool operator==(const Part&, const Part&) = default;
};

/// One more slot: options.slots + n, for the n-th. It may be memory that is not pinned.
struct Grow {
  SlotId slot;
};
/// From the device into the slot. Answer: on_copied_out.
struct CopyOut {
  Part part;
};
/// The bytes are in the slot. Answer: on_reduced.
struct Reduce {
  Part part;
};
/// What is being reduced is not wanted any more: may end it early. The answer to Reduce comes all the same.
struct Abandon {
  Part part;
};
/// From the slot to the device. Answers: on_back_submitted at once, on_copied_back later.
struct CopyBack {
  Part part;
};
/// The operation's end, once. Where it went well every CopyBack has been submitted, or is done (Until).
struct Complete {
  OperationId operation;
  Status status;
};
/// Nothing touches the operation's device memory any more. Once, after Complete. Never where the device hangs or is
/// lost.
struct Release {
  OperationId operation;
};
using Action = std::variant<Grow, CopyOut, Reduce, Abandon, CopyBack, Complete, Release>;
using Actions = std::vector<Action>;

/// What the caller is told at the end.
enum class Until : std::uint8_t {
  kSubmitted,  ///< The last copy back is in its stream: who works on that stream or waits for its event sees the
               ///< result.
  kDone,       ///< Nothing touches the memory any more.
};

class Engine final {
 public:
  /// Throws Error(kInvalidArgument) without slots or with parts of no byte.
  explicit Engine(Options options);

  /// kAgain: as many operations as there may be; nothing happened. kInvalidArgument: the id is taken, or the time is
  /// up.
  Status submit(Instant now, OperationId id, std::uint64_t bytes, Instant deadline, Until until, Actions& actions);
  /// The answers: the slot is not touched any more by what is answered. `status` not ok: it was refused, or went wrong.
  void on_copied_out(Instant now, OperationId id, std::uint32_t part, const Status& status, Actions& actions);
  void on_reduced(Instant now, OperationId id, std::uint32_t part, const Status& status, Actions& actions);
  void on_back_submitted(Instant now, OperationId id, std::uint32_t part, const Status& status, Actions& actions);
  void on_copied_back(Instant now, OperationId id, std::uint32_t part, const Status& status, Actions& actions);

  /// Ends the operation with `reason`; unknown ids are ignored.
  void cancel(Instant now, OperationId id, const Status& reason, Actions& actions);
  /// The device does nothing any more, for good: all end with `reason`, and so does what is submitted later.
  void lose_device(Instant now, const Status& reason, Actions& actions);
  /// Ends what is past its deadline.
  void advance(Instant now, Actions& actions);
  /// When advance() has something to do next; Instant::max(): never.
  Instant next_deadline() const;

  std::size_t operations() const { return operations_.size(); }
  std::uint32_t slots() const { return options_.slots + grown_; }
  std::uint32_t free_slots() const { return static_cast<std::uint32_t>(free_.size()); }
  /// Slots that copies of a lost or hanging device may still write to.
  std::uint32_t lost_slots() const { return lost_; }

 private:
  enum class State : std::uint8_t { kWaiting, kOut, kReducing, kSubmittingBack, kBack, kEnded };
  struct PartState {
    State state = State::kWaiting;
    SlotId slot;
  };
  struct Operation {
    std::uint64_t bytes = 0;
    Instant deadline;
    Until until = Until::kDone;
    Status failure;  ///< The first.
    Instant drain_deadline = Instant::max();
    bool is_completed = false;
    std::vector<PartState> parts;
    std::uint32_t next = 0;  ///< The first part without a slot so far.
    std::uint32_t held = 0;  ///< Slots.
    std::uint32_t submitted_back = 0;
    std::uint32_t copying = 0;  ///< Parts that a copy may be touching.
    std::uint32_t ended = 0;
    std::uint32_t lost = 0;  ///< Slots that a lost device may still write to.

    bool has_waiting_part() const { return failure.is_ok() && next < parts.size(); }
  };
  using Place = std::map<OperationId, Operation>::iterator;

  Part part_of(OperationId id, const Operation& operation, std::uint32_t index) const;
  /// The part, where it is in `state`; null for answers that nobody waits for.
  PartState* find(OperationId id, std::uint32_t index, State state, Place& place);
  void fail(Instant now, Place place, const Status& reason, Actions& actions);
  /// Gives the part's slot back and hands it on.
  void end_part(Place place, PartState& part, Actions& actions);
  /// Completes and releases what is due; the operation may be gone afterwards.
  void try_complete(Place place, Actions& actions);
  /// First to `place`, where it has none.
  void hand_out_slots(Place place, Actions& actions);
  void start_part(Place place, SlotId slot, Actions& actions);
  SlotId take_slot();

  const Options options_;
  std::map<OperationId, Operation> operations_;
  std::deque<OperationId> waiting_;  ///< Have parts without a slot, in the order of submission.
  std::vector<SlotId> free_;
  std::uint32_t grown_ = 0;
  std::uint32_t lost_ = 0;
  Status lost_device_;
};

}  // namespace herring::staging
