#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/status.h"
#include "elastic/message.h"

/// Where a worker of such a job stands and what may be done there, without a thread, a lock or a clock: the product and
/// the simulation (tests/elastic/world.h) run this very class. docs/adr/0026-elastic-phases.md has the diagram.
namespace herring::elastic {

enum class Phase : std::uint8_t {
  kOutside,     ///< In no generation: the rendezvous says when the next begins.
  kJoining,     ///< Connects in the next one.
  kPlanning,    ///< Elastic: its workers tell each other what they have called, and hand on what some of them lack.
  kRunning,     ///< In its present generation.
  kConnecting,  ///< As kRunning; it connects in the generation of a planned switch as well.
  kConnected,   ///< As kRunning; it is connected there, and waits until all are.
  kSwitching,   ///< All are: they tell each other what they have called. What runs goes on, what is called waits.
  kLeaving,     ///< It ends its present generation.
  kFinishing,   ///< Shut down: it goes to no other generation, and ends its last.
  kFinished,    ///< It has ended that.
  kEnding,      ///< Nothing goes any more, end() says why; the supervisor has something in its hands still.
  kEnded,       ///< It has let go.
};
inline constexpr std::size_t kPhases = 12;

enum class Event : std::uint8_t {
  // The rendezvous says so: hear().
  kGo,      ///< To the next generation.
  kOffer,   ///< A planned switch: connect beside.
  kDrop,    ///< The planned generation will not be.
  kSwitch,  ///< All are connected in it.
  // This worker decides it.
  kLeave,     ///< Its present generation: hear(), take_turn(), fail_to_switch().
  kStepDown,  ///< The supervisor takes part in no switch any more: take_turn().
  kEnd,       ///< An abort, the loss of what cannot be missed, or the end of all: end().
  // It has been done, or could not be: advance().
  kPlan,  ///< All are connected.
  kInstall,
  kFailToJoin,
  kConnect,
  kFailToConnect,
  kSwitchOver,
  kHaveLeft,
  kFinish,  ///< The last generation is shut down.
};
inline constexpr std::size_t kEvents = 15;

struct Transition {
  Phase from;
  Event event;
  Phase to;
};
/// All there are.
std::span<const Transition> transitions();
/// Nothing where the event can not be in that phase.
std::optional<Phase> next_phase(Phase phase, Event event);
const char* to_string(Phase phase);
const char* to_string(Event event);

/// Why it leaves a generation.
enum class Departure : std::uint8_t {
  kBroken,    ///< Somebody is lost, or cannot go on: what is under way is done again.
  kBoundary,  ///< Others come in; nothing is under way.
  kAnew,      ///< As kBoundary, and what is under way is given up.
};

/// One worker's. Calls that cannot be where it stands throw Error, kInternal.
class Lifecycle final {
 public:
  explicit Lifecycle(bool is_elastic) : is_elastic_(is_elastic) {}

  Phase phase() const { return phase_; }
  /// The generation that it is in, or was in last; 0 before the first.
  std::uint64_t present() const { return present_; }
  /// The one that it joins, or is connected in beside the present one.
  std::uint64_t next() const { return next_; }

  // Who may do what. All of it changes with the phase.
  /// Ok: operations and messages are taken; else why not.
  Status refusal() const;
  /// A call waits: whether it is in the plan that is being made has to be the same for all.
  bool holds_calls() const { return phase_ == Phase::kPlanning && calls_ == Calls::kTaken; }
  /// A message waits: which generation it belongs to could not be told.
  bool holds_messages() const { return !has_ended() && calls_ == Calls::kTaken && phase_ != Phase::kRunning; }
  /// Operations start at once; else the next generation starts them.
  bool starts_operations() const;
  /// What is complete, or will not be asked for here, is told to the rendezvous; else it is in the next generation.
  bool reports() const { return starts_operations() || phase_ == Phase::kLeaving; }
  /// The present generation hears of groups that come, go or are aborted (one that is shut down refuses); else the next
  /// one does.
  bool tells_groups() const;
  /// The supervisor looks at operations of which it is not known yet why they ended.
  bool weighs_doubts() const { return !has_ended() && !has_stepped_down(); }
  /// The supervisor leaves the generations to who shuts down.
  bool has_stepped_down() const;
  bool has_ended() const { return phase_ == Phase::kEnding || phase_ == Phase::kEnded; }
  /// Why nothing goes any more; ok where it does.
  const Status& end() const { return end_; }

  // The supervisor.
  enum class Command : std::uint8_t {
    kNothing,
    kJoin,           ///< The generation of the message.
    kConnect,        ///< In it, beside the present one. One that was offered before is dropped.
    kRefuse,         ///< Say that it is broken, and `why`. As kConnect otherwise.
    kDropBeside,     ///< What was connected beside.
    kGoOver,         ///< To what is beside.
    kLeave,          ///< The present generation.
    kNoteNewcomers,  ///< How many wait to come in.
    kSettle,         ///< The operations of the message.
    kEnd,            ///< end() it, as the message says.
    kStopListening,  ///< The rendezvous has no more to say, and nothing depends on it.
  };
  /// It has nothing in its hands.
  bool listens() const;
  struct Reaction {
    Command command = Command::kNothing;
    std::string_view why = {};
  };
  /// What to do about a message of the rendezvous. `sends_messages`: this worker has sent some to other workers.
  Reaction hear(const Message& message, bool sends_messages);
  enum class Turn : std::uint8_t { kListen, kLeave, kStepDown };
  /// Before it listens. `is_ready`: nobody lacks what this one has, so that it may leave for the boundary.
  Turn take_turn(bool is_ready);
  /// Something has been done. False: the job has ended here meanwhile, and it was for nothing.
  [[nodiscard]] bool advance(Event event);
  /// It could not go over.
  Command fail_to_switch();
  Departure departure() const { return departure_; }

  // The present generation failed here.
  void break_off(const std::string& why);
  bool is_sound() const { return health_ == Health::kSound; }
  /// What the rendezvous is to be told of it: once in each generation.
  std::optional<std::string> take_break();

  // Boundaries.
  void call_boundary(Departure how);
  /// It has been called, and the generation that begins there is not installed.
  bool awaits_boundary() const { return boundary_ != Boundary::kNone; }
  /// It would leave for a boundary as soon as it may: how. Nothing where it would not.
  std::optional<Departure> boundary() const;
  /// Its caller waits no more.
  void forget_boundary() { boundary_ = Boundary::kNone; }

  // The generation before the present one, after a planned switch.
  bool is_draining() const { return before_ == Before::kDraining; }
  void have_drained();
  void have_retired();

  // The callers' end.
  /// No operation is taken any more; those that are pending still end. False: that was so already.
  bool stop();
  bool is_stopping() const { return calls_ != Calls::kTaken; }
  /// Nobody waits for them any more: the supervisor may step down.
  /// False: that was so already.
  bool let_go() { return std::exchange(calls_, Calls::kOver) != Calls::kOver; }
  /// Nothing goes any more. False: that was so already.
  bool end(const Status& why);

 private:
  enum class Calls : std::uint8_t { kTaken, kEnding, kOver };
  enum class Boundary : std::uint8_t { kNone, kCalled, kCalledAnew, kReached };
  enum class Before : std::uint8_t { kNone, kDraining, kRetiring };
  enum class Health : std::uint8_t { kSound, kBroken, kTold };

  void move(Event event);
  void leave(Departure how);
  Reaction hear_outside(const Message& message);
  Reaction hear_inside(const Message& message, bool sends_messages);

  const bool is_elastic_;
  Phase phase_ = Phase::kOutside;
  Calls calls_ = Calls::kTaken;
  Boundary boundary_ = Boundary::kNone;
  Before before_ = Before::kNone;
  Health health_ = Health::kSound;
  Departure departure_ = Departure::kBroken;
  std::uint64_t present_ = 0;
  std::uint64_t next_ = 0;
  std::string why_broken_;
  Status end_;
};

}  // namespace herring::elastic
