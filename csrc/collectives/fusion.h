#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "collectives/fusion_engine.h"
#include "collectives/placed_memory.h"
#include "collectives/tensor_spec.h"
#include "core/status.h"
#include "core/types.h"
#include "runtime/communicator.h"

namespace herring::collectives {

struct FusionSettings {
  FusionOptions engine;
  std::uint64_t tensor_bytes = 1 << 20;  ///< Larger tensors do not come here, unless they lie in memory of place().
  bool checks_finite = false;            ///< HERRING_CHECK_FINITE: a bucket must be good for a second try.
  Duration timeout{};                    ///< Of each round and each batch.
  /// When a round has waited for so long, `warn` is told which tensors wait in it. 0: never.
  Duration stall_warning{};
  std::function<void(const std::string&)> warn;
  std::uint64_t series = 0;  ///< Tells its tickets from those of one before it with the same group.
  /// A name that is in flight may be used again: its uses follow each other. Else that is refused, also after its end
  /// until somebody has seen that.
  bool queues_names = false;
};

/// Small reductions by name of one group, in any order on each rank: FusionEngine over a Communicator. Tensors are
/// copied into a bucket that all lanes share evenly, and back; not where they lie in memory of place(). A waiting
/// caller moves things itself; else a thread does, which is started with the first tensor. Safe from any thread.
class Fusion final {
 public:
  struct Tensor {
    std::string_view name;
    TensorSpec spec;
    std::span<const std::byte> source;  ///< Borrowed until the ticket is no longer pending.
    std::span<std::byte> result;        ///< May be the source.
    std::shared_ptr<void> owner = {};   ///< Kept until the ticket is no longer pending, and given to GoAlone.
  };
  enum class State : std::uint8_t { kPending, kDone, kAlone };
  /// Tickets are from here on, unlike those of other groups.
  static constexpr Ticket kFirstTicket = Ticket{1} << 60;
  /// Has to reduce the ticket's tensor by an operation of its own, the same on all ranks, which calls went_outside()
  /// (not where names queue up: that has been done) and came_back(). Called on any thread. Not Ok: the ticket fails.
  using GoAlone = std::function<Status(Ticket, const std::shared_ptr<void>& owner)>;

  /// `group` is a new one of the runtime's with these ranks, for this alone. Every rank of it makes one.
  Fusion(std::shared_ptr<runtime::Communicator> runtime, GroupId group, std::span<const std::uint32_t> ranks,
         FusionSettings settings, GoAlone go_alone);
  ~Fusion();  ///< close()
  Fusion(const Fusion&) = delete;
  Fusion& operator=(const Fusion&) = delete;

  /// Memory for these tensors, one after the other: where all ranks have some that follow each other ready, and all of
  /// them lie there, they are reduced in place by one operation, whatever their size. On any rank, at any time; the
  /// order is that of rank 0 of the group. Throws as make_row().
  TensorRow place(std::span<const NamedBytes> tensors);

  /// Starts a reduction. None: it has to go alone, now, by the caller (where names queue up, went_outside() has been
  /// done). Throws Error(kInvalidArgument) where the name
  /// has a ticket that nobody has forgotten yet, or the memory is in use.
  std::optional<Ticket> submit(const Tensor& tensor);
  /// Where names queue up: an operation outside of this name may begin, and went_outside() has been done (none); or it
  /// begins by GoAlone when the uses before it have ended.
  std::optional<Ticket> queue_outside(std::string_view name, std::shared_ptr<void> owner);
  /// The first half of it: false where it is in flight, and nothing has been done.
  bool go_outside(std::string_view name);
  State state(Ticket ticket) const;
  /// A tensor of this name is pending: also while GoAlone is being called for it.
  bool has_pending(std::string_view name) const;
  struct Outcome {
    State state = State::kDone;
    Status status;  ///< How it ended, where done.
  };
  Outcome outcome(Ticket ticket) const;
  /// As state(); where it is done, its name is free.
  State poll(Ticket ticket);
  /// Blocks until it is not pending, or the deadline.
  State wait(Ticket ticket, Instant deadline);
  /// How it ended, where done. Its name is free then. Ok for one that went alone.
  Status forget(Ticket ticket);
  /// Runs when the ticket is no longer pending; at once where it is not. On a thread that may block.
  void on_end(Ticket ticket, std::function<void(State)> callback);

  /// The operation that this pending ticket needs next.
  runtime::Awaited awaited(Ticket ticket) const;
  /// As Work::block(), of a thread of the program, while the ticket is pending.
  std::shared_ptr<void> block(Ticket ticket);

  /// See FusionEngine. Throws Error(kInvalidArgument) where the name has a ticket.
  void went_outside(std::string_view name);
  void came_back(std::string_view name);
  void pause();
  void resume();

  /// kGroup: every rank of the group closes it now, and is waited for a second at most.
  enum class Leaving : std::uint8_t { kJob, kGroup };
  /// Waits for what is pending until the deadline, then stops. Where all ranks that are still there are closing, what
  /// some of them lack ends with an error at once. Where names queue up it waits also for what is under way outside, 5
  /// s at most: others may have to hear of it. What is submitted later goes alone.
  void close(Instant deadline, Leaving leaving = Leaving::kJob);

  struct Counters {
    std::uint64_t buckets = 0;
    std::uint64_t in_place = 0;  ///< Of them.
  };
  Counters counters() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // shared with callbacks of the runtime
};

}  // namespace herring::collectives
