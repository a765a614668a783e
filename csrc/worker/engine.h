#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/operation.h"
#include "core/roster.h"
#include "core/status.h"
#include "core/types.h"
#include "fusion_buffer/shard_plan.h"
#include "wire/action.h"
#include "wire/header.h"

namespace herring::worker {

struct EngineConfig {
  PeerId self;  ///< This worker's endpoint id.
  std::uint64_t job_id = 0;
  Epoch epoch;
  std::vector<PeerId> lanes;         ///< Endpoint of each lane, in plan order.
  std::vector<double> lane_weights;  ///< Same length; ShardPlanInput::weights.
  std::vector<PeerId> near_lanes;    ///< In this process: pushes may be lent to them, and Results come in their place.
  /// Where each rank of a host serves a lane, the ranks with the same number on all hosts form a rail: what a host has
  /// for a lane of rail r is owned by its owners r, r + rails, ... Of one rail: by all of them. At most 64; not with
  /// failover.
  std::uint32_t rails = 1;
  std::vector<std::uint32_t> lane_rails;  ///< As `lanes`; may be empty where there is one rail.
  std::uint32_t chunk_bytes = 0;          ///< A multiple of 64.
  std::uint32_t max_eager_bytes = 0;      ///< Shards up to this travel inside the announce.
  std::uint32_t eager_window = 0;  ///< Eager announces to one lane that may be unfinished; past it, announce + grant.
  std::uint32_t announce_credits = 0;  ///< As the lanes' EngineConfig::announce_credits; 0: no limit.
  std::uint64_t min_shard_bytes = 0;   ///< ShardPlanInput::min_shard_bytes
  Duration lane_grace{};               ///< After an operation's own time-out, how long to wait for a lane's verdict.
  /// The endpoint finds a payload that was changed after its post (HERRING_CHECKSUM): the Result may then be received
  /// into memory that is still being pushed. Else it is received when the push is over.
  bool sealed_sends = false;
  /// A lane's death costs no operation while another lives (docs/adr/0005-server-failover.md). As the lanes'
  /// EngineConfig::failover. Keys must then never be used twice.
  bool failover = false;
  /// Failover only: where Results land, bounce_bytes() of it, for the life of the engine and of what it posted.
  std::span<std::byte> bounce;
  std::vector<std::uint32_t> lane_slots;  ///< Failover only: chunks from each lane that may be landing, at least 1.
  std::uint32_t retain_part_bytes = 64u << 10;  ///< Parts up to this size end before all others have the result ...
  std::uint64_t retain_bytes = 4u << 20;        ///< ... and of those that have, copies of so many bytes are kept.
};

/// Operation::pusher where every rank is a contributor of its own: the contributor with the number descriptor.root.
inline constexpr std::uint32_t kPusherIsRoot = 0xFFFF'FFFF;

/// Operation::rails where all lanes take part.
inline constexpr std::uint64_t kEveryRail = ~std::uint64_t{0};

/// One part of one operation, for the network hops. `memory` is both source and destination, borrowed until its
/// CompleteAction.
struct Operation {
  OpKey key;
  OpDescriptor descriptor;
  std::span<std::byte> memory;  ///< descriptor.part_bytes bytes.
  /// The host cannot touch `memory`, nor `results`: nothing of it is copied, and it travels apart from headers.
  bool is_on_device = false;
  /// On a device, with failover: as large as `memory`, which stays the input to the end; Results land here. Else empty.
  std::span<std::byte> results = {};
  std::uint32_t contributor = 0;  ///< wire::Announce, same names.
  std::uint32_t contributor_count = 1;
  std::uint32_t first_rank = 0;
  std::uint32_t rank_count = 1;
  std::uint32_t rank_stride = 1;
  std::uint64_t rank_mask = 0;
  std::uint32_t average_over = 1;
  std::uint32_t pusher = kPusherIsRoot;  ///< kBroadcast, kAllGather: the contributor that stands for descriptor.root.
  std::uint32_t owner = 0;           ///< Several processes may share a contributor (the ranks of one host): this one
  std::uint32_t owner_count = 1;     ///< pushes and pulls a run of chunks of each shard whose lane's rail it is on.
  std::uint64_t rails = kEveryRail;  ///< The lanes that take part: those of rail i where bit i is set. There is one.
  /// Up to this size it goes in one hop (docs/adr/0027-one-hop.md): each host's lane gets all of it, and answers inside
  /// its host alone. 0: never, as with failover. Takes contributors that are the hosts of a rail's lanes, one each, and
  /// as owner r of a host the process that the host's lane of rail r is in. Beyond max_eager_bytes, no other owners.
  std::uint64_t one_hop_bytes = 0;
  Duration timeout{};
  /// Backup workers: no data; ends when it is decided who is in the operation (CompleteAction::roster). Goes before all
  /// parts, with part 0's key, no memory and part_bytes 0.
  bool is_join = false;
  Roster roster = {};  ///< What the join said; whoever is not in gets the result alone. Empty: everybody is.
};

struct EngineStats {
  std::uint64_t ops_completed = 0;
  std::uint64_t ops_failed = 0;
  std::uint64_t bytes_sent = 0;      ///< Payload.
  std::uint64_t bytes_received = 0;  ///< Payload.
  std::uint64_t messages_rejected = 0;
  std::uint64_t items_moved = 0;     ///< Announced to an heir of a lost lane.
  std::uint64_t bytes_retained = 0;  ///< Copies of results kept at present.
  std::uint64_t copied = 0;          ///< Chunks of operations in one hop that were sent from a copy.
  std::uint64_t announces = 0;       ///< That all others of the operation followed, or preceded ...
  std::uint64_t came_last = 0;       ///< ... and nobody followed.
  std::uint64_t late_us = 0;         ///< Microseconds that they came after the first, over all.
};

/// Bytes of EngineConfig::bounce that this configuration wants; 0 without failover.
std::uint64_t bounce_bytes(const EngineConfig& config);

/// By owner of a contributor: the bytes of a part that it pushes and pulls. What a host's ranks divide their local
/// reduction by. Who asks need not be the operation's owner, nor have its memory.
std::vector<std::vector<ByteRange>> owned_ranges(const EngineConfig& config, const Operation& operation);

/// The worker's side of the two hops, as a pure state machine: (event, now) -> actions. Any number of operations may be
/// in flight, submitted in any order on each worker.
class Engine final {
 public:
  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Starts an operation. Ends in exactly one CompleteAction, also on error. A key in use completes with
  /// kInvalidArgument.
  void submit(Instant now, const Operation& operation);
  /// Gives an operation up (its owner knows that it failed: a mismatch inside the host, a user's abort): tells the
  /// lanes, which tell the other contributors `why`. Unknown keys are told too, to one lane: others may wait for this
  /// worker.
  void abort(Instant now, const Operation& operation, const Status& why);

  void on_control(Instant now, const wire::Header& header, std::span<const std::byte> body);
  void on_received(Instant now, Token token, const Status& status, const wire::Header& header);
  void on_sent(Instant now, Token token, const Status& status);
  void on_withdrawn(Instant now, Token token);
  /// Lane or worker gone: operations that need it fail with kPeerLost (`why` names it). With failover and another lane
  /// alive, a lane's work moves instead; every worker must hear of lost lanes in the same order. Remove the peer from
  /// the endpoint first: what is being sent to it is not waited for.
  void on_peer_lost(Instant now, PeerId peer, const std::string& why);
  void on_tick(Instant now);
  Instant next_deadline() const;

  void take_actions(Actions& out);
  bool is_idle() const;
  /// Something is awaited from lanes: whether the links to them work matters.
  bool is_waiting() const { return has_operations() || is_needed(); }
  /// Adds the lanes that something is awaited from.
  void add_awaited(std::vector<PeerId>& lanes) const;
  /// Operations that have not ended, or that others may still need the result of.
  bool has_operations() const;
  /// Others may still need what it has of operations that have ended: a result, or an announce that is on its way.
  bool is_needed() const;
  const EngineStats& stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::worker
