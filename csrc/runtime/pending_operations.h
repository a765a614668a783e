#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/operation.h"
#include "core/roster.h"
#include "core/status.h"
#include "core/types.h"
#include "memory/domain.h"
#include "runtime/group.h"
#include "runtime/host_exchange.h"
#include "runtime/messages.h"
#include "runtime/operation_order.h"
#include "runtime/overdue.h"
#include "runtime/pending.h"
#include "runtime/placement.h"
#include "runtime/runtime.h"
#include "runtime/server_exchange.h"

namespace herring::runtime {

/// One submitted operation on its way. After Progress::submit() it belongs to the thread in the seat.
struct PendingOperation {
  std::shared_ptr<Group> group;
  std::uint64_t op = 0;
  OpDescriptor descriptor;
  std::span<const std::byte> input;
  std::span<std::byte> output;
  Instant deadline;
  std::shared_ptr<PendingWork> work;
  bool is_waited_for = false;        ///< As Request's.
  bool announced = false;            ///< As intra_node::LocalOperation's.
  std::string name;                  ///< As Request's; may be empty.
  bool has_backup = false;           ///< As Request's, where the job has backup workers.
  bool is_counted = false;           ///< Its number is the group's own count of calls.
  bool is_declared = false;          ///< Stands for a collective that is made of messages; no caller waits for it.
  Roster roster;                     ///< Who is in, once that is known.
  std::shared_ptr<LateMemory> late;  ///< As Request's; mostly null.
  std::shared_ptr<const void> device_memory;  ///< As Request's; mostly null.

  GroupRoute::Path path = GroupRoute::Path::kAlone;
  std::uint64_t block_bytes = 0;  ///< All-gather: one rank's block. Else all of it.
  std::uint64_t part_bytes = 0;   ///< Size of every part of a block but the last.
  std::uint32_t parts_per_block = 1;
  std::uint32_t parts = 1;
  std::uint32_t next_part = 0;
  std::uint32_t in_flight = 0;
  bool staged = false;              ///< A part of it was in private memory.
  std::vector<memory::Hold> holds;  ///< Of `output`, in blocks of register_parts parts each; empty until one is needed.
  std::uint32_t register_parts = 1;
  Status failure;   ///< The first error of any part.
  Overdue overdue;  ///< From the deadline on.

  OrderedCall call;  ///< Its place among those that are pending; entered already.
};

struct PendingOperationsOptions {
  Config config;
  const Placement* placement = nullptr;  ///< Outlives it, as all pointers here.
  std::uint32_t rank = 0;
  std::shared_ptr<OperationOrder> order;
  HostExchange* host = nullptr;           ///< Null where this host has no other ranks.
  ServerExchange* servers = nullptr;      ///< Null where there are no lanes.
  RuntimeStats* counters = nullptr;       ///< Of all that ends.
  std::function<void()> before_complete;  ///< Before an operation ends for its caller ...
  std::function<void()> on_complete;      ///< ... and after.
};

/// The operations that this rank has called and that have not ended. Each waits for earlier ones that use the same
/// memory or name; is cut into parts; and each part goes through the host's shared memory, the servers, or both. Used
/// by the thread in the seat alone, where nothing else is said.
class PendingOperations final {
 public:
  explicit PendingOperations(PendingOperationsOptions options);
  ~PendingOperations();
  PendingOperations(const PendingOperations&) = delete;
  PendingOperations& operator=(const PendingOperations&) = delete;

  using Operation = std::shared_ptr<PendingOperation>;

  /// Begins it, or holds it until what it waits for has ended.
  void start(Instant now, const Operation& operation);
  /// It does not begin.
  void refuse(const Operation& operation, const Status& why) { end(operation, why); }
  /// It has been started, and has not ended; or has ended.
  bool knows(const Operation& operation) const;
  /// Of those that were held, the ones that may begin, in call order: no longer held, to be started.
  std::vector<Operation> take_ready();
  bool may_begin() const { return may_begin_; }
  /// Late memory has something new to say.
  void start_late_parts(Instant now);
  /// Any thread: into parts of so many bytes the group's reductions are cut.
  std::uint64_t part_bytes(GroupRoute::Path path) const;

  /// HostExchangeOptions::on_action
  void on_host_action(Instant now, const intra_node::LocalAction& action);
  /// Ends what has waited too long, or is over at the servers.
  void tick(Instant now);
  Instant next_deadline() const;
  /// What is past its deadline for so long and still cannot end; empty: nothing.
  std::string stuck(Instant now, Duration patience);

  /// A rank has done all that it will do. True where that is new.
  bool note_departed(std::uint32_t rank, const std::string& how);
  /// What it took part in ends soon; what it did not, never: so that is not waited for.
  void await_departed(Instant now);
  bool has_departed() const { return !departed_.empty(); }
  /// A rank has left this group: what it has not called there, it never will.
  void end_uncalled(Instant now, const std::shared_ptr<Group>& group);
  /// All of a group's ends, with `elsewhere` where others wait for this rank.
  void end_group(Instant now, GroupId group, const Status& here, const Status& elsewhere);
  bool has_pending(GroupId group) const;

  /// Collectives that are made of messages, as far as those that are not can meet them by mistake: a rank that has
  /// waited long in one calls an operation of the same number that says what it is doing.
  void declare(const WaitingCollective& waiting);
  bool has_declared() const { return !declarations_.empty() || !refused_.empty(); }
  void begin_declared(Instant now);
  /// The collective has ended.
  void end_declared(Instant now, const OpKey& key);
  /// Those that what others called does not go with, and why.
  std::vector<std::pair<OpKey, Status>> take_refused() { return std::exchange(refused_, {}); }

  /// As callers know it; empty: it has no name, or is over.
  std::string name_of(const OpKey& key) const;
  /// The first of them, for an error; empty where nothing has begun.
  std::string listed() const;
  /// Everything has failed, host and servers are closed: gives back what callers wait for.
  std::vector<Operation> close();

 private:
  struct Part;
  struct Departed {
    std::uint32_t rank;
    std::string text;  ///< Who, and how.
  };

  void begin(Instant now, const Operation& operation);
  void end(const Operation& operation, const Status& status);
  void end_held(const Operation& operation, const Status& status);
  void expire_held(Instant now);
  void expire_departed(Instant now);
  void give_up(Instant now, const Operation& operation, const Status& here, const Status& elsewhere);
  Status check_left(const PendingOperation& operation) const;
  Status check_departed(const PendingOperation& operation) const;

  void plan_parts(PendingOperation& operation) const;
  void start_join(Instant now, const Operation& operation);
  void take_roster(PendingOperation& operation, const Roster& roster);
  void start_parts(Instant now, const Operation& operation);
  void start_part(Instant now, const Operation& operation, std::uint32_t number);
  void add_part(std::unique_ptr<Part> part);
  Part* find(const OpKey& key) const;
  void submit_local(Instant now, Part& part);
  void submit_network(Instant now, Part& part, std::span<std::byte> memory);
  void refuse_network(Instant now, const Part& part, std::span<std::byte> memory, const Status& why);
  void hold(Part& part, std::span<std::byte> memory);
  void release_holds(PendingOperation& operation);
  worker::Operation network_operation(Instant now, const Part& part, std::span<std::byte> memory) const;
  void part_done(Instant now, const OpKey& key, const Status& status);
  void network_done(Instant now, const CompleteAction& action);
  void abort_parts(Instant now, const PendingOperation& operation, const Status& why);
  void run_host(Instant now) {
    if (host_ != nullptr) host_->run_actions(now);
  }

  const PendingOperationsOptions options_;
  HostExchange* const host_;
  ServerExchange* const servers_;
  std::unordered_map<OpKey, std::unique_ptr<Part>> parts_;
  std::vector<Operation> operations_;       // Those that have begun.
  std::vector<Operation> held_;             // Those that wait for others, in call order.
  Instant held_deadline_ = Instant::max();  // Of none of them earlier.
  bool may_begin_ = false;                  // One of them waits for none any more.
  std::vector<Departed> departed_;          // In the order in which they went: the first is the cause.
  std::vector<Operation> declarations_;     // To begin.
  std::vector<std::pair<OpKey, Status>> refused_;
};

}  // namespace herring::runtime
