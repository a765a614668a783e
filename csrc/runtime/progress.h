#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/config.h"
#include "core/operation.h"
#include "core/status.h"
#include "core/types.h"
#include "intra_node/neighborhood.h"
#include "memory/domain.h"
#include "runtime/control.h"
#include "runtime/group.h"
#include "runtime/host_exchange.h"
#include "runtime/lane.h"
#include "runtime/messages.h"
#include "runtime/operation_order.h"
#include "runtime/pending.h"
#include "runtime/pending_operations.h"
#include "runtime/placement.h"
#include "runtime/polite_wait.h"
#include "runtime/runtime.h"
#include "runtime/server_exchange.h"
#include "runtime/small_operation.h"
#include "runtime/spin.h"
#include "transport/transport.h"

namespace herring::runtime {

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

/// The one thread of a worker process that moves data, or a thread that waits in its seat: the loop that drives what
/// the ranks of a host do together, what goes to the servers, messages, and the lanes that live in this process; and
/// what other threads and the hub want of them.
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
  bool is_small(const SmallOperation& operation) const { return host_ && host_->is_small(operation); }
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
  std::uint64_t part_bytes(GroupRoute::Path path) const { return operations_->part_bytes(path); }
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
  /// What other threads want.
  struct Commands {
    std::vector<std::shared_ptr<PendingOperation>> operations;
    std::vector<PendingMessage> messages;
    std::vector<ClosingGroup> closed_groups;
    std::vector<GroupId> left_groups;
    bool cancel_receives = false;
    bool has_late_memory = false;  ///< That has something new to say.

    bool is_empty() const {
      return operations.empty() && messages.empty() && closed_groups.empty() && left_groups.empty() &&
             !cancel_receives && !has_late_memory;
    }
  };

  // What it drives, made from the options.
  HostExchangeOptions host_options();
  ServerExchangeOptions server_options();
  MessagesOptions message_options();
  PendingOperationsOptions operation_options();

  // progress_drive.cc: who drives, and for how long.
  void loop();
  void run_until(const std::function<bool()>& is_over, Instant deadline, bool is_caller);
  bool turn(Instant now);
  void break_down(const std::exception& problem);
  void start_driving();
  bool is_needed() const;
  bool may_leave();
  void leave_to_others();
  void wait_to_drive();
  void sleep(Instant until);
  Instant next_deadline() const;
  void publish_lanes();
  void wake_up(bool needs_thread);
  void ring();

  // progress.cc: one turn, and what is said about it.
  bool do_turn(Instant now);
  bool take_commands(Instant now);
  void carry_out(Instant now, Commands commands);
  void begin(Instant now, Commands& commands);
  void start_all(Instant now, std::vector<std::shared_ptr<PendingOperation>>& operations);
  void start(Instant now, const PendingMessage& message);
  bool begin_held(Instant now);
  bool end_collectives(Instant now);
  void run_ticks(Instant now);
  void end_stuck(Instant now);
  void warn(const intra_node::StallWarning& stall);
  void count_ended(std::uint64_t ended);
  void watch_unsent();
  void note_needed_later(bool is_needed);
  Status with_pending(const Status& status) const;
  void fail_everything(const Status& status);
  void publish();

  // progress_events.cc: what the hub says, and the end of groups.
  bool take_hub_events(Instant now);
  void member_left(Instant now, const HubEvent& event);
  bool lose_server(Instant now, const HubEvent& event);
  void group_aborted(Instant now, const HubEvent& event);
  void group_left(Instant now, const HubEvent& event);
  void report_unreachable(std::span<const std::uint32_t> members, std::uint32_t of, const Unreachable& found);
  std::shared_ptr<GroupClosed> ask_to_close(ClosingGroup closing);
  void start_closing(Instant now, const ClosingGroup& closing);
  void end_group(Instant now, GroupId group, const GroupEnd& end);
  void end_closing();

  ProgressOptions options_;
  const Config& config_;
  const std::vector<Lane*> lanes_;  ///< Driven with everything else.
  const bool watches_network_;      ///< Others may want something of this process though nothing is pending.
  std::shared_ptr<DriverSeat> seat_;

  // Only the thread in the seat; the pointers are the same from the start on, but for messages_.
  PoliteWait wait_;
  AdaptiveSpin spin_;
  RuntimeStats counters_;
  std::unique_ptr<HostExchange> host_;       ///< Null where this host has no other ranks.
  std::unique_ptr<ServerExchange> servers_;  ///< Null where there are no lanes.
  std::unique_ptr<Messages> messages_;       ///< Null when everything has failed.
  std::unique_ptr<PendingOperations> operations_;
  std::vector<ClosingGroup> closing_;     ///< Left, with something still under way.
  std::vector<OpKey> ended_collectives_;  ///< Made of messages.
  std::set<std::uint32_t> left_;          ///< Workers that are gone.
  Instant next_look_{};                   ///< For what is stuck.
  bool hub_lost_ = false;
  bool is_broken_ = false;   ///< An exception stopped it: it only refuses.
  bool has_unsent_ = false;  ///< Counted in pending_.

  std::atomic<bool> stop_{false};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> has_failed_{false};  ///< failure() has something to say.
  std::atomic<std::uint64_t> pending_{0};
  std::atomic<bool> is_needed_later_{false};  ///< ServerExchange::is_needed()
  std::atomic<int> drainers_{0};
  int wake_fd_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable drained_;
  bool is_driven_ = false;  // guarded by mutex_, as all below
  Commands commands_;
  Status requested_failure_;
  Status failure_;
  RuntimeStats stats_;
  std::vector<PeerTraffic> traffic_;
  std::thread thread_;
};

}  // namespace herring::runtime
