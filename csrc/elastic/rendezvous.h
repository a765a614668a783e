#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/heartbeats.h"
#include "core/types.h"
#include "elastic/message.h"

/// What the rendezvous decides, without a socket, a clock or a thread: (event, now) -> actions.
/// docs/adr/0006-elastic.md.
namespace herring::elastic {

using control::ConnectionId;

/// What a message costs does not grow with the workers, but where a generation is formed or broken, of which all hear.
///
/// Decides who is in which generation of a job. A generation is an ordinary job with a hub of its own; it ends when a
/// worker is lost, or when all workers ask for others to come in, or servers.
class Rendezvous final {
 public:
  struct Options {
    std::uint32_t workers = 1;      ///< Of the first generation.
    std::uint32_t servers = 0;      ///< Likewise.
    std::uint32_t min_workers = 1;  ///< With fewer the job ends.
    Duration heartbeat = std::chrono::seconds(1);
    Duration dead_after = std::chrono::seconds(5);
    Duration start_within = std::chrono::seconds(100);  ///< Then an elastic job begins with who is there.
  };
  struct Action {
    enum class Kind : std::uint8_t {
      kSend,       ///< `message` to the connection.
      kPing,       ///< A sign of life, to be answered.
      kClose,      ///< Close it when what was sent is out. No disconnected() is expected any more.
      kOpenHub,    ///< Of `generation`, for so many workers and servers: call hub_opened() or hub_failed() before
                   ///< anything else.
      kCloseHubs,  ///< Of all generations below `generation`.
      kCloseHub,   ///< Of that generation.
      kTellHub,    ///< Of `generation`: the process of message.role and message.rank is lost, message.text says how.
    };
    Kind kind = Kind::kSend;
    ConnectionId connection = 0;
    Message message;
    std::uint64_t generation = 0;
    std::uint32_t workers = 0;
    std::uint32_t servers = 0;
  };

  explicit Rendezvous(const Options& options) : options_(options), heartbeats_(options.heartbeat, options.dead_after) {}

  /// An authenticated message; the first of a connection is kEnter.
  void receive(ConnectionId connection, const Message& message, Instant now);
  /// A sign of life that is no message: it answered a ping, or took what it is sent.
  void heard(ConnectionId connection, Instant now);
  void disconnected(ConnectionId connection, const std::string& reason, Instant now);
  void hub_opened(std::uint64_t generation, std::uint16_t port, Instant now);
  /// There is none: out of descriptors, say. A planned switch is given up for now. Another generation is formed again a
  /// little later; the job ends only where that is in vain for a minute.
  void hub_failed(std::uint64_t generation, const std::string& reason, Instant now);
  /// Call it when next_wakeup() has come; earlier does no harm.
  void tick(Instant now);
  Instant next_wakeup() const;
  /// The rendezvous goes: says so to everybody.
  void close(const std::string& reason);
  std::vector<Action> take_actions();

  /// All workers have left, or the job cannot go on.
  bool has_ended() const { return ended_; }
  bool ended_well() const { return ended_well_; }
  std::uint64_t generation() const { return current_.number; }
  std::size_t connected() const { return members_.size(); }

 private:
  enum class State : std::uint8_t { kNew, kIn, kReady };
  struct Member {
    std::uint64_t id = 0;
    ConnectionId connection = 0;
    Message enter;
    State state = State::kNew;
    std::uint32_t rank = 0;  // In the generation it is in.
    bool at_boundary = false;
    bool is_planned = false;   // Is of the planned generation.
    bool built = false;        // Planned switch: is connected.
    bool has_drained = false;  // And has nothing under way any more in the generation before.
  };
  struct Generation {
    std::uint64_t number = 0;  // 0: none.
    std::vector<std::uint64_t> workers;
    std::vector<std::uint64_t> servers;
    bool at_boundary = false;
    bool is_planned = false;
    bool is_broken = false;
    bool has_shrunk = false;  // Somebody is lost or has left.
    std::string why;          // It was formed.
    std::string reason;       // It is broken.
    Instant formed{};
    Instant patience = Instant::max();  // Then it has to be left, or (planned) joined.
  };
  struct Tally {
    std::uint32_t complete = 0;
    std::uint32_t needed = 0;
  };
  struct HashOperation {
    std::size_t operator()(const OperationId& id) const {
      return std::hash<std::uint64_t>()(id.key * 0x9E37'79B9'7F4A'7C15ull + id.group);
    }
  };
  /// How many of a role are in which state, of those who are here.
  struct Census {
    std::uint32_t waiting = 0;  // kNew: in no generation.
    std::uint32_t inside = 0;   // Of the present generation; of these
    std::uint32_t ready = 0;    // have left it.
  };

  void enter(ConnectionId connection, const Message& message, Instant now);
  void refuse(ConnectionId connection, const std::string& text);
  std::string two_jobs_text(const Message& newcomer, const Member& rival) const;
  const Member* rival_of(const Message& newcomer) const;
  void ready(Member& member, const Message& message, Instant now);
  void broken(const Member& member, const Message& message, Instant now);
  void completed(const Message& message, Instant now);
  void tell_settled(Instant now);
  void built(Member& member, const Message& message, Instant now);
  void switched(Member& member, const Message& message);
  void answer(const Member& member);
  std::string missing_text() const;
  void leave(std::uint64_t id, std::uint64_t generation, Instant now);
  void remove(std::uint64_t id, const std::string& lost, Instant now);
  void give_up(std::uint64_t id, const std::string& reason, Instant now);
  void give_up_the_stubborn(Instant now);
  Instant next_deadline() const;
  void break_current(const std::string& reason, Instant now);
  void cancel_planned(const std::string& reason, Instant now);
  void consider(Instant now);
  void consider_start(Instant now);
  bool consider_next(Instant now);
  void consider_drained();
  void consider_planned(Instant now);
  void announce_newcomers();
  void form(Generation generation, Instant now);
  void end(bool well, const std::string& text);
  void send(const Member& member, Message message);
  Member* find(std::uint64_t id);
  std::vector<std::uint64_t> present(const std::vector<std::uint64_t>& ids) const;
  std::vector<std::uint64_t> all(control::Role role, State state) const;
  bool is_elastic() const { return fixed_workers_ == 0; }
  static bool is_inside(const Member& member) { return member.state != State::kNew; }
  Census& census(const Member& member) { return member.enter.role == control::Role::kWorker ? workers_ : servers_; }
  void count(const Member& member, int sign);
  void set_state(Member& member, State state);
  void set_drained(Member& member, bool has_drained);
  bool has_place(const Message& enter) const;
  static std::string name(const Member& member);

  const Options options_;
  std::map<std::uint64_t, Member> members_;  // By id.
  std::unordered_map<ConnectionId, std::uint64_t> id_of_;
  std::unordered_map<std::uint32_t, std::uint64_t> placed_;  // Who has the place that it was launched for, by rank.
  control::Heartbeats heartbeats_;
  Census workers_;
  Census servers_;
  std::uint32_t fixed_workers_ = 0;  // That are here and not elastic.
  std::uint32_t undrained_ = 0;      // Workers inside that have something under way before the last planned switch.
  std::uint32_t unbuilt_ = 0;        // Workers of the planned generation that are not connected.
  Generation current_;
  Generation planned_;
  std::uint64_t last_number_ = 0;
  std::uint64_t next_id_ = 1;
  std::uint64_t tally_since_ = 0;  // The generation that the tally began with.
  std::unordered_map<OperationId, Tally, HashOperation> tally_;
  std::vector<OperationId> settled_;  // Not told yet.
  Instant tell_settled_at_{};
  std::vector<Action> actions_;
  std::string last_reason_;
  std::string lost_server_;      // The last one: how.
  std::uint32_t fruitless_ = 0;  // Generations in a row that broke though nobody was lost.
  std::uint32_t announced_ = 0;
  bool elastic_ = false;  // All workers of the first generation are.
  bool ended_ = false;
  bool ended_well_ = false;
  bool has_drained_ = true;  // All workers, since the last planned switch.
  bool lost_any_ = false;    // Workers.
  bool left_any_ = false;    // Who said goodbye.
  Instant start_deadline_ = Instant::max();
  /// What was before the present generation was formed, for the case that it gets no hub.
  struct Before {
    Generation current;
    std::uint64_t tally_since = 0;
    std::uint32_t fruitless = 0;
    Instant start_deadline = Instant::max();
  };
  Before before_;
  std::optional<Instant> form_again_;     // It got none: nothing is formed until then.
  std::optional<Instant> failing_since_;  // No hub could be opened since.
  Instant plan_after_{};
  Instant considered_{};
};

}  // namespace herring::elastic
