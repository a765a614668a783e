#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/slot_pool.h"
#include "server/adaptive_run.h"
#include "server/adaptive_window.h"
#include "server/engine.h"
#include "server/op.h"
#include "wire/reason.h"

/// The server engine's inside, shared by the files that implement it. Nobody else includes this.
namespace herring::server {

class Engine::Impl {
 public:
  Impl(const EngineConfig& config, std::span<std::byte> slots);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // engine.cc
  bool on_control(Instant now, const wire::Header& header, std::span<std::byte> body, Token token);
  void on_received(Instant now, Token token, const Status& status, const wire::Header& header,
                   const std::shared_ptr<Loan>& loan);
  void on_reduced(Instant now, Token token, std::span<const NotFiniteInput> found);
  void on_sent(Instant now, Token token, const Status& status);
  void on_tick(Instant now);
  void on_core_wait(double share) {
    window_.on_core_wait(share);
    run_.on_core_wait(share);
  }
  Instant next_deadline() const;
  void take_actions(Actions& out);
  bool is_quiet() const;
  bool is_idle() const { return undrained_ == 0 && receives_.empty() && sends_.empty() && reducing_.empty(); }
  const EngineStats& stats() const { return stats_; }
  const std::vector<Lateness>& lateness() const { return lateness_; }
  std::string take_warning() { return std::exchange(warning_, {}); }

  // engine_failure.cc
  void on_withdrawn(Instant now, Token token);
  void on_peer_lost(Instant now, PeerId worker, const std::string& why);
  void on_peer_left(Instant now, PeerId worker, const std::string& why);

 private:
  class GrantPlan;  // grant_plan.h
  class Delivery;   // delivery.h
  class PlainDelivery;
  class RecoverableDelivery;

  // engine.cc
  bool is_from_job(const wire::Header& header) const;
  void follow_up(Instant now);
  bool has_first(const Op& op) const;
  void note_stall(Instant now, Op& op);
  void set_timer(Op& op, Instant when);
  Op& create_op(const Key& key, Instant now);
  void erase_op(std::uint64_t id);
  void drop_eager_data(Op& op);
  Op* find_op(std::uint64_t id);
  Op* find_live(const Key& key);
  void end_live(const Op& op);
  wire::Header header_to(const Key& key, wire::MessageType type) const;
  void send(PeerId to, Tag tag, const wire::Header& header, std::vector<std::byte> body,
            std::span<const std::byte> payload, const Send& record);
  void send_error(PeerId to, const Key& key, std::uint64_t tag, std::uint32_t results, const Status& status,
                  bool is_answer = false);

  // engine_announce.cc
  void handle_announce(Instant now, Arrival& arrival);
  bool take_sequence(WorkerState& worker, std::uint64_t sequence);
  bool may_announce(const WorkerState& worker, PeerId peer, std::uint64_t sequence);
  void credit(PeerId peer, WorkerState& worker, bool is_due = false);
  bool is_one_way(const wire::Header& header) const;
  void note_one_way_over(Instant now, PeerId peer);
  void retire_one_way(Instant now, Op& op);
  void defer(Op& op, Arrival& arrival);
  static bool has_deferred(const Op& op, PeerId peer);
  void undefer(const Deferred& deferred);
  void process_announce(Instant now, Arrival& arrival);
  Op& open_op(Instant now, const wire::Header& header, const wire::Announce& announce, const Roster& roster);
  void keep_data(Op& op, Participant& participant, Arrival& arrival, std::size_t bytes);
  Status check_announce(const wire::Header& header, const wire::Announce& announce,
                        std::span<const std::byte> data) const;
  bool join_tombstone(Instant now, const wire::Header& header, const wire::Announce& announce);
  Status check_place(const Op& op, const wire::Header& header, const wire::Announce& announce) const;
  bool agrees(const Op& op, const wire::Header& header, const wire::Announce& announce, const Roster& roster) const;
  Participant& add_participant(Op& op, const wire::Header& header, const wire::Announce& announce);
  void place_participant(Op& op, std::uint32_t index);
  void after_announce(Instant now, Op& op);
  void count_lateness(const Op& op, Participant& participant);
  void note_lateness(Op& op);
  void make_ready(Instant now, Op& op);

  // engine_records.cc
  std::uint64_t record_bytes_of(std::uint32_t contributors, bool is_first) const;
  void charge(Op& op, Participant& participant);
  void add_records(PeerId peer, std::uint64_t bytes);
  void drop_records(PeerId peer, std::uint64_t bytes);
  bool has_room_for_records(PeerId peer, std::uint64_t bytes);
  Status check_records(const wire::Header& header, const wire::Announce& announce, std::span<const std::byte> body);
  bool forget_oldest_failure();

  // engine_grant.cc
  enum class Grant : std::uint8_t { kAll, kNoSlots, kNoWindow };
  void line_up(const Op& op);
  void schedule(Instant now);
  std::size_t looks_at(GroupId group);
  Grant grant_chunks(Instant now, Op& op);
  void grant_chunk(Instant now, Op& op, std::uint32_t number, std::uint32_t count, std::uint32_t order);
  void give_slot(Op& op, std::uint32_t index, std::uint32_t number, std::uint32_t input, std::uint32_t bytes);
  void post(Op& op, Receive receive, std::span<std::byte> memory);
  void tell(Op& op, Participant& participant, std::uint32_t chunk, std::uint32_t run, bool pulls);
  void send_grants(Op& op);
  void send_grant(Op& op, Participant& participant);

  // engine_results.cc
  void finish_chunk(Instant now, Op& op, std::uint32_t number);
  void reduce_chunk(const Op& op, Chunk& chunk, std::uint32_t number);
  Status not_finite(const Op& op, std::uint32_t number, std::span<const NotFiniteInput> found) const;
  void send_results(Instant now, Op& op, std::uint32_t number);
  void send_result(Op& op, Participant& participant, std::uint32_t chunk, std::span<const std::byte> payload,
                   std::uint16_t flag = wire::kFlagNoPayload);
  void finish_op(Instant now, Op& op);
  void retire(Participant& participant);
  void release_slots(const Chunk& chunk, Input& input);

  // engine_failure.cc
  void fail(Instant now, Op& op, const Status& why);
  void handle_cancel(Instant now, const wire::Header& header, std::span<const std::byte> body);
  void answer_cancels(PeerId peer, WorkerState& worker);
  void give_up_unannounced(Instant now, const wire::Header& header, const Status& why);
  void drain(Instant now, Op& op, bool force);
  void drain_chunk(Op& op, Chunk& chunk, bool force);
  void bury(Instant now, Op& op);
  bool may_forget(const Op& op) const;
  bool needs(const Op& op, PeerId peer) const;
  bool waits_in_vain(const Op& op, PeerId left) const;
  Op* find_failed(const Key& key, PeerId peer, std::uint64_t tag);

  // engine_roster.cc
  Status take_roster(const wire::Header& header, const wire::Announce& announce, std::span<const std::byte>& rest,
                     Roster& roster) const;
  void after_rostered(Instant now, Op& op);
  void try_to_decide(Instant now, Op& op);
  void decide(Instant now, Op& op);
  void send_roster(Op& op, Participant& participant);
  void note_late_join(Op& op, Participant& participant);
  void serve_late(Instant now, Op& op, Participant& participant);
  void send_kept(Op& op, Participant& participant, std::uint32_t chunk);
  void keep(Op& op, std::uint32_t number, std::span<const std::byte> output);
  bool take_room(Op& op);
  void give_back_room(Op& op);
  void look_for_room();
  bool are_missing_behind(const Op& op) const;
  void note_missing(const Op& op);
  void note_came(const Op& op, std::uint32_t contributor);
  void forget_missing(const Op& op);

  // engine_text.cc
  std::string mismatch_text(const Op& op) const;
  std::string late_mismatch_text(const Op& op, const wire::Header& header, const wire::Announce& announce) const;
  std::string timeout_text(const Op& op) const;
  void keep_time(Instant now, Op& op, const wire::Announce& announce);
  std::string stall_text(Instant now, const Op& op) const;
  std::vector<std::uint32_t> ranks_of(const Participant& participant) const;
  std::string missing_text(const Op& op) const;
  const GroupMembers* members(const Op& op) const;

  EngineConfig config_;
  std::span<std::byte> slots_;
  SlotPool pool_;
  AdaptiveWindow window_;
  AdaptiveRun run_;
  std::vector<WorkerState> workers_;
  std::unique_ptr<GrantPlan> plan_;
  std::unique_ptr<Delivery> delivery_;
  std::vector<PeerId> lost_;
  std::vector<PeerId> left_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Op>> ops_;
  std::unordered_map<Key, std::uint64_t, KeyHash> live_;
  std::unordered_map<Key, std::vector<std::uint64_t>, KeyHash> failed_;
  std::deque<std::uint64_t> failed_order_;
  std::deque<std::pair<std::uint64_t, GroupId>> ready_;  // Operation, and whose it is.
  std::vector<std::pair<GroupId, std::size_t>> looked_;  // Of the pass at hand.
  std::set<std::pair<Instant, std::uint64_t>> timers_;
  std::unordered_map<std::uint64_t, Receive> receives_;
  std::unordered_map<std::uint64_t, Send> sends_;
  std::unordered_map<GroupId, GroupMembers> groups_;
  std::vector<Lateness> lateness_;                                                       // By worker.
  std::unordered_map<std::uint64_t, std::pair<std::uint64_t, std::uint32_t>> reducing_;  // Operation, chunk.
  std::vector<std::uint64_t> roomless_;  // Operations that wait for memory to keep their results in.
  std::uint64_t owed_bytes_ = 0;
  /// By group and contributor: operations that were decided here without it and that it has not come to.
  std::map<std::pair<GroupId, std::uint32_t>, std::uint32_t> behind_;
  bool room_changed_ = false;
  std::deque<Deferred> replay_;
  std::uint64_t next_op_ = 1;
  std::uint64_t next_token_ = 1;
  std::uint64_t grants_ = 0;  // Chunks granted so far, a run as one.
  std::uint64_t next_tag_ = 1;
  Instant one_way_due_ = Instant::max();  // When WorkerState::one_way_over is told at the latest.
  std::string warning_;
  Instant next_warning_{};
  std::size_t undrained_ = 0;  // Operations that are neither over nor tombstones.
  Actions actions_;
  EngineStats stats_;
};

/// "rank 3", "ranks 0-2, 5"; sorts its argument.
std::string rank_list(std::vector<std::uint32_t> ranks);

}  // namespace herring::server
