#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/config.h"
#include "core/operation.h"
#include "core/roster.h"
#include "core/status.h"
#include "core/types.h"
#include "intra_node/engine.h"
#include "intra_node/neighborhood.h"
#include "memory/domain.h"
#include "runtime/control.h"
#include "runtime/core_balance.h"
#include "runtime/lane.h"
#include "runtime/local_writes.h"
#include "runtime/messages.h"
#include "runtime/name_uses.h"
#include "runtime/operation_order.h"
#include "runtime/overdue.h"
#include "runtime/pending.h"
#include "runtime/placement.h"
#include "runtime/pump.h"
#include "runtime/runtime.h"
#include "runtime/spin.h"
#include "server/reduce.h"
#include "transport/transport.h"
#include "worker/engine.h"

namespace herring::runtime {

/// A group as the runtime keeps it; immutable but for what counts operations.
struct Group {
  GroupId id;
  std::uint32_t use = 0;  ///< As UsedGroup's.
  GroupRoute route;
  std::atomic<std::uint64_t> next_op{0};
  struct Left {
    std::uint64_t calls;  ///< So many without a name came before.
    std::string text;     ///< Who, and how.
  };
  std::vector<Left> left;     ///< Written in the progress seat alone, guarded by the runtime for all who read it.
  bool has_own_keys = false;  ///< Its operations are not counted here. Guarded by the runtime.
  bool is_left = false;       ///< The others know that nothing more is called here. Guarded by the runtime.
  Status closed;              ///< Why nothing can be called in it any more. Guarded by the runtime.
  NameUses name_uses;         ///< Guarded by the runtime.
  std::weak_ptr<const BackgroundCaller> caller;  ///< As Communicator::set_background_caller(). Guarded by the runtime.

  /// Who does not take part in a numbered call; null: nobody has left before it.
  const Left* left_before(std::uint64_t op) const {
    const auto found = std::find_if(left.begin(), left.end(), [op](const Left& each) { return op >= each.calls; });
    return found == left.end() ? nullptr : &*found;
  }
};

/// One submitted operation on its way. After submit() it belongs to the progress thread.
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

struct ProgressOptions {
  Config config;
  const Placement* placement = nullptr;  ///< Outlives the progress thread, as all pointers here.
  std::uint32_t rank = 0;
  std::uint64_t job_id = 0;
  HubClient* hub = nullptr;
  std::shared_ptr<OperationOrder> order;
  std::shared_ptr<intra_node::Neighborhood> neighborhood;  ///< Null where nothing is shared.
  memory::Domain* memory = nullptr;                        ///< Of this process; outlives the endpoints.
  std::unique_ptr<transport::Endpoint> endpoint;           ///< Null where there are no lanes. Peers known already.
  std::unique_ptr<transport::Endpoint> peer_endpoint;      ///< To other workers, for messages; null where endpoint is.
  std::vector<Lane*> lanes;                                ///< Of this process, where it drives them too. Open.
  /// A worker is gone for good: embedded lanes want to know too.
  std::function<void(PeerId, const std::string&)> on_peer_lost;
  /// And one that has done all that it will do.
  std::function<void(PeerId, const std::string&)> on_peer_left;
  /// Another rank has given up this group: false where it is not one of this rank's. Nothing is submitted there after
  /// it.
  std::function<bool(const HubEvent&, const Status&)> on_group_aborted;
  /// Notes in its group that another rank has left it; null where it is not one of this rank's, or not yet.
  std::function<std::shared_ptr<Group>(const HubEvent&)> on_group_left;
};

/// Set when nothing of a group that was left is under way any more. Safe from any thread.
class GroupClosed final {
 public:
  void set();
  void wait();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;  // guarded by mutex_
};

struct PeerTraffic {
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t messages = 0;
};

/// An operation that may be small enough to be done at once, by the thread that calls it.
struct SmallOperation {
  OpKey key;
  OpDescriptor descriptor;
  const GroupRoute* route = nullptr;
  std::span<const std::byte> input;
  std::span<std::byte> output;
  Status status;  ///< Where it is over.
};
SmallOperation small_operation(const Request& request, std::uint64_t op, const GroupRoute& route);
enum class Shortcut : std::uint8_t {
  kNotTaken,   ///< Nothing has been done.
  kAnnounced,  ///< This rank's message to the others is out; the rest is to be submitted.
  kDone,
};

/// The one thread of a worker process that moves data: runs the pure engines (host, servers, messages), executes their
/// actions, watches the hub.
class Progress final : public Driver {
 public:
  explicit Progress(ProgressOptions options);
  ~Progress() override;  ///< Stops at once; what is pending completes with kShutdown.
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Where threads that wait take over.
  const std::shared_ptr<DriverSeat>& seat() const { return seat_; }
  void drive(const Work& work, Instant deadline) override;
  /// Whether take_shortcut() could do this one, if nothing else goes on.
  bool is_small(const SmallOperation& operation) const;
  /// The thread in the seat, which is not this object's own: intra_node/shortcut.h.
  Shortcut take_shortcut(SmallOperation& operation);

  /// Any thread.
  void submit(std::shared_ptr<PendingOperation> operation);
  /// Any thread.
  void submit(PendingMessage message);
  /// Any thread: this rank has left the group, nothing more will be submitted there. What is pending there ends with
  /// an error; the result is set when that is done and the callers' memory is their own again.
  std::shared_ptr<GroupClosed> close_group(GroupId group);
  /// Any thread: this rank gives the group up, nothing more will be submitted there. What is pending there ends with
  /// kCancelled, here and on the other ranks.
  void abort_group(GroupId group, const std::string& reason);
  void give_up_pending(GroupId group, const std::string& reason);
  /// Looks soon at what others have said, also where nothing is pending here.
  void hear_news() { wake_up(true); }
  /// Any thread: receives that no message has met end with kShutdown.
  void cancel_unmatched_receives();
  /// Any thread: those of a group, but for collectives', end with kCancelled.
  void cancel_unmatched_receives(GroupId group);
  /// Any thread: late memory has something new to say.
  void look_at_late_memory();
  /// Any thread: into parts of so many bytes the group's reductions are cut.
  std::uint64_t part_bytes(GroupRoute::Path path) const;
  /// Any thread: everything pending and everything later fails with this.
  void fail(const Status& status);
  /// The status everything fails with by now, or Ok.
  Status failure() const;
  /// Blocks until nothing is pending and nothing that others wait for has to leave, or the deadline; true where so.
  bool drain(Instant deadline);
  RuntimeStats stats() const;
  /// Payload exchanged with each lane, in plan order.
  std::vector<PeerTraffic> lane_traffic() const;

 private:
  struct Part;
  /// How what is pending in a group ends.
  struct GroupEnd {
    Status here;
    Status elsewhere;  ///< Where others wait for this rank.
    Status messages;   ///< On both sides.
  };
  struct ClosingGroup {
    GroupId group;
    GroupEnd end;
    std::shared_ptr<GroupClosed> closed = std::make_shared<GroupClosed>();
  };
  /// What other threads want of the messages and groups.
  struct MessageCommands {
    std::vector<PendingMessage> submitted;
    std::vector<ClosingGroup> closed_groups;
    std::vector<GroupId> left_groups;
    bool cancel_receives = false;
    bool has_late_memory = false;  ///< That has something new to say.

    bool is_empty() const {
      return submitted.empty() && closed_groups.empty() && left_groups.empty() && !cancel_receives && !has_late_memory;
    }
  };
  struct Departed {
    std::uint32_t rank;
    std::string text;  ///< Who, and how.
  };
  using PartMap = std::unordered_map<OpKey, std::unique_ptr<Part>>;

  void join_neighbourhood(intra_node::Neighborhood& neighborhood);
  std::shared_ptr<GroupClosed> ask_to_close(ClosingGroup closing);
  void loop();
  bool yield_core(Instant now);
  bool turn(Instant now);
  void break_down(const std::exception& problem);
  bool may_take_shortcut() const;
  bool exchange_small(SmallOperation& operation);
  bool do_turn(Instant now);
  void run_until(const std::function<bool()>& is_over, Instant deadline, bool is_caller);
  void start_driving();
  bool is_needed() const;
  bool may_leave();
  void leave_to_others();
  void wait_to_drive();
  bool take_commands(Instant now);
  void carry_out(Instant now, const MessageCommands& commands);
  void wake_up(bool needs_thread);
  void ring();
  void count_ended(std::uint64_t ended);
  void watch_unsent();
  void note_needed_later(bool is_needed);
  bool take_hub_events(Instant now);
  void member_left(Instant now, const HubEvent& event);
  void group_aborted(Instant now, const HubEvent& event);
  void group_left(Instant now, const HubEvent& event);
  Status check_left(const PendingOperation& operation) const;
  void end_local_without(Instant now, std::uint32_t rank, const std::string& why);
  bool lose_server(Instant now, const HubEvent& event);
  PumpLinks lane_links();
  void report_lanes(const Unreachable& found);
  void report_unreachable(std::span<const std::uint32_t> members, std::uint32_t of, const Unreachable& found);
  bool take_local_messages(Instant now);
  void warn(const intra_node::StallWarning& stall);
  void run_ticks(Instant now);
  Instant next_deadline() const;
  void sleep(Instant until);

  void start_all(Instant now, std::span<const std::shared_ptr<PendingOperation>> operations);
  void start_all(Instant now, std::span<const PendingMessage> messages);
  void start(Instant now, const std::shared_ptr<PendingOperation>& operation);
  void begin(Instant now, const std::shared_ptr<PendingOperation>& operation);
  bool begin_held(Instant now);
  void end(const std::shared_ptr<PendingOperation>& operation, const Status& status);
  void end_held(const std::shared_ptr<PendingOperation>& operation, const Status& status);
  void watch_collectives(MessagesOptions& options);
  void declare(const WaitingCollective& waiting);
  void declared_end(const PendingOperation& operation, const Status& status);
  bool end_collectives(Instant now);
  void expire_held(Instant now);
  void start_closing(Instant now, const ClosingGroup& closing);
  void end_closing();
  void end_group(Instant now, GroupId group, const GroupEnd& end);
  void give_up(Instant now, const std::shared_ptr<PendingOperation>& operation, const Status& here,
               const Status& elsewhere);
  Status check_departed(const PendingOperation& operation) const;
  void plan_parts(PendingOperation& operation) const;
  void start_join(Instant now, const std::shared_ptr<PendingOperation>& operation);
  void take_roster(PendingOperation& operation, const Roster& roster);
  void start_parts(Instant now, const std::shared_ptr<PendingOperation>& operation);
  void start_late_parts(Instant now);
  void start_part(Instant now, const std::shared_ptr<PendingOperation>& operation, std::uint32_t part);
  void add_part(std::unique_ptr<Part> part);
  void submit_local(Instant now, Part& part);
  void submit_network(Instant now, Part& part, std::span<std::byte> memory);
  void refuse_network(Instant now, const Part& part, std::span<std::byte> memory, const Status& why);
  void hold(Part& part, std::span<std::byte> memory);
  void release(std::span<const std::byte> memory, memory::Hold hold);
  void release_lingering();
  worker::Operation network_operation(Instant now, const Part& part, std::span<std::byte> memory) const;
  void part_done(Instant now, const OpKey& key, const Status& status);
  void network_done(Instant now, const CompleteAction& action);
  void expire_operations(Instant now);
  void end_stuck(Instant now);
  void abort_parts(Instant now, const PendingOperation& operation, const Status& why);

  bool run_local_actions(Instant now);
  void execute(Instant now, intra_node::LocalAction& action);
  void send_local(std::uint32_t to, std::span<const std::byte> first, std::span<const std::byte> second,
                  std::span<const std::byte> third);
  void send_to_all(std::span<const std::byte> first, std::span<const std::byte> second,
                   std::span<const std::byte> third);
  bool has_local_backlog() const;
  bool flush_local_backlog();
  Status with_pending(const Status& status) const;
  void fail_everything(const Status& status);
  void publish();
  void publish_lanes();

  ProgressOptions options_;
  const Config& config_;
  const std::vector<Lane*> lanes_;  ///< Driven with everything else.
  const bool watches_network_;      ///< Others may want something of this process though nothing is pending.
  const server::Isa isa_;
  LocalWrites local_writes_;
  std::optional<CoreBalance> core_balance_;  ///< Where other ranks are on this host.
  std::unique_ptr<intra_node::Engine> local_;
  std::unique_ptr<worker::Engine> network_;
  worker::EngineConfig network_config_;
  memory::Domain* memory_ = nullptr;  ///< Of the endpoint to the lanes; null where any memory will do.
  memory::Buffer bounce_;             ///< Failover: where results land.
  /// Of memory that ended operations have given back, while the network still reads it for a lost server.
  std::vector<std::pair<std::span<const std::byte>, memory::Hold>> lingering_;
  std::unique_ptr<Pump<worker::Engine>> pump_;
  std::unique_ptr<Messages> messages_;

  std::shared_ptr<DriverSeat> seat_;
  bool shares_cores_ = false;  ///< This host has more ranks than cores.

  // Only the thread in the seat.
  PartMap parts_;
  std::vector<std::shared_ptr<PendingOperation>> operations_;  ///< Those that have begun.
  std::vector<std::shared_ptr<PendingOperation>> held_;        ///< Those that wait for others, in call order.
  Instant held_deadline_ = Instant::max();                     ///< Of none of them earlier.
  std::vector<ClosingGroup> closing_;                          ///< Left, with something still under way.
  /// Workers that have done all that they will do, in the order in which they did: the first is the cause.
  std::vector<Departed> departed_;
  std::set<std::uint32_t> left_;           ///< Those of them that are gone.
  std::set<std::uint32_t> lost_servers_;   ///< Server processes that are gone.
  std::vector<std::uint32_t> neighbours_;  ///< The ranks of this host, by their local rank.
  std::vector<std::deque<std::vector<std::byte>>> local_backlog_;
  AdaptiveSpin spin_;
  std::vector<std::span<const std::byte>> small_inputs_;  ///< Of the shortcut being taken.
  std::deque<CompleteAction> network_completions_;
  /// Made of messages: to be declared, refused by what others call, and over.
  std::vector<std::shared_ptr<PendingOperation>> declarations_;
  std::vector<std::pair<OpKey, Status>> refused_collectives_;
  std::vector<OpKey> ended_collectives_;
  RuntimeStats counters_;
  Instant next_look_{};  ///< For what is stuck.
  bool hub_lost_ = false;
  bool is_broken_ = false;   ///< An exception stopped it: it only refuses.
  bool has_unsent_ = false;  ///< Counted in pending_.
  bool may_begin_ = false;   ///< One of `held_` waits for none any more.

  std::atomic<bool> stop_{false};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> has_failed_{false};  ///< failure() has something to say.
  std::atomic<std::uint64_t> pending_{0};
  std::atomic<bool> is_needed_later_{false};  ///< worker::Engine::is_needed()
  std::atomic<int> drainers_{0};
  std::atomic<std::uint64_t> zero_copy_shortcuts_{0};  ///< Operations that counters_ does not have.
  std::atomic<std::uint64_t> staged_shortcuts_{0};
  int wake_fd_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable drained_;
  bool is_driven_ = false;  // guarded by mutex_, as all below
  std::vector<std::shared_ptr<PendingOperation>> submitted_;
  MessageCommands message_commands_;
  Status requested_failure_;
  Status failure_;
  RuntimeStats stats_;
  std::vector<PeerTraffic> traffic_;
  std::thread thread_;
};

}  // namespace herring::runtime
