#pragma once

#include "elastic/world.h"

/// The part of World that strikes: deaths, arrivals, restarts; workers that abort, shut down, or start again.
namespace herring::elastic::testing {

inline void World::strike(Fate& fate) {
  if (fate.deaths > 0 && alive() > 1 && pick(60) == 0) {
    --fate.deaths;
    kill(workers_[pick(workers_.size())]);
  }
  if (fate.arrivals > 0 && !somebody_is_done() && pick(80) == 0) {
    --fate.arrivals;
    add_worker(99);
  }
  if (fate.restarts > 0 && pick(40) == 0) {
    --fate.restarts;
    restart_a_server();
  }
  if (fate.aborts > 0 && alive() > 1 && pick(60) == 0) {
    --fate.aborts;
    abort(workers_[pick(workers_.size())]);
  }
  if (fate.anews > 0 && pick(60) == 0) {
    --fate.anews;
    workers_[pick(workers_.size())].wants_anew = true;
  }
  if (fate.quits > 0 && alive() > 1 && pick(60) == 0) {
    --fate.quits;
    workers_[pick(workers_.size())].quits = true;
  }
}

inline void World::kill(Worker& worker) {
  if (!worker.is_alive || worker.has_left()) return;
  worker.is_alive = false;
  worker.inbox.clear();
  // What it has sent may still arrive, or some of it.
  while (!worker.outbox.empty() && pick(2) == 0) worker.outbox.pop_back();
  for (auto& [number, meeting] : meetings_) lose(meeting, worker.id);
}

/// The caller is through. It goes when nobody can need what it has.
inline bool World::shut_down(Worker& worker) {
  if (worker.life.stop()) return true;
  // Who never calls an operation never has it; that is waited for only so long.
  if (!worker.operations.empty() && !(worker.quits && idle_ > 20)) return false;
  if (worker.life.let_go()) return true;
  if (worker.life.phase() == Phase::kFinishing) {
    meetings_[worker.life.present()].left.insert(worker.id);
    if (worker.old != 0) meetings_[worker.old].left.insert(worker.id);
    return worker.life.advance(Event::kFinish);
  }
  if (worker.life.phase() != Phase::kFinished) return false;
  tell(worker, MessageKind::kLeave, worker.life.present());
  return worker.life.end(Status(Code::kShutdown, "all is done"));
}

/// For the others it is lost; what its supervisor was about to do comes to nothing.
inline void World::abort(Worker& worker) {
  if (!worker.is_alive || worker.life.present() == 0 || worker.life.has_ended()) return;
  constexpr std::array<std::pair<Phase, Event>, 5> kInHand{{{Phase::kJoining, Event::kFailToJoin},
                                                            {Phase::kPlanning, Event::kInstall},
                                                            {Phase::kConnecting, Event::kConnect},
                                                            {Phase::kSwitching, Event::kSwitchOver},
                                                            {Phase::kLeaving, Event::kHaveLeft}}};
  for (const auto& [phase, event] : kInHand) {
    if (worker.life.phase() == phase) worker.in_hand = event;
  }
  if (worker.life.phase() != Phase::kRunning) ++aborted;
  worker.life.end(Status(Code::kCancelled, "the user gave up"));
  worker.inbox.clear();
  for (auto& [number, meeting] : meetings_) lose(meeting, worker.id);
  if (worker.has_left()) worker.is_alive = false;  // Its supervisor had stepped down.
}

/// It has ended in the middle of something.
inline bool World::let_go(Worker& worker) {
  if (worker.in_hand) {
    if (worker.life.advance(*std::exchange(worker.in_hand, std::nullopt))) problem_ = "it goes on after its end";
    return true;
  }
  if (worker.life.take_turn(true) != Lifecycle::Turn::kStepDown) problem_ = "it goes on after its end";
  worker.is_alive = false;  // Its connection closes.
  return true;
}

}  // namespace herring::elastic::testing
