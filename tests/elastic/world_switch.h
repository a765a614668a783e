#pragma once

#include "elastic/world.h"

/// The part of World that goes from one generation to the next; and servers, which die, come back, and are taken in
/// while training goes on.
namespace herring::elastic::testing {

/// What it has to do to get in, once all have said what they have; nothing where it lacks a result that is gone.
inline std::optional<Plan> World::plan_of(const Worker& worker) {
  Meeting& meeting = meetings_[worker.go.generation];
  if (meeting.summaries.size() < meeting.members.size()) return std::nullopt;
  std::vector<Summary> summaries;
  for (const WorkerId member : meeting.members) summaries.push_back(meeting.summaries.at(member));
  Plan plan = make_plan(summaries, meeting.members);
  for (const Step& step : plan.steps) {
    const bool lacks = std::find(step.to.begin(), step.to.end(), worker.go.rank) != step.to.end();
    // Who has the result is not there any more: the joining will fail.
    if (lacks && step.kind == Step::Kind::kDeliver && meeting.left.contains(meeting.members[step.from])) {
      return std::nullopt;
    }
  }
  return plan;
}

inline bool World::join(Worker& worker) {
  if (worker.life.phase() != Phase::kJoining && worker.life.phase() != Phase::kPlanning) return false;
  Meeting& meeting = meetings_[worker.go.generation];
  if (!meeting.summaries.contains(worker.id)) {
    if (is_elastic_ && !worker.life.advance(Event::kPlan)) problem_ = "it had ended";
    meeting.summaries[worker.id] = *decode_summary(encode(worker.journal.summary()));
    return true;
  }
  const std::optional<Plan> plan = plan_of(worker);
  if (plan) install(worker, *plan);
  return plan.has_value();
}

inline void World::install(Worker& worker, const Plan& plan) {
  if (!worker.life.advance(Event::kInstall)) problem_ = "it had ended";
  worker.crew = worker.go.members;
  worker.newcomers = 0;
  if (worker.journal.is_new()) worker.journal.begin_at(plan.start);
  worker.journal.settle_in();
  for (const Step& step : plan.steps) {
    if (std::find(step.to.begin(), step.to.end(), worker.go.rank) == step.to.end()) continue;
    apply(worker, step);
  }
  worker.unreported.clear();
  for (const auto& [id, record] : worker.journal.records()) {
    if (record.state != Record::State::kPending) worker.unreported.push_back(id);
  }
  for (auto& [id, operation] : worker.operations) {
    if (!operation.value && !operation.has_failed) start(worker, id, operation);
  }
}

inline void World::apply(Worker& worker, const Step& step) {
  if (step.kind == Step::Kind::kRedo) {
    ++redone;
    if (step.root == 0) return;
    if (const auto found = worker.operations.find(step.id); found != worker.operations.end()) {
      found->second.root = step.root;
    } else {
      worker.straddling[step.id] = step.root;
    }
    return;
  }
  Pending outcome;
  if (step.kind == Step::Kind::kFail) {
    ++failed;
    outcome.has_failed = true;
  } else {
    ++delivered;
    const WorkerId from = meetings_[worker.go.generation].members[step.from];
    for (const Worker& other : workers_) {
      if (other.id != from) continue;
      const auto kept = other.operations.find(step.id);
      if (kept == other.operations.end() || !kept->second.value) {
        problem_ = "a result that others need is not kept";
        return;
      }
      outcome.value = kept->second.value;
    }
  }
  const auto found = worker.operations.find(step.id);
  if (found == worker.operations.end()) {
    worker.outcomes[step.id] = outcome;
  } else {
    end(worker, step.id, found->second, outcome);
  }
}

inline void World::restart_a_server() {
  Server& server = servers_[pick(servers_.size())];
  if (server.is_alive) {
    server.is_alive = false;
    server.inbox.clear();
    while (!server.outbox.empty() && pick(2) == 0) server.outbox.pop_back();
  }
  add_server();
}

/// Time passes a little with each thing that happens, and a lot where nothing does.
inline void World::pass_time(bool any) {
  now_ += any ? std::chrono::milliseconds(2) : std::chrono::milliseconds(500);
  for (const Worker& worker : workers_) {
    if (worker.is_alive && worker.place != 0) rendezvous_.heard(worker.place, now_);
  }
  for (const Server& server : servers_) {
    if (server.is_alive) rendezvous_.heard(server.place, now_);
  }
  rendezvous_.tick(now_);
  carry_out();
}

/// One thing that a server, or its connection, can do.
inline bool World::run_servers() {
  for (std::size_t i = 0, first = pick(std::max<std::size_t>(servers_.size(), 1)); i < servers_.size(); ++i) {
    Server& server = servers_[(first + i) % servers_.size()];
    if (!server.inbox.empty() && pick(2) == 0) return hear(server);
    if (!server.outbox.empty()) {
      rendezvous_.receive(server.place, server.outbox.front(), now_);
      server.outbox.pop_front();
    } else if (!server.is_alive && server.place != 0) {
      rendezvous_.disconnected(std::exchange(server.place, 0), "killed", now_);
    } else if (!server.inbox.empty()) {
      return hear(server);
    } else if (server.is_alive && has_ended(server.serves)) {
      say_ready(server);
    } else {
      continue;
    }
    carry_out();
    return true;
  }
  return false;
}

/// All its workers are gone.
inline bool World::has_ended(std::uint64_t generation) {
  if (generation == 0) return false;
  const Meeting& meeting = meetings_[generation];
  return !meeting.members.empty() && std::all_of(meeting.members.begin(), meeting.members.end(),
                                                 [&](WorkerId id) { return meeting.left.contains(id); });
}

inline void World::say_ready(Server& server) {
  Message ready;
  ready.kind = MessageKind::kReady;
  ready.generation = std::exchange(server.serves, 0);
  server.outbox.push_back(ready);
}

inline bool World::hear(Server& server) {
  const Message message = server.inbox.front();
  server.inbox.pop_front();
  if (message.kind == MessageKind::kGo && !message.is_planned) server.serves = message.generation;
  if (message.kind == MessageKind::kSwitch) server.serves = message.generation;
  if (message.kind == MessageKind::kBreak && !message.is_planned) {
    server.serves = message.generation;
    say_ready(server);
  }
  if (message.kind == MessageKind::kEnd && !rendezvous_.has_ended())
    problem_ = "a server was given up: " + message.text;
  return true;
}

inline void World::drop_beside(Worker& worker) {
  if (!worker.beside) return;
  meetings_[worker.beside->generation].left.insert(worker.id);
  worker.beside.reset();
}

/// Connects in the generation beside; that is done when all have.
inline bool World::build(Worker& worker) {
  if (worker.life.phase() != Phase::kConnecting) return false;
  const std::uint64_t number = worker.beside->generation;
  Meeting& meeting = meetings_[number];
  meeting.members = worker.beside->members;
  if (meeting.joined.insert(worker.id).second) return true;
  const bool is_over = meeting.is_cancelled || !meeting.left.empty() ||
                       std::any_of(workers_.begin(), workers_.end(), [&](const Worker& other) {
                         return !other.is_alive && meeting.joined.contains(other.id);
                       });
  if (is_over) {
    drop_beside(worker);
    static_cast<void>(worker.life.advance(Event::kFailToConnect));
    tell(worker, MessageKind::kBroken, number);
    return true;
  }
  if (meeting.joined.size() < meeting.members.size()) return false;
  static_cast<void>(worker.life.advance(Event::kConnect));
  tell(worker, MessageKind::kBuilt, number);
  return true;
}

/// Everybody has told what it has submitted: from there on operations go through the new generation.
inline bool World::go_over(Worker& worker) {
  if (worker.life.phase() != Phase::kSwitching) return false;
  const std::uint64_t number = worker.beside->generation;
  Meeting& meeting = meetings_[number];
  if (meeting.submitted.size() < meeting.members.size()) {
    const auto is_lost = [&](const Worker& other) {
      const auto& members = meeting.members;
      const bool counts = std::find(members.begin(), members.end(), other.id) != members.end();
      return counts && !meeting.submitted.contains(other.id) && (!other.is_alive || meeting.left.contains(other.id));
    };
    if (std::none_of(workers_.begin(), workers_.end(), is_lost)) return false;
    if (worker.life.fail_to_switch() != Lifecycle::Command::kLeave)
      problem_ = "a worker left while servers were taken in";
    return true;
  }
  if (worker.old != 0 || worker.retiring_for != 0) problem_ = "a second switch before the first was over";
  std::vector<Summary> all;
  for (const auto& [id, summary] : meeting.submitted) all.push_back(summary);
  worker.cutoff = Cutoff(all, [](std::uint32_t) { return true; });
  worker.old = worker.life.present();
  worker.crew = worker.beside->members;
  worker.beside.reset();
  static_cast<void>(worker.life.advance(Event::kSwitchOver));
  ++switches;
  for (auto& [id, operation] : worker.operations) {
    if (!operation.value && !operation.has_failed && operation.run == 0) start(worker, id, operation);
  }
  return true;
}

inline bool World::is_old(const Worker& worker, const OperationId& id) const {
  const Record* record = worker.journal.find(id);
  return worker.life.is_draining() && record != nullptr && worker.cutoff.covers(*record);
}

/// The generation before is over when nothing goes through it any more; ending it takes a while.
inline bool World::retire(Worker& worker) {
  if (worker.retiring_for != 0) {
    worker.life.have_retired();
    tell(worker, MessageKind::kSwitched, std::exchange(worker.retiring_for, 0));
    return true;
  }
  if (!worker.life.is_draining() ||
      (worker.life.phase() != Phase::kRunning && worker.life.phase() != Phase::kConnected))
    return false;
  for (const auto& [id, operation] : worker.operations) {
    if (!operation.value && !operation.has_failed && operation.run == worker.old) return false;
  }
  if (!worker.cutoff.is_passed(worker.journal.groups())) return false;
  worker.life.have_drained();
  worker.old = 0;
  worker.retiring_for = worker.life.present();
  return true;
}

inline bool World::leave_present(Worker& worker) {
  if (worker.life.phase() != Phase::kLeaving || worker.retiring_for != 0) return false;
  meetings_[worker.life.present()].left.insert(worker.id);
  if (worker.old != 0) meetings_[worker.old].left.insert(worker.id);
  worker.old = 0;
  drop_beside(worker);
  for (auto& [id, operation] : worker.operations) operation.run = 0;
  if (worker.life.departure() == Departure::kAnew) {
    ++anews;
    for (const auto& [id, operation] : std::exchange(worker.operations, {})) {
      if (!operation.value && !operation.has_failed) worker.unreported.push_back(id);  // It will never ask for it.
    }
    worker.outcomes.clear();
    worker.straddling.clear();
    worker.journal.restart();
    report(worker);
  }
  static_cast<void>(worker.life.advance(Event::kHaveLeft));
  tell(worker, MessageKind::kReady, worker.life.present(), worker.life.departure() != Departure::kBroken);
  return true;
}

}  // namespace herring::elastic::testing
