#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "wire/action.h"
#include "wire/header.h"

namespace herring::server {

struct EngineConfig {
  PeerId self;  ///< This lane's endpoint id.
  std::uint64_t job_id = 0;
  Epoch epoch;
  std::vector<wire::RankSpan> hosts;         ///< Ranks by contributor where the whole job's contributors are hosts, for
                                             ///< messages to people before they have met. May be empty.
  std::uint32_t workers = 0;                 ///< Peers 0 .. workers-1 may talk to this lane.
  std::uint32_t max_chunk_bytes = 0;         ///< Larger chunks are refused.
  std::uint32_t window = 0;                  ///< Chunks of one contributor that may be granted at once, at first
  std::uint32_t max_window = 0;              ///< and at most, where they go quickly (adaptive_window.h). 0: as window.
  bool are_lanes_apart = false;              ///< No lane of the job is inside a worker.
  std::uint32_t max_run = 1;                 ///< Chunks in one message at most: a power of two, up to wire::kMaxRun
                                             ///< and, with failover, to the workers' EngineConfig::lane_slots.
  Duration run_time{};                       ///< About so long a message of several chunks takes (adaptive_run.h).
  std::uint32_t max_ops_per_worker = 65536;  ///< Announced and not finished; one more is an error to that worker.
  std::uint64_t record_bytes = 0;            ///< For records of operations, unfinished and failed; 0: no limit. Past it
                                             ///< each worker has its share (record_bound()).
  std::uint32_t max_eager_bytes = 0;         ///< Largest eager payload of one announce.
  std::uint32_t announce_credits = 0;  ///< Announces one worker may have sent that this lane has not yet credited back.
                                       ///< 0: no limit, no Credit messages.
  std::uint32_t eager_window = 4096;   ///< Unfinished eager announces of one worker, at most; bounds the lane's heap to
                                       ///< workers * eager_window * max_eager_bytes.
  bool failover = false;               ///< As the workers' EngineConfig::failover (docs/adr/0005-server-failover.md).
  bool check_finite = false;           ///< NaN and infinity in what is to be reduced fail the operation (kNotFinite).
  /// Of a worker in this process that lends what it pushes and expects the sum of an all-reduce in its place.
  std::optional<PeerId> near_worker;
  std::uint32_t min_loan_bytes = 16 << 10;  ///< Smaller pushes are not lent: transports copy what is small.
  std::uint32_t backup_workers =
      0;  ///< So many of an operation's contributors need not be waited for; 0: off. Never with failover.
  Duration backup_grace{};                             ///< How long they are, once the others have joined.
  std::uint64_t backup_bytes = 0;                      ///< Results kept for them, at most, and what they may be owed.
  std::uint32_t lanes = 1;                             ///< Of the plan: what they are owed is spread over them.
  Duration stall_warning = Duration::max();            ///< An operation that waits for so long is worth a warning.
  Duration mismatch_grace = std::chrono::seconds(2);   ///< How long a disagreement waits for the others to say theirs.
  Duration drain_grace = std::chrono::seconds(5);      ///< How long a failed operation waits for pushes on their way.
  Duration min_tombstone = std::chrono::seconds(60);   ///< How long a failure is remembered for those who announce
  Duration max_tombstone = std::chrono::seconds(600);  ///< late: the operation's time-out, within these limits,
  std::size_t max_tombstones = 4096;                   ///< and at most so many of them.
};

/// What EngineConfig::record_bytes comes to at most.
constexpr std::uint64_t record_bound(std::uint64_t record_bytes) { return 2 * record_bytes; }

/// Counters; read by the owner of the lane, exact at any time between calls.
struct EngineStats {
  std::uint64_t ops_completed = 0;
  std::uint64_t ops_failed = 0;
  std::uint64_t bytes_received = 0;  ///< Payload, pushes and eager announces.
  std::uint64_t bytes_sent = 0;      ///< Payload of results.
  std::uint64_t messages_rejected = 0;
  std::uint64_t over_credit = 0;  ///< Of those: announces and cancels beyond what their worker had credits for,
  PeerId over_credit_by;          ///< and whose the last one was.
  std::uint64_t slots_in_use = 0;
  std::uint64_t slots_peak = 0;
  std::uint64_t lent = 0;           ///< Pushes that were summed where they lay (EngineConfig::near_worker).
  std::uint64_t one_hop = 0;        ///< Operations whose result only the worker in this process got from here.
  std::uint64_t looks = 0;          ///< Contributors that were looked at to find what could be granted.
  std::uint64_t runs = 0;           ///< Several chunks that were summed together (EngineConfig::max_run).
  std::uint64_t unsettled = 0;      ///< Failover: operations finished here that not everybody has all of yet.
  std::uint64_t chunks_copied = 0;  ///< Failover: results taken from one who had them instead of being summed.
  std::uint64_t dropped = 0;        ///< Backup workers: contributions that an operation was decided without ...
  std::uint64_t kept_bytes = 0;     ///< ... memory taken for results that they have not come for ...
  std::uint64_t kept_peak = 0;      ///< ... and the most that it was.
  std::uint64_t record_bytes = 0;   ///< Records of operations (EngineConfig::record_bytes) ...
  std::uint64_t record_peak = 0;    ///< ... and the most that they were.
};

/// How late a worker's announces came after the first of their operation, over operations that all have announced.
struct Lateness {
  std::uint64_t announces = 0;
  std::uint64_t last = 0;  ///< Of those: nobody came later.
  Duration total{};
};

/// "rank 3 came last in 92 % of 1200 operations, on average 12.3 ms after the first": of the worker that came last most
/// often since `before`, which has as many entries. Empty where there was no operation of several workers, or nobody
/// came last in more than its fair share and half a millisecond late on average.
std::string straggler_text(std::span<const Lateness> now, std::span<const Lateness> before);

/// One lane as a pure state machine: (event, now) -> actions. Owns no thread, clock, socket; never blocks. `slots` is
/// the only memory it receives chunks into: slots.size() / max_chunk_bytes slots, at least one for each worker.
///
/// Protocol (docs/wire.md): operations are matched by key. When all contributors have announced an operation it becomes
/// ready; ready operations are granted in order of readiness, chunk by chunk, as slots are free, so bounded memory
/// cannot deadlock whatever order workers announce in. A chunk is reduced when all its pushers' data is there and sent
/// to all its pullers at once. Contributors that disagree each get an Error that says who said what.
///
/// What the messages carry beyond docs/wire.md's table, so that nothing is sent that finds no receive, also on failure:
/// - Announce: offset = its number among this worker's announces to this lane, from 0; count = how many processes of
/// its
///   contributor announce to this lane.
/// - Grant: offset = the announce's tag. Error: tag = the announce's tag, count = how many Results were sent for it
///   (0xFFFFFFFF: all).
/// - Cancel: tag, offset = the announce's; count = how many Pushes were sent for it; chunk = 1 where this lane's Error
/// has
///   come already, else the lane answers with one. tag 0, for an operation not announced here: chunk = contributor,
///   offset = contributor_count, count = announcers.
/// - Result with kFlagInPlace: to EngineConfig::near_worker, the sum lies where its push lay.
/// - Bodies of Error and Cancel: one byte of Code, then the text, at most 1024 bytes.
class Engine final {
 public:
  Engine(const EngineConfig& config, std::span<std::byte> slots);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// A message that arrived on kControlTag, header already decoded. `body` is borrowed for the call; where true comes
  /// back, until ReleaseAction{token}: data that came with an announce is summed where it lies, and sums may go there.
  bool on_control(Instant now, const wire::Header& header, std::span<std::byte> body, Token token);
  /// A posted receive finished. Not ok, or a header that does not belong there: the engine rejects it and posts again.
  /// `loan`: where it was posted as one, what lies in its place.
  void on_received(Instant now, Token token, const Status& status, const wire::Header& header,
                   const std::shared_ptr<Loan>& loan = nullptr);
  /// A ReduceAction has ended; `found`: where it was to check, the inputs that are not finite.
  void on_reduced(Instant now, Token token, std::span<const NotFiniteInput> found);
  void on_sent(Instant now, Token token, const Status& status);
  void on_withdrawn(Instant now, Token token);
  /// A worker is gone: operations that need it fail with kPeerLost naming it (`why`); its messages are ignored from now
  /// on.
  void on_peer_lost(Instant now, PeerId worker, const std::string& why);
  /// A worker has done all that it will: it has nothing more to announce, not even what a lost lane had of it. What it
  /// has ended well is announced by all; what still waits for it fails with kPeerLost and `why`.
  void on_peer_left(Instant now, PeerId worker, const std::string& why);
  /// Fails operations past their deadline. Call at or after next_deadline().
  void on_tick(Instant now);
  Instant next_deadline() const;  ///< Instant::max() where nothing waits.
  /// Of the time in which this lane had work, its thread has waited for a processor core for this part, 0 to 1.
  void on_core_wait(double share);
  /// Of an operation that has waited for EngineConfig::stall_warning, which ranks it waits for: once for each
  /// operation, and one of them in that time. Empty: nothing new, or another lane says it.
  std::string take_warning();

  /// Moves the actions asked for since the last call to the end of `out`.
  void take_actions(Actions& out);
  /// True where no operation is known and no send or receive is outstanding.
  bool is_idle() const;
  /// As is_idle(), but for operations that wait for an announce of the worker in this process: until that comes, nobody
  /// waits for this lane.
  bool is_quiet() const;
  const EngineStats& stats() const;
  /// By worker, since the start. Operations of one worker do not count.
  const std::vector<Lateness>& lateness() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::server
