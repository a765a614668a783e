#include "elastic/lifecycle.h"

#include <algorithm>
#include <array>
#include <utility>

namespace herring::elastic {
namespace {

using enum Phase;

constexpr auto kTransitions = std::to_array<Transition>({
    // From one generation to the next.
    {kOutside, Event::kGo, kJoining},
    {kJoining, Event::kPlan, kPlanning},
    {kJoining, Event::kInstall, kRunning},  // Not elastic: there is nothing to plan.
    {kJoining, Event::kFailToJoin, kOutside},
    {kPlanning, Event::kInstall, kRunning},
    {kPlanning, Event::kFailToJoin, kOutside},
    {kRunning, Event::kLeave, kLeaving},
    {kConnected, Event::kLeave, kLeaving},
    {kSwitching, Event::kLeave, kLeaving},  // Elastic: somebody is lost meanwhile.
    {kLeaving, Event::kHaveLeft, kOutside},
    // A planned switch.
    {kRunning, Event::kOffer, kConnecting},
    {kConnecting, Event::kConnect, kConnected},
    {kConnecting, Event::kFailToConnect, kRunning},
    {kConnected, Event::kDrop, kRunning},
    {kConnected, Event::kSwitch, kSwitching},
    {kSwitching, Event::kSwitchOver, kRunning},
    // Shutdown. Who has said that it is connected beside is counted on: the others go over with it, or nobody does.
    {kRunning, Event::kStepDown, kFinishing},
    {kFinishing, Event::kFinish, kFinished},
    // Nothing goes any more.
    {kOutside, Event::kEnd, kEnding},
    {kJoining, Event::kEnd, kEnding},
    {kPlanning, Event::kEnd, kEnding},
    {kRunning, Event::kEnd, kEnding},
    {kConnecting, Event::kEnd, kEnding},
    {kConnected, Event::kEnd, kEnding},
    {kSwitching, Event::kEnd, kEnding},
    {kLeaving, Event::kEnd, kEnding},
    {kFinishing, Event::kEnd, kEnded},
    {kFinished, Event::kEnd, kEnded},
    {kEnded, Event::kFinish, kEnded},
    // The supervisor is through with what it had in its hands, which was for nothing.
    {kEnding, Event::kPlan, kEnding},
    {kEnding, Event::kInstall, kEnding},
    {kEnding, Event::kFailToJoin, kEnding},
    {kEnding, Event::kConnect, kEnding},
    {kEnding, Event::kFailToConnect, kEnding},
    {kEnding, Event::kSwitchOver, kEnding},
    {kEnding, Event::kHaveLeft, kEnding},
    {kEnding, Event::kStepDown, kEnded},
});

constexpr std::array<const char*, kPhases> kPhaseNames{"outside",    "joining",   "planning",  "running",
                                                       "connecting", "connected", "switching", "leaving",
                                                       "finishing",  "finished",  "ending",    "ended"};
constexpr std::array<const char*, kEvents> kEventNames{
    "go",      "offer",        "drop",    "switch",          "leave",       "step down", "end",   "plan",
    "install", "fail to join", "connect", "fail to connect", "switch over", "have left", "finish"};

[[noreturn]] void refuse(const std::string& what, Phase phase) {
  throw Error(Code::kInternal, "elastic: '" + what + "' while " + to_string(phase));
}

}  // namespace

std::span<const Transition> transitions() { return kTransitions; }

std::optional<Phase> next_phase(Phase phase, Event event) {
  const auto found = std::find_if(kTransitions.begin(), kTransitions.end(), [phase, event](const Transition& each) {
    return each.from == phase && each.event == event;
  });
  return found == kTransitions.end() ? std::nullopt : std::optional(found->to);
}

const char* to_string(Phase phase) { return kPhaseNames.at(static_cast<std::size_t>(phase)); }
const char* to_string(Event event) { return kEventNames.at(static_cast<std::size_t>(event)); }

void Lifecycle::move(Event event) {
  const std::optional<Phase> next = next_phase(phase_, event);
  if (!next) refuse(to_string(event), phase_);
  phase_ = *next;
}

Status Lifecycle::refusal() const {
  if (!end_.is_ok()) return end_;
  return calls_ == Calls::kTaken ? Status::ok() : Status(Code::kShutdown, "herring has been shut down");
}

bool Lifecycle::starts_operations() const {
  return phase_ == kRunning || phase_ == kConnecting || phase_ == kConnected || phase_ == kFinishing;
}

bool Lifecycle::tells_groups() const {
  return starts_operations() || phase_ == kSwitching || phase_ == kFinished || phase_ == kEnded;
}

bool Lifecycle::has_stepped_down() const { return phase_ == kFinishing || phase_ == kFinished || phase_ == kEnded; }

bool Lifecycle::listens() const {
  return phase_ == kOutside || phase_ == kRunning || phase_ == kConnected || phase_ == kFinishing;
}

Lifecycle::Reaction Lifecycle::hear(const Message& message, bool sends_messages) {
  switch (phase_) {
    case kOutside:
      return hear_outside(message);
    case kRunning:
    case kConnected:
      return hear_inside(message, sends_messages);
    case kFinishing:
      if (message.kind == MessageKind::kGo && message.is_planned) return {Command::kRefuse, "it has finished"};
      return {message.kind == MessageKind::kEnd ? Command::kStopListening : Command::kNothing};
    case kFinished:
    case kEnding:
    case kEnded:
      return {};  // Too late.
    default:
      refuse("hear", phase_);  // It has something in its hands.
  }
}

Lifecycle::Reaction Lifecycle::hear_outside(const Message& message) {
  switch (message.kind) {
    case MessageKind::kGo:
      if (message.is_planned) return {};
      move(Event::kGo);
      next_ = message.generation;
      if (message.at_boundary && awaits_boundary()) boundary_ = Boundary::kReached;
      return {Command::kJoin};
    case MessageKind::kSettled:
      return {Command::kSettle};
    case MessageKind::kEnd:
      return {Command::kEnd};
    default:
      return {};  // Of a generation that it has left.
  }
}

Lifecycle::Reaction Lifecycle::hear_inside(const Message& message, bool sends_messages) {
  switch (message.kind) {
    case MessageKind::kGo:
      if (!message.is_planned) return {};
      if (phase_ == kConnected) move(Event::kDrop);
      // Which messages belong to which generation cannot be told: servers have to wait for another occasion.
      if (sends_messages) return {Command::kRefuse, "it sends messages from worker to worker"};
      move(Event::kOffer);
      next_ = message.generation;
      return {Command::kConnect};
    case MessageKind::kBreak:
      if (message.is_planned) {
        if (phase_ != kConnected) return {};
        move(Event::kDrop);
        return {Command::kDropBeside};
      }
      if (message.generation < present_) return {};
      leave(Departure::kBroken);
      return {Command::kLeave};
    case MessageKind::kSwitch:
      if (phase_ != kConnected || message.generation != next_) return {};
      if (before_ != Before::kNone) refuse("a second switch before the first is over", phase_);
      move(Event::kSwitch);
      return {Command::kGoOver};
    case MessageKind::kNewcomers:
      return {Command::kNoteNewcomers};
    case MessageKind::kSettled:
      return {Command::kSettle};
    case MessageKind::kEnd:
      return {Command::kEnd};
    default:
      return {};
  }
}

Lifecycle::Turn Lifecycle::take_turn(bool is_ready) {
  if (phase_ == kEnding || (phase_ == kRunning && calls_ == Calls::kOver)) {
    move(Event::kStepDown);
    return Turn::kStepDown;
  }
  const std::optional<Departure> how = boundary();
  if (!how || !is_ready) return Turn::kListen;
  leave(*how);
  return Turn::kLeave;
}

void Lifecycle::leave(Departure how) {
  move(Event::kLeave);
  departure_ = how;
  if (before_ == Before::kDraining) before_ = Before::kNone;  // Both are left.
}

bool Lifecycle::advance(Event event) {
  if (event < Event::kPlan) refuse(to_string(event), phase_);  // Not done, but said or decided.
  if (event == Event::kInstall && phase_ == kJoining && is_elastic_) refuse("install without a plan", phase_);
  if (event == Event::kPlan && phase_ == kJoining && !is_elastic_) refuse("plan in a job that is not elastic", phase_);
  move(event);
  if (has_ended()) return false;
  switch (event) {
    case Event::kInstall:
      present_ = next_;
      if (boundary_ == Boundary::kReached) boundary_ = Boundary::kNone;
      break;
    case Event::kSwitchOver:
      present_ = next_;
      before_ = Before::kDraining;
      if (health_ == Health::kTold) health_ = Health::kBroken;  // What was said, was said of the generation before.
      break;
    case Event::kHaveLeft:
      health_ = Health::kSound;
      why_broken_.clear();
      break;
    default:
      break;
  }
  return true;
}

Lifecycle::Command Lifecycle::fail_to_switch() {
  if (has_ended()) return Command::kNothing;
  if (!is_elastic_) return Command::kEnd;
  leave(Departure::kBroken);
  return Command::kLeave;
}

void Lifecycle::break_off(const std::string& why) {
  if (health_ != Health::kSound) return;
  health_ = Health::kBroken;
  why_broken_ = why;
}

std::optional<std::string> Lifecycle::take_break() {
  if (health_ != Health::kBroken || !starts_operations()) return std::nullopt;
  health_ = Health::kTold;
  return why_broken_;
}

void Lifecycle::call_boundary(Departure how) {
  boundary_ = how == Departure::kAnew ? Boundary::kCalledAnew : Boundary::kCalled;
}

std::optional<Departure> Lifecycle::boundary() const {
  if (phase_ != kRunning && phase_ != kConnected) return std::nullopt;
  if (boundary_ == Boundary::kCalled) return Departure::kBoundary;
  return boundary_ == Boundary::kCalledAnew ? std::optional(Departure::kAnew) : std::nullopt;
}

void Lifecycle::have_drained() {
  if (before_ != Before::kDraining) refuse("a generation has drained that does not", phase_);
  before_ = Before::kRetiring;
}

void Lifecycle::have_retired() {
  if (before_ != Before::kRetiring) refuse("a generation is over that was not drained", phase_);
  before_ = Before::kNone;
}

bool Lifecycle::stop() {
  if (calls_ != Calls::kTaken) return false;
  calls_ = Calls::kEnding;
  return true;
}

bool Lifecycle::end(const Status& why) {
  if (has_ended()) return false;
  move(Event::kEnd);
  end_ = why;
  return true;
}

}  // namespace herring::elastic
