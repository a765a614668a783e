#include "elastic/lifecycle.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace herring::elastic {
namespace {

using enum Phase;
using Command = Lifecycle::Command;
using Turn = Lifecycle::Turn;

std::vector<Phase> all_phases() {
  std::vector<Phase> all;
  for (std::size_t i = 0; i < kPhases; ++i) all.push_back(static_cast<Phase>(i));
  return all;
}

std::vector<Event> all_events() {
  std::vector<Event> all;
  for (std::size_t i = 0; i < kEvents; ++i) all.push_back(static_cast<Event>(i));
  return all;
}

Message said(MessageKind kind, std::uint64_t generation = 1, bool is_planned = false) {
  Message message;
  message.kind = kind;
  message.generation = generation;
  message.is_planned = is_planned;
  return message;
}

Command hear(Lifecycle& life, MessageKind kind, std::uint64_t generation = 1, bool is_planned = false) {
  return life.hear(said(kind, generation, is_planned), false).command;
}

void enter(Lifecycle& life, std::uint64_t generation, bool at_boundary = false) {
  Message go = said(MessageKind::kGo, generation);
  go.at_boundary = at_boundary;
  ASSERT_EQ(life.hear(go, false).command, Command::kJoin);
  ASSERT_TRUE(life.advance(Event::kPlan));
  ASSERT_TRUE(life.advance(Event::kInstall));
}

void leave(Lifecycle& life, std::uint64_t generation) {
  ASSERT_EQ(hear(life, MessageKind::kBreak, generation), Command::kLeave);
  ASSERT_TRUE(life.advance(Event::kHaveLeft));
}

void connect(Lifecycle& life, std::uint64_t generation) {
  ASSERT_EQ(hear(life, MessageKind::kGo, generation, true), Command::kConnect);
  ASSERT_TRUE(life.advance(Event::kConnect));
}

void switch_over(Lifecycle& life, std::uint64_t generation) {
  connect(life, generation);
  ASSERT_EQ(hear(life, MessageKind::kSwitch, generation), Command::kGoOver);
  ASSERT_TRUE(life.advance(Event::kSwitchOver));
}

/// A worker of an elastic job that got there as workers do, in generation 1.
Lifecycle in(Phase phase) {
  Lifecycle life(true);
  if (phase == kOutside) return life;
  static_cast<void>(hear(life, MessageKind::kGo));
  if (phase == kJoining) return life;
  static_cast<void>(life.advance(Event::kPlan));
  if (phase == kPlanning) return life;
  static_cast<void>(life.advance(Event::kInstall));
  switch (phase) {
    case kConnecting:
      static_cast<void>(hear(life, MessageKind::kGo, 2, true));
      break;
    case kConnected:
      connect(life, 2);
      break;
    case kSwitching:
      connect(life, 2);
      static_cast<void>(hear(life, MessageKind::kSwitch, 2));
      break;
    case kLeaving:
      static_cast<void>(hear(life, MessageKind::kBreak));
      break;
    case kFinishing:
    case kFinished:
      life.stop();
      static_cast<void>(life.let_go());
      static_cast<void>(life.take_turn(false));
      if (phase == kFinished) static_cast<void>(life.advance(Event::kFinish));
      break;
    case kEnding:
    case kEnded:
      life.end(Status(Code::kCancelled, "enough"));
      if (phase == kEnded) static_cast<void>(life.take_turn(false));
      break;
    default:
      break;
  }
  return life;
}

/// Once more by hand: where each event leads. What is not here cannot be.
const std::map<Phase, std::map<Event, Phase>> kAllowed{
    {kOutside, {{Event::kGo, kJoining}, {Event::kEnd, kEnding}}},
    {kJoining,
     {{Event::kPlan, kPlanning}, {Event::kInstall, kRunning}, {Event::kFailToJoin, kOutside}, {Event::kEnd, kEnding}}},
    {kPlanning, {{Event::kInstall, kRunning}, {Event::kFailToJoin, kOutside}, {Event::kEnd, kEnding}}},
    {kRunning,
     {{Event::kOffer, kConnecting}, {Event::kLeave, kLeaving}, {Event::kStepDown, kFinishing}, {Event::kEnd, kEnding}}},
    {kConnecting, {{Event::kConnect, kConnected}, {Event::kFailToConnect, kRunning}, {Event::kEnd, kEnding}}},
    {kConnected,
     {{Event::kDrop, kRunning}, {Event::kSwitch, kSwitching}, {Event::kLeave, kLeaving}, {Event::kEnd, kEnding}}},
    {kSwitching, {{Event::kSwitchOver, kRunning}, {Event::kLeave, kLeaving}, {Event::kEnd, kEnding}}},
    {kLeaving, {{Event::kHaveLeft, kOutside}, {Event::kEnd, kEnding}}},
    {kFinishing, {{Event::kFinish, kFinished}, {Event::kEnd, kEnded}}},
    {kFinished, {{Event::kEnd, kEnded}}},
    {kEnding,
     {{Event::kPlan, kEnding},
      {Event::kInstall, kEnding},
      {Event::kFailToJoin, kEnding},
      {Event::kConnect, kEnding},
      {Event::kFailToConnect, kEnding},
      {Event::kSwitchOver, kEnding},
      {Event::kHaveLeft, kEnding},
      {Event::kStepDown, kEnded}}},
    {kEnded, {{Event::kFinish, kEnded}}},
};

TEST(ElasticLifecycle, EveryTransitionLeadsWhereItShouldAndThereAreNoOthers) {
  std::size_t found = 0;
  for (const Phase phase : all_phases()) {
    for (const Event event : all_events()) {
      const auto& from = kAllowed.at(phase);
      const auto expected = from.find(event);
      const std::optional<Phase> to = next_phase(phase, event);
      EXPECT_EQ(to.has_value(), expected != from.end()) << to_string(phase) << ", " << to_string(event);
      if (!to || expected == from.end()) continue;
      EXPECT_EQ(*to, expected->second) << to_string(phase) << ", " << to_string(event);
      ++found;
    }
  }
  EXPECT_EQ(found, transitions().size()) << "a transition is stated twice";
}

TEST(ElasticLifecycle, EveryPhaseIsReachedAndNamed) {
  std::set<std::string> names;
  for (const Phase phase : all_phases()) {
    EXPECT_EQ(in(phase).phase(), phase) << to_string(phase);
    names.insert(to_string(phase));
  }
  EXPECT_EQ(names.size(), kPhases);
}

TEST(ElasticLifecycle, WhatCannotBeIsAnErrorAndChangesNothing) {
  for (const Phase phase : all_phases()) {
    for (const Event event : all_events()) {
      const bool is_done = event >= Event::kPlan;  // The others are said, or decided: there is no other way to them.
      const bool skips_the_plan = phase == kJoining && event == Event::kInstall;
      if (is_done && kAllowed.at(phase).contains(event) && !skips_the_plan) continue;
      Lifecycle life = in(phase);
      try {
        static_cast<void>(life.advance(event));
        FAIL() << to_string(event) << " while " << to_string(phase);
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), Code::kInternal);
        EXPECT_NE(std::string(error.what()).find(to_string(phase)), std::string::npos) << error.what();
      }
      EXPECT_EQ(life.phase(), phase);
    }
  }
}

TEST(ElasticLifecycle, OnlyElasticJobsPlan) {
  Lifecycle life(false);
  static_cast<void>(hear(life, MessageKind::kGo));
  EXPECT_THROW(static_cast<void>(life.advance(Event::kPlan)), Error);
  EXPECT_TRUE(life.advance(Event::kInstall));
  EXPECT_EQ(life.phase(), kRunning);
}

TEST(ElasticLifecycle, WhoMayDoWhatWhere) {
  const auto in_any_of = [](Phase phase, std::set<Phase> phases) { return phases.contains(phase); };
  for (const Phase phase : all_phases()) {
    const Lifecycle life = in(phase);
    SCOPED_TRACE(to_string(phase));
    EXPECT_EQ(life.starts_operations(), in_any_of(phase, {kRunning, kConnecting, kConnected, kFinishing}));
    EXPECT_EQ(life.reports(), life.starts_operations() || phase == kLeaving);
    EXPECT_EQ(life.tells_groups(),
              in_any_of(phase, {kRunning, kConnecting, kConnected, kSwitching, kFinishing, kFinished, kEnded}));
    EXPECT_EQ(life.holds_calls(), phase == kPlanning);
    EXPECT_EQ(life.holds_messages(),
              in_any_of(phase, {kOutside, kJoining, kPlanning, kConnecting, kConnected, kSwitching, kLeaving}));
    EXPECT_EQ(life.weighs_doubts(), !in_any_of(phase, {kFinishing, kFinished, kEnding, kEnded}));
    EXPECT_EQ(life.has_stepped_down(), in_any_of(phase, {kFinishing, kFinished, kEnded}));
    EXPECT_EQ(life.listens(), in_any_of(phase, {kOutside, kRunning, kConnected, kFinishing}));
    EXPECT_EQ(life.refusal().is_ok(), !in_any_of(phase, {kFinishing, kFinished, kEnding, kEnded}));
    EXPECT_EQ(life.has_ended(), in_any_of(phase, {kEnding, kEnded}));
  }
}

TEST(ElasticLifecycle, WhoHasSomethingInItsHandsDoesNotListen) {
  for (const Phase phase : {kJoining, kPlanning, kConnecting, kSwitching, kLeaving}) {
    Lifecycle life = in(phase);
    EXPECT_THROW(static_cast<void>(hear(life, MessageKind::kNewcomers)), Error) << to_string(phase);
  }
}

TEST(ElasticLifecycle, OfAGenerationThatIsOverNothingIsHeard) {
  Lifecycle life = in(kOutside);
  EXPECT_EQ(hear(life, MessageKind::kBreak), Command::kNothing);
  EXPECT_EQ(hear(life, MessageKind::kSwitch), Command::kNothing);
  EXPECT_EQ(hear(life, MessageKind::kNewcomers), Command::kNothing);
  EXPECT_EQ(hear(life, MessageKind::kGo, 3, true), Command::kNothing);
  EXPECT_EQ(hear(life, MessageKind::kSettled), Command::kSettle);
  EXPECT_EQ(hear(life, MessageKind::kEnd), Command::kEnd);
  enter(life, 4);
  EXPECT_EQ(life.present(), 4U);
  EXPECT_EQ(hear(life, MessageKind::kBreak, 3), Command::kNothing);
  EXPECT_EQ(hear(life, MessageKind::kBreak, 5, true), Command::kNothing);
  EXPECT_EQ(hear(life, MessageKind::kGo, 5), Command::kNothing);
  EXPECT_EQ(hear(life, MessageKind::kSwitch, 5), Command::kNothing);
  EXPECT_EQ(hear(life, MessageKind::kNewcomers), Command::kNoteNewcomers);
  EXPECT_EQ(hear(life, MessageKind::kSettled), Command::kSettle);
  EXPECT_EQ(hear(life, MessageKind::kEnd), Command::kEnd);
  EXPECT_EQ(life.phase(), kRunning);
  EXPECT_EQ(hear(life, MessageKind::kBreak, 4), Command::kLeave);
  EXPECT_EQ(life.departure(), Departure::kBroken);
}

TEST(ElasticLifecycle, AfterAFailureToJoinItWaitsForTheNext) {
  for (const Phase phase : {kJoining, kPlanning}) {
    Lifecycle life = in(phase);
    EXPECT_TRUE(life.advance(Event::kFailToJoin));
    EXPECT_EQ(life.present(), 0U);
    enter(life, 2);
    EXPECT_EQ(life.present(), 2U);
  }
}

TEST(ElasticLifecycle, APlannedSwitchMayComeToNothing) {
  Lifecycle life = in(kConnecting);
  EXPECT_TRUE(life.advance(Event::kFailToConnect));
  connect(life, 3);
  EXPECT_EQ(hear(life, MessageKind::kBreak, 3, true), Command::kDropBeside);
  connect(life, 4);
  EXPECT_EQ(hear(life, MessageKind::kSwitch, 3), Command::kNothing) << "that one is not beside";
  connect(life, 5);  // One that was offered before is dropped.
  EXPECT_EQ(life.next(), 5U);
  EXPECT_EQ(life.present(), 1U);
  EXPECT_EQ(hear(life, MessageKind::kBreak, 1), Command::kLeave) << "a loss";
}

TEST(ElasticLifecycle, WhoSendsMessagesGoesToNoPlannedGeneration) {
  for (const Phase phase : {kRunning, kConnected}) {
    Lifecycle life = in(phase);
    const auto reaction = life.hear(said(MessageKind::kGo, 7, true), true);
    EXPECT_EQ(reaction.command, Command::kRefuse);
    EXPECT_EQ(reaction.why, "it sends messages from worker to worker");
    EXPECT_EQ(life.phase(), kRunning);
    EXPECT_FALSE(life.holds_messages());
  }
}

TEST(ElasticLifecycle, WhoCannotGoOverLeavesWhereTheJobIsElasticAndElseEnds) {
  Lifecycle life = in(kSwitching);
  EXPECT_EQ(life.fail_to_switch(), Command::kLeave);
  EXPECT_EQ(life.phase(), kLeaving);
  EXPECT_EQ(life.departure(), Departure::kBroken);
  Lifecycle fixed(false);
  static_cast<void>(hear(fixed, MessageKind::kGo));
  static_cast<void>(fixed.advance(Event::kInstall));
  connect(fixed, 2);
  static_cast<void>(hear(fixed, MessageKind::kSwitch, 2));
  EXPECT_EQ(fixed.fail_to_switch(), Command::kEnd);
  Lifecycle ended = in(kSwitching);
  ended.end(Status(Code::kCancelled, "enough"));
  EXPECT_EQ(ended.fail_to_switch(), Command::kNothing);
  EXPECT_THROW(static_cast<void>(in(kOutside).fail_to_switch()), Error);
}

TEST(ElasticLifecycle, OneSwitchAtATime) {
  Lifecycle life = in(kRunning);
  switch_over(life, 2);
  EXPECT_EQ(life.present(), 2U);
  EXPECT_TRUE(life.is_draining());
  connect(life, 3);
  EXPECT_THROW(static_cast<void>(hear(life, MessageKind::kSwitch, 3)), Error);
  life.have_drained();
  EXPECT_FALSE(life.is_draining());
  EXPECT_THROW(static_cast<void>(hear(life, MessageKind::kSwitch, 3)), Error) << "it is not over yet";
  life.have_retired();
  EXPECT_EQ(hear(life, MessageKind::kSwitch, 3), Command::kGoOver);
}

TEST(ElasticLifecycle, WhatDrainsIsLeftTogetherWithThePresent) {
  Lifecycle life = in(kRunning);
  EXPECT_THROW(life.have_drained(), Error);
  EXPECT_THROW(life.have_retired(), Error);
  switch_over(life, 2);
  leave(life, 2);
  EXPECT_FALSE(life.is_draining());
  EXPECT_THROW(life.have_drained(), Error);
  enter(life, 3);
  switch_over(life, 4);
  life.have_drained();
  EXPECT_EQ(hear(life, MessageKind::kBreak, 4), Command::kLeave);
  life.have_retired();  // By a thread of its own, which is waited for.
  EXPECT_TRUE(life.advance(Event::kHaveLeft));
}

TEST(ElasticLifecycle, ItLeavesForABoundaryWhenItIsCalledAndAllHaveEverything) {
  Lifecycle life = in(kRunning);
  EXPECT_EQ(life.take_turn(true), Turn::kListen) << "nobody has called it";
  life.call_boundary(Departure::kBoundary);
  EXPECT_EQ(life.take_turn(false), Turn::kListen);
  EXPECT_EQ(life.boundary(), Departure::kBoundary);
  EXPECT_EQ(life.take_turn(true), Turn::kLeave);
  EXPECT_EQ(life.departure(), Departure::kBoundary);
  EXPECT_EQ(life.boundary(), std::nullopt) << "it is on its way";
  EXPECT_TRUE(life.advance(Event::kHaveLeft));
  EXPECT_TRUE(life.awaits_boundary());
  enter(life, 2, true);
  EXPECT_FALSE(life.awaits_boundary());
}

TEST(ElasticLifecycle, ABoundaryIsReachedAlsoWhereItsGenerationBreaksBeforeItHasBegun) {
  Lifecycle life = in(kRunning);
  life.call_boundary(Departure::kAnew);
  EXPECT_EQ(life.take_turn(true), Turn::kLeave);
  EXPECT_EQ(life.departure(), Departure::kAnew);
  EXPECT_TRUE(life.advance(Event::kHaveLeft));
  Message go = said(MessageKind::kGo, 2);
  go.at_boundary = true;
  EXPECT_EQ(life.hear(go, false).command, Command::kJoin);
  EXPECT_TRUE(life.advance(Event::kFailToJoin));
  EXPECT_TRUE(life.awaits_boundary());
  enter(life, 3);
  EXPECT_FALSE(life.awaits_boundary());
}

TEST(ElasticLifecycle, ALossOnTheWayToABoundaryIsNone) {
  Lifecycle life = in(kRunning);
  life.call_boundary(Departure::kBoundary);
  leave(life, 1);
  EXPECT_EQ(life.departure(), Departure::kBroken);
  enter(life, 2);
  EXPECT_TRUE(life.awaits_boundary()) << "it has not been there";
  EXPECT_EQ(life.take_turn(true), Turn::kLeave);
  EXPECT_EQ(life.departure(), Departure::kBoundary);
}

TEST(ElasticLifecycle, ABoundaryThatNobodyWaitsForAnyMoreIsNotLeftFor) {
  Lifecycle life = in(kConnected);
  life.call_boundary(Departure::kBoundary);
  EXPECT_EQ(life.boundary(), Departure::kBoundary);
  life.forget_boundary();
  EXPECT_EQ(life.take_turn(true), Turn::kListen);
  Lifecycle newcomer(true);
  enter(newcomer, 5, true);
  EXPECT_FALSE(newcomer.awaits_boundary());
}

TEST(ElasticLifecycle, ABreakIsToldOnceInEachGeneration) {
  Lifecycle life = in(kRunning);
  EXPECT_EQ(life.take_break(), std::nullopt);
  life.break_off("the first");
  life.break_off("the second");
  EXPECT_FALSE(life.is_sound());
  EXPECT_EQ(life.take_break(), "the first");
  EXPECT_EQ(life.take_break(), std::nullopt);
  switch_over(life, 2);
  EXPECT_EQ(life.take_break(), "the first") << "it was said of the generation before, which nobody looks at any more";
  EXPECT_EQ(life.take_break(), std::nullopt);
  leave(life, 2);
  enter(life, 3);
  EXPECT_TRUE(life.is_sound());
  EXPECT_EQ(life.take_break(), std::nullopt);
  life.break_off("the third");
  EXPECT_EQ(life.take_break(), "the third");
}

TEST(ElasticLifecycle, ShutdownTakesNoCallAndStaysInUntilNobodyCountsOnIt) {
  Lifecycle life = in(kConnected);
  EXPECT_TRUE(life.stop());
  EXPECT_FALSE(life.stop());
  EXPECT_EQ(life.refusal().code(), Code::kShutdown);
  EXPECT_FALSE(life.holds_messages()) << "they are refused";
  EXPECT_EQ(life.take_turn(true), Turn::kListen) << "what is pending ends";
  EXPECT_TRUE(life.let_go());
  EXPECT_FALSE(life.let_go());
  EXPECT_EQ(life.take_turn(true), Turn::kListen) << "it has said that it is connected beside";
  EXPECT_EQ(hear(life, MessageKind::kBreak, 2, true), Command::kDropBeside);
  EXPECT_EQ(life.take_turn(true), Turn::kStepDown);
  EXPECT_EQ(life.phase(), kFinishing);
  EXPECT_EQ(hear(life, MessageKind::kBreak), Command::kNothing) << "it goes to no other";
  EXPECT_EQ(hear(life, MessageKind::kGo, 3), Command::kNothing);
  const auto reaction = life.hear(said(MessageKind::kGo, 3, true), false);
  EXPECT_EQ(reaction.command, Command::kRefuse);
  EXPECT_EQ(reaction.why, "it has finished");
  EXPECT_EQ(hear(life, MessageKind::kEnd), Command::kStopListening);
  EXPECT_TRUE(life.advance(Event::kFinish));
  EXPECT_EQ(hear(life, MessageKind::kEnd), Command::kNothing);
  EXPECT_TRUE(life.end(Status(Code::kShutdown, "all is done")));
  EXPECT_EQ(life.phase(), kEnded);
}

TEST(ElasticLifecycle, AShutdownWhileItIsOutsideWaitsForTheNextGeneration) {
  Lifecycle life = in(kRunning);
  life.stop();
  leave(life, 1);
  static_cast<void>(life.let_go());
  EXPECT_EQ(life.take_turn(true), Turn::kListen);
  enter(life, 2);
  EXPECT_EQ(life.take_turn(true), Turn::kStepDown);
}

TEST(ElasticLifecycle, AfterTheEndWhateverIsDoneIsForNothing) {
  for (const Phase phase : all_phases()) {
    Lifecycle life = in(phase);
    SCOPED_TRACE(to_string(phase));
    const bool is_first = phase != kEnding && phase != kEnded;
    EXPECT_EQ(life.end(Status(Code::kPeerLost, "the end")), is_first);
    EXPECT_EQ(life.end().message(), is_first ? "the end" : "enough") << "the first one counts";
    EXPECT_EQ(life.refusal().message(), life.end().message());
    EXPECT_EQ(hear(life, MessageKind::kGo, 9), Command::kNothing);
    for (const Event event : {Event::kPlan, Event::kInstall, Event::kFailToJoin, Event::kConnect, Event::kFailToConnect,
                              Event::kSwitchOver, Event::kHaveLeft}) {
      if (life.phase() == kEnding) {
        EXPECT_FALSE(life.advance(event)) << to_string(event);
      }
    }
    EXPECT_EQ(life.present(), in(phase).present());
    if (life.phase() == kEnding) {
      EXPECT_EQ(life.take_turn(true), Turn::kStepDown);
    }
    EXPECT_EQ(life.phase(), kEnded);
    EXPECT_FALSE(life.advance(Event::kFinish));
    EXPECT_EQ(life.take_turn(true), Turn::kListen);
  }
}

}  // namespace
}  // namespace herring::elastic
