#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "control/frame.h"
#include "control/heartbeats.h"
#include "control/hub.h"
#include "control/protocol.h"
#include "core/types.h"

/// What the hub decides, without a socket, a clock or a thread: (event, now) -> actions. docs/wire-control.md, "Life of
/// a job". The caller carries out the actions in their order.
namespace herring::control {

/// "waiting for worker 3 and servers 0-2; 6 of 10 are here". `here` is by index. `verb`: "are here".
std::string waiting_text(const std::vector<bool>& here, std::uint32_t workers, std::string_view verb);

class Membership final {
 public:
  struct Options {
    std::uint32_t workers = 1;
    std::uint32_t servers = 0;
    Duration heartbeat = std::chrono::seconds(1);
    Duration dead_after = std::chrono::seconds(5);
    std::uint64_t job_id = 0;
    std::optional<Member> lead = {};  ///< As HubOptions.lead, doubt_for and start_delay, from `opened` on.
    Duration doubt_for = {};
    Duration start_delay = {};
    Instant opened = {};
  };
  struct Action {
    enum class Kind : std::uint8_t {
      kSend,   ///< `type` and `body` to the connection.
      kClose,  ///< Close it when what was sent is out. No disconnected() is expected any more.
    };
    Kind kind = Kind::kSend;
    ConnectionId connection = 0;
    FrameType type = FrameType::kPing;
    SharedBody body;
  };
  struct Counters {
    std::uint64_t joined = 0;
    std::uint64_t refused = 0;
    std::uint64_t lost = 0;             ///< Connections of members that ended without a goodbye, before the start too.
    std::uint64_t protocol_errors = 0;  ///< Members dropped for what they sent.
    std::uint64_t exchanges = 0;        ///< Completed rounds.
  };
  static constexpr std::size_t kMaxOpenRounds = 4096;
  /// Servers that are gone are not waited for in this round: their blobs are empty.
  static constexpr std::string_view kGoodbyeRound = "goodbye";
  /// Workers that have been in it for so long (in a large job: for 1 ms for each worker) are announced to those who
  /// have not come: at the end of a job all come within less, and nobody need be told.
  static constexpr Duration kGoodbyePatience = std::chrono::milliseconds(100);

  explicit Membership(const Options& options);

  /// An authenticated process asks for its place. Answered with Welcome, or Refuse and a close.
  void join(ConnectionId connection, const Join& join, Instant now);
  /// An authenticated frame of a member.
  void receive(ConnectionId connection, const Frame& frame, Instant now);
  /// A sign of life that is no whole frame: bytes that came, or that a full connection took.
  void alive(ConnectionId connection, Instant now) { heartbeats_.heard(connection, now); }
  /// The connection ended by itself, or its bytes were not frames (`reason` says so).
  void disconnected(ConnectionId connection, const std::string& reason, Instant now);
  /// Sends what is due and finds who is silent. Call it when next_wakeup() has come; earlier does no harm. Deliver what
  /// was received first.
  void tick(Instant now);
  /// Instant::max() where nothing is due.
  Instant next_wakeup() const;
  /// The hub goes: says so to everybody and closes.
  void close();
  /// It is known elsewhere that this process, which has not joined, is lost: `why` names it. Nothing after the start.
  void never_comes(Role role, std::uint32_t rank, const std::string& why);
  /// Handshakes that ended because the secret differed; named in the texts about who is missing.
  void note_failed_handshake() { ++failed_handshakes_; }

  bool is_member(ConnectionId connection) const { return index_of_.contains(connection); }
  bool started() const { return started_; }
  std::size_t connected() const { return index_of_.size(); }
  const Counters& counters() const { return counters_; }
  /// Hands over what is to be done.
  std::vector<Action> take_actions();

 private:
  enum class State : std::uint8_t { kAbsent, kHere, kLost, kLeft, kFailed };
  struct Slot {
    Member member;
    State state = State::kAbsent;
    ConnectionId connection = 0;
    Instant heard{};       // When last, for who is not connected any more.
    std::string lost;      // Why it is absent again, before the start.
    Instant back_until{};  // By then another process has to take its place.
    bool gave_up = false;  // It left before the start, because it waited for others as well.
  };
  struct Round {
    std::vector<std::vector<std::byte>> blobs;
    std::vector<bool> brought;
    std::vector<bool> wants;  // Its blobs, too.
    std::size_t count = 0;    // So many have brought theirs.
  };

  bool fits(
      const control::Join& join) const;  ///< Of this job's sizes; a server may leave the workers' number to the hub.
  std::optional<Refuse> reason_to_refuse(const Join& join) const;
  std::optional<Refuse> other_launch(const Member& newcomer) const;
  std::optional<Member> rival_of(const Join& join) const;
  std::string two_jobs_text(const Member& newcomer, const Member& rival, Instant now) const;
  void end_in_doubt(const std::string& text);
  bool is_over() const;
  void start_when_complete(Instant now);
  void find_lost_before_start(Instant now);
  void watch_silence(Instant now);
  void exchange(std::size_t index, const Exchange& exchange, Instant now);
  Duration goodbye_patience() const;
  void tell_finished(Instant now);
  void complete(const std::string& name, const Round& round);
  bool is_needed(std::size_t index, const std::string& name) const;
  bool is_complete(const std::string& name, const Round& round) const;
  void fail_rounds_without(std::size_t gone);
  void answer_query(std::size_t index, const std::string& name);
  void judge_links(std::size_t index, const Unreachable& unreachable);
  void drop_for_link(std::size_t index, const std::string& reason);
  void violation(std::size_t index, const std::string& what);
  void tell_others(std::size_t index, const Event& event);
  void gone(std::size_t index, State state, HubEvent::Kind kind, const std::string& reason);
  void send(ConnectionId connection, FrameType type, SharedBody body);
  void send_all(FrameType type, const SharedBody& body);
  void close_connection(Slot& slot);
  void unwatch(Slot& slot);
  std::size_t index_of(const Member& member) const;
  std::string gone_text(std::size_t index) const;

  Options options_;
  std::vector<Slot> slots_;  // Workers by rank, then servers by rank.
  std::unordered_map<ConnectionId, std::size_t> index_of_;
  std::map<std::string, Round> rounds_;
  std::vector<Action> actions_;
  std::size_t gone_count_ = 0;                    // Since the start.
  std::optional<std::size_t> first_gone_;         // Of all, and
  std::optional<std::size_t> first_needed_gone_;  // of those that every round needs.
  std::string first_gone_reason_;
  std::string start_failure_;  // Why the job will never start.
  std::string doubt_;          // Another job's process came: why this one has ended.
  bool started_ = false;
  bool closing_ = false;
  bool has_parted_ = false;  // All have said goodbye.
  std::uint64_t ping_serial_ = 0;
  std::uint64_t failed_handshakes_ = 0;
  Heartbeats heartbeats_;
  Instant next_return_ = Instant::max();  // No place that was lost before the start has to be taken again before.
  std::vector<std::uint32_t> finished_;   // Workers that wait in the goodbye round, not announced.
  Instant next_finished_ = Instant::max();
  Counters counters_;
};

}  // namespace herring::control
