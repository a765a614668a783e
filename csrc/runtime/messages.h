#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/config.h"
#include "core/types.h"
#include "intra_node/neighborhood.h"
#include "memory/domain.h"
#include "point_to_point/engine.h"
#include "runtime/local_endpoint.h"
#include "runtime/overdue.h"
#include "runtime/pending.h"
#include "runtime/placement.h"
#include "runtime/pump.h"
#include "runtime/runtime.h"
#include "transport/transport.h"

namespace herring::runtime {

/// The ReceiveWork behind every receive, and the Work behind every send.
class MessageWork final : public ReceiveWork {
 public:
  explicit MessageWork(std::shared_ptr<CallbackPool> callbacks) : pending_(std::move(callbacks)) {}
  /// Of its memory (OperationOrder), until it is complete. Before others have it.
  void set_lease(std::shared_ptr<void> lease) { lease_ = std::move(lease); }
  bool is_done() const override { return pending_.is_done(); }
  bool wait(Instant deadline) override { return pending_.wait(deadline); }
  Status status() const override { return pending_.status(); }
  void on_done(std::function<void(const Status&)> callback) override { pending_.on_done(std::move(callback)); }
  Received received() const override { return received_; }

  /// Once.
  void complete(const Status& status, const Received& received = {}) {
    received_ = received;
    lease_.reset();  // Whoever has waited may use the memory at once.
    pending_.complete(status);
  }

 private:
  PendingWork pending_;
  std::shared_ptr<void> lease_;
  Received received_;  // Written before, read after pending_ is done.
};

struct Group;

/// One send or receive on its way to the progress thread.
struct PendingMessage {
  GroupId group;
  std::shared_ptr<Group> owner;
  std::shared_ptr<const GroupRoute> route;
  std::optional<std::uint32_t> peer;  ///< World rank of the receiver or source; none: any of the group.
  bool is_send = false;
  std::optional<std::uint64_t> tag;
  std::span<const std::byte> data;
  std::span<std::byte> memory;
  std::optional<DataType> dtype;
  std::shared_ptr<const Composed> collective;  ///< As Send's.
  Instant deadline;
  std::shared_ptr<MessageWork> work;
};

/// What is asked for; without its peer, and what the runtime adds.
PendingMessage pending_message(const Send& message);
PendingMessage pending_message(const Receive& message);

/// A collective that is made of messages, while some of them are under way.
struct WaitingCollective {
  std::shared_ptr<const Composed> call;
  std::shared_ptr<Group> group;
  std::uint64_t tag = 0;
  std::uint32_t left = 0;  ///< Messages that have not ended.
  Instant deadline;
  Instant declare_at;  ///< From then on the others are to know that this rank waits in it.
};

/// What both ends of a link derive from the settings and the size of the job in the same way.
point_to_point::LinkConfig local_link(const Config& config, std::size_t max_ring_message_bytes);
point_to_point::LinkConfig network_link(const Config& config, std::uint32_t workers);
/// Bytes that a worker uses for messages of others before they are received, at most (docs/architecture.md, Memory).
std::uint64_t message_memory_bound(const Config& config, const Placement& placement, std::uint32_t rank);

struct MessagesOptions {
  Config config;
  const Placement* placement = nullptr;  ///< Outlives it.
  std::uint32_t rank = 0;
  std::uint64_t job_id = 0;
  std::shared_ptr<intra_node::Neighborhood> neighborhood;      ///< Null: the host's other ranks are on the network.
  std::unique_ptr<transport::Endpoint> endpoint;               ///< Null where everybody is on this host.
  std::function<void(const Unreachable&)> on_unreachable;      ///< Workers that do not answer on the network.
  std::function<void()> before_complete;                       ///< Before operations end for their callers ...
  std::function<void(bool ok)> on_complete;                    ///< ... and after each of them.
  std::function<void(const WaitingCollective&)> on_long_wait;  ///< Once for each.
  std::function<void(const OpKey&)> on_collective_end;         ///< All of its messages have ended.
};

/// Point-to-point messages on the progress thread: the engine, its endpoints and pumps.
class Messages final {
 public:
  explicit Messages(MessagesOptions options);
  ~Messages();  ///< Everything must have ended, or fail_all() been called.
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  void submit(Instant now, const PendingMessage& message);
  /// From a ring: a message whose first byte is kLocalEndpointChannel.
  void deliver(std::uint32_t local_rank, std::span<const std::byte> bytes);
  /// True where anything happened.
  bool step(Instant now);
  void tick(Instant now);
  Instant next_deadline() const;
  /// Adds the network endpoint's descriptors; false where there is something to poll already.
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline);
  void worker_left(Instant now, std::uint32_t rank, const std::string& why, bool is_gone);
  void member_left(Instant now, GroupId group, std::uint32_t rank, const std::string& why);
  void close_group(Instant now, GroupId group, const Status& why);
  bool has_pending(GroupId group) const;
  void cancel_unmatched_receives(Instant now, const Status& why);
  /// Those of a group, but for collectives'.
  void cancel_unmatched_receives(Instant now, const Status& why, GroupId group);
  /// What is left of a collective's messages ends.
  void end_collective(Instant now, const OpKey& key, const Status& why);
  /// The same for those of a group with that number or a later one.
  void end_collectives_from(Instant now, GroupId group, std::uint64_t number, const Status& why);
  /// Others wait for something that has not left this process.
  bool has_unsent() const { return engine_.has_unsent() || (local_ && local_->owes_answers()); }
  /// Something has not ended for so long after its deadline.
  bool is_stuck(Instant now, Duration patience);
  /// Closes the endpoints, then ends everything with `why`; returns how many there were. Nothing may be called after.
  std::size_t fail_all(const Status& why);
  const point_to_point::EngineStats& stats() const { return engine_.stats(); }

 private:
  using LinkPump = Pump<point_to_point::Link>;
  struct Waiting {
    std::shared_ptr<MessageWork> work;
    std::shared_ptr<const GroupRoute> route;
    memory::Hold hold;  ///< Of its memory.
    Overdue overdue;
    GroupId group;
    std::optional<std::uint64_t> collective;  ///< Its number.
  };

  point_to_point::EngineConfig engine_config() const;
  void start(Instant now, std::uint64_t handle, const PendingMessage& message, const Status& refusal);
  void refuse(Instant now, std::uint64_t handle, const PendingMessage& message, const Status& why);
  PumpLinks network_links() const;
  void add_pump(std::uint32_t link, transport::Endpoint& endpoint, std::uint32_t peers);
  bool finish_completed();
  void join_collective(Instant now, const PendingMessage& message);
  void leave_collective(const OpKey& key);
  void look_for_long_waits(Instant now);
  void copy_own();
  void flush(Instant now);

  MessagesOptions options_;
  std::vector<std::uint32_t> neighbours_;  // World ranks by local rank; empty where the network carries everything.
  std::vector<point_to_point::LinkConfig> links_;
  std::optional<std::uint32_t> local_link_;
  std::optional<std::uint32_t> network_link_;
  std::unique_ptr<LocalEndpoint> local_;
  point_to_point::Engine engine_;
  std::unordered_map<std::uint64_t, Waiting> waiting_;  // By handle.
  std::vector<std::unique_ptr<LinkPump>> pumps_;
  std::uint64_t next_handle_ = 1;
  std::unordered_map<OpKey, WaitingCollective> collectives_;
  Instant next_look_ = Instant::max();  ///< No collective is to be declared earlier.
};

}  // namespace herring::runtime
