#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "wire/reason.h"
#include "worker/engine.h"

/// The worker engine's inside, shared by the files that implement it. Nobody else includes this.
namespace herring::worker {

/// One lane's share of an operation.
struct LanePart {
  std::uint32_t lane = 0;  // Index into EngineConfig::lanes.
  ByteRange shard;
  std::uint32_t chunks = 0;
  IndexRange owned;              // Chunks that this process pushes and pulls.
  std::uint32_t announcers = 1;  // Processes of its contributor that announce to this lane.
  bool is_home = false;
  bool is_announced = false;  // Else it waits for an announce credit.
  bool is_eager = false;
  bool is_done = false;                 // Nothing of it is in flight towards this process any more.
  std::uint64_t tag = 0;                // Of the Result of chunk 0; names this announce.
  std::uint64_t sequence = 0;           // Of the announce among those to this lane.
  std::uint32_t received = 0;           // Results that came.
  std::uint32_t pushed = 0;             // Pushes sent.
  bool has_error = false;               // The lane's Error came ...
  std::uint32_t results_sent = 0;       // ... which says how many Results it sent.
  std::vector<std::uint64_t> receives;  // Tokens, by owned chunk (one without payload where none is owned); 0: over.
  std::vector<bool> is_pushed;          // By owned chunk.

  std::uint32_t expected() const { return std::max(owned.count, 1u); }
};

/// Running -> (all Results came) -> complete; or Running -> failed: Cancels sent, waits until no Result can be on its
/// way any more, gives the receives back -> complete with the first error.
struct Op {
  std::uint64_t id = 0;
  Operation operation;
  std::vector<LanePart> parts;      // Never resized after submit().
  std::uint32_t open_parts = 0;     // Not is_done.
  std::uint32_t payload_sends = 0;  // Sends on their way that borrow the operation's memory.
  bool has_failed = false;
  Status failure;
  Instant submitted;
  Instant timer = Instant::max();

  std::uint32_t pusher() const {
    return operation.pusher == kPusherIsRoot ? operation.descriptor.root : operation.pusher;
  }
  bool has_one_pusher() const {
    return operation.descriptor.collective == Collective::kBroadcast ||
           operation.descriptor.collective == Collective::kAllGather;
  }
  bool pushes() const { return !has_one_pusher() || operation.contributor == pusher(); }
  /// A single pusher has the data already.
  bool pulls_data() const { return !has_one_pusher() || operation.contributor != pusher(); }
};

struct Lane {
  PeerId peer;
  bool lost = false;
  std::string why_lost;
  std::uint32_t credits = 0;
  std::uint32_t eager = 0;  // Unfinished eager announces.
  std::uint64_t next_sequence = 0;
  std::deque<std::pair<std::uint64_t, std::size_t>> queue;  // Parts that wait for a credit: operation id, part index.
};

struct Receive {
  std::uint64_t op = 0;
  std::size_t part = 0;
  std::uint32_t chunk = 0;
  std::uint32_t retries = 0;
};

struct Send {
  std::uint64_t op = 0;
  std::size_t part = 0;
  bool borrows = false;  // The operation's memory.
  bool matters = false;  // Its failure fails the operation.
};

/// The bytes of a part by lane, and the lane that every contributor announces to.
std::vector<ByteRange> plan_part(const EngineConfig& config, const OpKey& key, std::uint64_t part_bytes);
std::uint32_t home_lane(const EngineConfig& config, const OpKey& key);
Status check_operation(const EngineConfig& config, const Operation& operation);

class Engine::Impl {
 public:
  explicit Impl(EngineConfig config);

  // engine.cc
  void submit(Instant now, const Operation& operation);
  void take_actions(Actions& out);
  bool is_idle() const { return ops_.empty() && receives_.empty() && sends_.empty(); }
  Instant next_deadline() const { return timers_.empty() ? Instant::max() : timers_.begin()->first; }
  const EngineStats& stats() const { return stats_; }

  // engine_data.cc
  void on_control(Instant now, const wire::Header& header, std::span<const std::byte> body);
  void on_received(Instant now, Token token, const Status& status, const wire::Header& header);
  void on_sent(Instant now, Token token, const Status& status);

  // engine_failure.cc
  void abort(Instant now, const Operation& operation, const Status& why);
  void on_peer_lost(Instant now, PeerId peer, const std::string& why);
  void on_tick(Instant now);

 private:
  // engine.cc
  void make_parts(Op& op) const;
  void announce_or_queue(Op& op, std::size_t index);
  void announce(Op& op, std::size_t index);
  void post_results(Op& op, std::size_t index);
  void post(Op& op, const Receive& receive);
  wire::Header header_to(const OpKey& key, wire::MessageType type) const;
  void send(PeerId to, Tag tag, const wire::Header& header, std::vector<std::byte> body,
            std::span<const std::byte> payload, const Send& record);
  void set_timer(Op& op, Instant when);
  void finish_part(LanePart& part, Op& op);
  void complete_if_done(Op& op);
  Op* find_op(std::uint64_t id);
  Op* find_op(const OpKey& key);
  std::span<std::byte> chunk_memory(const Op& op, const LanePart& part, std::uint32_t chunk) const;

  // engine_data.cc
  bool is_from_job(const wire::Header& header) const;
  Lane* lane_of(std::uint32_t peer);
  void handle_credit(const wire::Header& header);
  void handle_grant(const wire::Header& header);
  void handle_error(Instant now, const wire::Header& header, std::span<const std::byte> body);
  LanePart* find_part(Op& op, std::uint32_t peer, std::uint64_t tag);
  void push(Op& op, LanePart& part, std::uint32_t chunk, Tag tag);

  // engine_failure.cc
  void fail(Instant now, Op& op, const Status& why);
  void give_up_part(Op& op, std::size_t index);
  void send_unannounced_cancel(const Operation& operation, const Status& why);
  void drain_part(Op& op, LanePart& part, bool force);
  std::string timeout_text(const Op& op) const;

  EngineConfig config_;
  std::vector<Lane> lanes_;
  std::unordered_map<PeerId, std::uint32_t> lane_index_;
  std::unordered_map<PeerId, std::string> lost_workers_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Op>> ops_;
  std::unordered_map<OpKey, std::uint64_t> by_key_;
  std::set<std::pair<Instant, std::uint64_t>> timers_;
  std::unordered_map<std::uint64_t, Receive> receives_;
  std::unordered_map<std::uint64_t, Send> sends_;
  std::uint64_t next_op_ = 1;
  std::uint64_t next_token_ = 1;
  std::uint64_t next_tag_ = 1;
  Actions actions_;
  EngineStats stats_;
};

}  // namespace herring::worker
