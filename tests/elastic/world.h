#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "elastic/world_parts.h"

/// An elastic job without sockets, threads or time: the real Rendezvous, Journals and plans; workers that do what
/// ElasticRuntime does, as far as the others see it; servers that die and come back; and a schedule that a seed
/// chooses, with deaths at every point.
namespace herring::elastic::testing {

class World {
 public:
  struct Shape {
    std::uint32_t workers = 2;
    std::uint32_t servers = 0;
    bool is_elastic = true;
  };
  World(const Shape& shape, std::uint64_t seed)
      : random_(seed), is_elastic_(shape.is_elastic), rendezvous_(options(shape)) {
    for (std::uint32_t i = 0; i < shape.workers; ++i) add_worker(i);
    for (std::uint32_t i = 0; i < shape.servers; ++i) add_server();
  }
  static Rendezvous::Options options(const Shape& shape) {
    Rendezvous::Options options;
    options.workers = shape.workers;
    options.servers = shape.servers;
    return options;
  }

  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  void add_worker(std::uint32_t wish) {
    Worker worker;
    worker.place = ++places_;
    Message enter;
    enter.kind = MessageKind::kEnter;
    enter.rank = wish;
    enter.is_elastic = is_elastic_;
    worker.outbox.push_back(enter);
    workers_.push_back(std::move(worker));
  }

  void add_server() {
    Server server;
    server.place = ++places_;
    Message enter;
    enter.kind = MessageKind::kEnter;
    enter.role = control::Role::kServer;
    server.outbox.push_back(enter);
    servers_.push_back(std::move(server));
  }

  /// Plays until all have finished; returns what was wrong, "" for nothing. `restarts`: of servers.
  std::string play(std::uint64_t steps, std::uint32_t deaths, std::uint32_t arrivals, std::uint32_t restarts = 0) {
    steps_ = steps;
    for (std::uint64_t turn = 0; turn < 200'000; ++turn) {
      if (deaths > 0 && alive() > 1 && rendezvous_.generation() > 0 && pick(60) == 0) {
        --deaths;
        kill(workers_[pick(workers_.size())]);
      }
      if (arrivals > 0 && rendezvous_.generation() > 0 && !somebody_is_done() && pick(80) == 0) {
        --arrivals;
        add_worker(99);
      }
      if (restarts > 0 && rendezvous_.generation() > 0 && pick(40) == 0) {
        --restarts;
        restart_a_server();
      }
      bool any = pick(workers_.size() + servers_.size()) < servers_.size() && run_servers();
      const std::size_t first = pick(workers_.size());
      for (std::size_t i = 0; i < workers_.size() && !any; ++i) any = act(workers_[(first + i) % workers_.size()]);
      any = any || run_servers();
      pass_time(any);
      if (!problem_.empty()) return problem_;
      if (rendezvous_.has_ended())
        return rendezvous_.ended_well() ? check_results() : "the job ended badly: " + last_words_;
      if (!any && ++idle_ > 100) return "deadlock: " + describe();
      if (any) idle_ = 0;
    }
    return "it never ends: " + describe();
  }

  std::uint64_t redone = 0;  // What the schedules have seen, so that a test can tell that it tests something.
  std::uint64_t delivered = 0;
  std::uint64_t failed = 0;
  std::uint64_t boundaries = 0;
  std::uint64_t switches = 0;  // Planned, of one worker each.

 private:
  // world_switch.h: from one generation to the next; servers, and planned switches.
  std::optional<Plan> plan_of(const Worker& worker);
  bool join(Worker& worker);
  void install(Worker& worker, const Plan& plan);
  void apply(Worker& worker, const Step& step);
  void restart_a_server();
  bool run_servers();
  bool hear(Server& server);
  bool has_ended(std::uint64_t generation);
  void say_ready(Server& server);
  void pass_time(bool any);
  bool build(Worker& worker);
  bool go_over(Worker& worker);
  bool retire(Worker& worker);
  bool is_old(const Worker& worker, const OperationId& id) const;
  void drop_beside(Worker& worker);

  std::size_t alive() const {
    return static_cast<std::size_t>(std::count_if(workers_.begin(), workers_.end(), [](const Worker& worker) {
      return worker.is_alive && !worker.has_left && worker.present > 0;
    }));
  }
  bool somebody_is_done() const {
    return std::any_of(workers_.begin(), workers_.end(),
                       [](const Worker& worker) { return worker.line == Worker::Line::kDone; });
  }

  void kill(Worker& worker) {
    if (!worker.is_alive || worker.has_left) return;
    worker.is_alive = false;
    worker.inbox.clear();
    // What it has sent may still arrive, or some of it.
    while (!worker.outbox.empty() && pick(2) == 0) worker.outbox.pop_back();
    for (auto& [number, meeting] : meetings_) lose(meeting, worker.id);
  }

  static void lose(Meeting& meeting, WorkerId id) {
    const auto& members = meeting.members;
    if (std::find(members.begin(), members.end(), id) != members.end()) meeting.left.insert(id);
  }

  /// One thing that this worker, or its connection, can do; false where there is none.
  bool act(Worker& worker) {
    constexpr int kKinds = 11;
    const std::uint64_t first = pick(kKinds);
    for (int i = 0; i < kKinds; ++i) {
      if (try_one(worker, static_cast<int>((first + static_cast<std::uint64_t>(i)) % kKinds))) return true;
    }
    return false;
  }

  bool try_one(Worker& worker, int kind) {
    if (kind == 0) return say(worker);
    if (!worker.is_alive || worker.has_left) return false;
    switch (kind) {
      case 1:
        return hear(worker);
      case 2:
        return run_program(worker);
      case 3:
        return complete_one(worker);
      case 4:
        return join(worker);
      case 5:
        return notice_loss(worker);
      case 6:
        return report(worker);
      case 7:
        return build(worker);
      case 8:
        return go_over(worker);
      case 9:
        return retire(worker);
      default:
        return go_to_boundary(worker);
    }
  }

  bool say(Worker& worker) {
    if (worker.place == 0) return false;
    if (!worker.outbox.empty()) {
      rendezvous_.receive(worker.place, worker.outbox.front(), now_);
      worker.outbox.pop_front();
    } else if (!worker.is_alive) {
      rendezvous_.disconnected(worker.place, "killed", now_);
      worker.place = 0;
    } else {
      return false;
    }
    carry_out();
    return true;
  }

  void carry_out() {
    for (std::vector<Rendezvous::Action> actions; !(actions = rendezvous_.take_actions()).empty();) {
      for (const auto& action : actions) {
        if (action.kind == Rendezvous::Action::Kind::kOpenHub) rendezvous_.hub_opened(action.generation, 1, now_);
        if (action.kind == Rendezvous::Action::Kind::kCloseHub) meetings_[action.generation].is_cancelled = true;
        if (action.kind == Rendezvous::Action::Kind::kCloseHubs) close_below(action.generation);
        if (action.kind != Rendezvous::Action::Kind::kSend) continue;
        if (action.message.kind == MessageKind::kBreak) broken_.insert(action.message.generation);
        if (action.message.kind == MessageKind::kEnd) last_words_ = action.message.text;
        for (Worker& worker : workers_) {
          if (worker.place != action.connection) continue;
          if (action.message.kind == MessageKind::kGo && action.message.role == control::Role::kWorker) {
            worker.id = action.message.members[action.message.rank];
          }
          if (worker.is_alive) {
            // Over the wire, as it goes.
            worker.inbox.push_back(*decode_message(encode(action.message)));
          }
        }
        for (Server& server : servers_) {
          if (server.place == action.connection && server.is_alive) server.inbox.push_back(action.message);
        }
      }
    }
  }

  /// A hub that goes ends the operations that still go through its generation.
  void close_below(std::uint64_t generation) {
    for (const Worker& worker : workers_) {
      const bool needs_it = worker.is_alive && !worker.has_left && worker.is_stable() && worker.old != 0;
      if (needs_it && worker.old < generation && !broken_.contains(worker.present)) {
        problem_ = "the hub of a generation was closed that still drains";
      }
    }
  }

  bool hear(Worker& worker) {
    if (worker.inbox.empty()) return false;
    // A worker that joins a generation listens to nothing else, nor one that connects beside.
    if (worker.stage == Stage::kJoining || worker.stage == Stage::kSwitching) return false;
    if (worker.beside && !worker.is_built) return false;
    const Message message = worker.inbox.front();
    worker.inbox.pop_front();
    switch (message.kind) {
      case MessageKind::kGo:
        if (message.is_planned) {
          if (worker.is_stable()) worker.beside = message;
          break;
        }
        if (worker.stage != Stage::kWaiting) problem_ = "a worker was sent on that has not asked for it";
        worker.stage = Stage::kJoining;
        worker.go = message;
        meetings_[message.generation].members = message.members;
        for (const Worker& other : workers_) {
          if (!other.is_alive) lose(meetings_[message.generation], other.id);
        }
        if (message.at_boundary) {
          ++boundaries;
          if (!worker.journal.is_new()) mark_start(worker);
          worker.reached_boundary = true;
        }
        break;
      case MessageKind::kSwitch:
        if (!worker.beside || worker.beside->generation != message.generation) break;
        worker.stage = Stage::kSwitching;
        for (const auto& [id, group] : worker.journal.groups()) {
          meetings_[message.generation].submitted[worker.id][id] = group;
        }
        break;
      case MessageKind::kBreak:
        if (message.is_planned) {
          drop_beside(worker);
          break;
        }
        if (worker.is_stable() && message.generation >= worker.present) leave(worker, false);
        break;
      case MessageKind::kNewcomers:
        worker.newcomers = message.workers;
        break;
      case MessageKind::kSettled:
        for (const OperationId& id : message.operations) {
          const auto found = worker.operations.find(id);
          if (found == worker.operations.end()) continue;
          if (!found->second.value && !found->second.has_failed) problem_ = "settled, but pending here";
          worker.operations.erase(found);
          worker.journal.forget(id);
        }
        break;
      case MessageKind::kEnd:
        problem_ = "a worker was given up: " + message.text;
        break;
      default:
        problem_ = "an unexpected message";
    }
    return true;
  }

  /// All have everything: that is what makes it a boundary.
  void mark_start(Worker& worker) {
    worker.journal.mark_start();
    for (const auto& [id, operation] : std::exchange(worker.operations, {})) {
      if (!operation.value && !operation.has_failed) problem_ = "something is under way at a boundary";
      worker.journal.forget(id);
    }
  }

  void leave(Worker& worker, bool at_boundary) {
    meetings_[worker.present].left.insert(worker.id);
    if (worker.old != 0) meetings_[worker.old].left.insert(worker.id);
    worker.old = 0;
    drop_beside(worker);
    for (auto& [id, operation] : worker.operations) operation.run = 0;
    worker.stage = Stage::kWaiting;
    worker.has_told_broken = false;
    tell(worker, MessageKind::kReady, worker.present, at_boundary);
  }

  void tell(Worker& worker, MessageKind kind, std::uint64_t generation, bool at_boundary = false) {
    Message message;
    message.kind = kind;
    message.generation = generation;
    message.at_boundary = at_boundary;
    worker.outbox.push_back(message);
  }

  bool go_to_boundary(Worker& worker) {
    // Who leaves earlier takes away what others still need to get there.
    if (!worker.wants_boundary || !worker.is_stable() || !worker.operations.empty()) return false;
    leave(worker, true);
    return true;
  }

  bool notice_loss(Worker& worker) {
    if (worker.stage == Stage::kWaiting || worker.stage == Stage::kSwitching || !is_elastic_) return false;
    const std::uint64_t number = worker.stage == Stage::kJoining ? worker.go.generation : worker.present;
    if (meetings_[number].left.empty()) return false;
    // Who leaves well has sent all that the others need to get in, and they hear that first.
    const bool all_left_well = std::none_of(workers_.begin(), workers_.end(), [&](const Worker& other) {
      return !other.is_alive && meetings_[number].left.contains(other.id);
    });
    if (worker.stage == Stage::kJoining && all_left_well && plan_of(worker)) return false;
    if (worker.stage == Stage::kJoining) {
      meetings_[number].left.insert(worker.id);
      worker.stage = Stage::kWaiting;
      tell(worker, MessageKind::kBroken, number);
      tell(worker, MessageKind::kReady, number);
      return true;
    }
    // At a boundary others leave before this one does; it follows by itself.
    if (worker.has_told_broken || worker.wants_boundary) return false;
    const bool is_needed = std::any_of(worker.operations.begin(), worker.operations.end(), [](const auto& entry) {
      return !entry.second.value && !entry.second.has_failed;
    });
    if (!is_needed) return false;
    worker.has_told_broken = true;
    tell(worker, MessageKind::kBroken, number);
    return true;
  }

  void end(Worker& worker, const OperationId& id, Pending& operation, const Pending& outcome) {
    operation.value = outcome.value;
    operation.has_failed = outcome.has_failed;
    operation.run = 0;
    if (outcome.has_failed) {
      worker.journal.fail(id);
    } else {
      worker.journal.complete(id);
    }
    worker.unreported.push_back(id);
    remember(worker, id, operation);
    if (is_elastic_) return;
    worker.unreported.clear();
    worker.journal.forget(id);
    worker.operations.erase(id);
  }

  void remember(Worker& worker, const OperationId& id, const Pending& operation) {
    worker.history.insert_or_assign(id, operation);
    if (operation.value && !operation.value->contributors.contains(worker.id) && operation.root == 0) {
      problem_ = "a worker has a result without its own contribution";
    }
  }

  void start(Worker& worker, const OperationId& id, Pending& operation) {
    operation.run = is_old(worker, id) ? worker.old : worker.present;
    const auto& crew = worker.crew;
    if (operation.root != 0 && std::find(crew.begin(), crew.end(), operation.root) == crew.end()) {
      operation.root = crew.front();
      worker.journal.set_root(id, operation.root);
    }
    meetings_[operation.run].running[worker.id][id] = operation.number;
  }

  bool complete_one(Worker& worker) {
    if (!worker.is_stable() && worker.stage != Stage::kSwitching) return false;
    for (auto& [id, operation] : worker.operations) {
      if (operation.value || operation.has_failed || operation.run == 0) continue;
      const Meeting& meeting = meetings_[operation.run];
      Pending outcome;
      Value value;
      bool is_whole = true;
      for (const WorkerId member : meeting.members) {
        if (operation.root != 0 && member != operation.root) continue;
        const auto runs = meeting.running.find(member);
        if (runs == meeting.running.end() || !runs->second.contains(id)) {
          is_whole = false;
          break;
        }
        value.contributors.insert(member);
        value.number = std::max(value.number, runs->second.at(id));
      }
      if (!is_whole) continue;
      outcome.value = value;
      end(worker, id, operation, outcome);
      return true;
    }
    return false;
  }

  bool report(Worker& worker) {
    if (!worker.is_stable() || worker.unreported.empty()) return false;
    Message message;
    message.kind = MessageKind::kCompleted;
    message.generation = worker.present;
    for (const OperationId& id : worker.unreported) {
      message.operations.push_back(id);
      message.counts.push_back(static_cast<std::uint32_t>(worker.crew.size()));
    }
    worker.unreported.clear();
    worker.outbox.push_back(message);
    return true;
  }

  OperationId submit(Worker& worker, std::optional<std::string_view> name, std::uint64_t number, bool is_broadcast) {
    Journal::Submission submission;
    submission.name = name;
    submission.members = static_cast<std::uint32_t>(worker.crew.size());
    Pending operation;
    operation.number = number;
    if (is_broadcast) {
      submission.collective = Collective::kBroadcast;
      submission.root = worker.crew.front();
      operation.root = worker.crew.front();
    }
    const OperationId id = worker.journal.submit(submission);
    if (const auto root = worker.straddling.find(id); root != worker.straddling.end()) {
      operation.root = root->second;
      worker.journal.set_root(id, operation.root);
      worker.straddling.erase(root);
    }
    Pending& kept = worker.operations[id] = operation;
    worker.waits_for.push_back(id);
    if (const auto outcome = worker.outcomes.find(id); outcome != worker.outcomes.end()) {
      const Pending settled = outcome->second;
      worker.outcomes.erase(outcome);
      end(worker, id, kept, settled);
    } else if (worker.is_stable()) {
      start(worker, id, kept);
    }
    return id;
  }

  /// The user's thread: synchronise, then steps of some gradients each, with new workers let in between.
  bool run_program(Worker& worker) {
    if (worker.present == 0) return false;  // Still in init().
    if (!worker.waits_for.empty()) return wait(worker);
    using Line = Worker::Line;
    switch (worker.line) {
      case Line::kSync:
        submit(worker, std::nullopt, worker.step, true);
        return true;
      case Line::kGradients: {
        std::vector<std::string> names = {"weight", "bias", "scale"};
        std::shuffle(names.begin(), names.end(), random_);
        for (const std::string& name : names) submit(worker, name, 0, false);
        submit(worker, std::nullopt, 0, false);
        return true;
      }
      case Line::kStep:
        submit(worker, "step", worker.newcomers > 0 ? 1 : 0, false);
        return true;
      case Line::kAsked:
        return false;
      case Line::kBoundary:
        if (worker.wants_boundary) return false;
        worker.line = Line::kSync;
        return true;
      case Line::kDone:
        // It goes when nobody can need what it has.
        if (!worker.operations.empty() || !worker.is_stable() || worker.beside || worker.old != 0) return false;
        tell(worker, MessageKind::kLeave, worker.present);
        meetings_[worker.present].left.insert(worker.id);
        worker.has_left = true;
        return true;
    }
    return false;
  }

  bool wait(Worker& worker) {
    using Line = Worker::Line;
    Pending last;
    for (const OperationId& id : worker.waits_for) {
      const auto found = worker.operations.find(id);
      if (found != worker.operations.end() && !found->second.value && !found->second.has_failed) return false;
      last = worker.history.at(id);
    }
    worker.waits_for.clear();
    if (worker.line == Line::kSync) {
      if (last.has_failed) return true;  // Its root was lost: again, from another.
      worker.step = last.value->number;
      worker.line = Line::kGradients;
    } else if (worker.line == Line::kGradients) {
      if (last.has_failed) problem_ = "a gradient was lost";
      worker.line = Line::kStep;
    } else {
      ++worker.step;
      worker.line = worker.step >= steps_ ? Line::kDone : Line::kGradients;
      if (last.value->number > 0 && worker.line != Line::kDone) {
        worker.reached_boundary = false;
        worker.wants_boundary = true;
        worker.line = Line::kBoundary;
      }
    }
    return true;
  }

  /// Who is left saw everything, and every operation ended in one way for all of them.
  std::string check_results() const {
    std::map<OperationId, Pending> all;
    for (const Worker& worker : workers_) {
      if (!worker.is_alive || worker.id == 0) continue;
      if (worker.step != steps_) return "a worker left too early";
      for (const auto& [id, operation] : worker.history) {
        const Pending& first = all.try_emplace(id, operation).first->second;
        if (first.value != operation.value || first.has_failed != operation.has_failed) {
          return "two outcomes of operation " + std::to_string(id.key);
        }
      }
    }
    return "";
  }

  std::string describe() const {
    std::string text;
    for (const Worker& worker : workers_) {
      if (!worker.is_alive) continue;
      text += "[id " + std::to_string(worker.id) + " stage " + std::to_string(static_cast<int>(worker.stage)) +
              " generation " + std::to_string(worker.present) + " line " +
              std::to_string(static_cast<int>(worker.line)) + " step " + std::to_string(worker.step) + " waits " +
              std::to_string(worker.waits_for.size()) + (worker.wants_boundary ? " boundary" : "") + "] ";
    }
    return text;
  }

  std::mt19937_64 random_;
  const bool is_elastic_;
  Rendezvous rendezvous_;
  Instant now_{};
  std::uint64_t idle_ = 0;
  std::deque<Worker> workers_;
  std::deque<Server> servers_;
  std::set<std::uint64_t> broken_;  // Generations.
  std::map<std::uint64_t, Meeting> meetings_;
  std::uint64_t places_ = 0;
  std::uint64_t steps_ = 0;
  std::string problem_;
  std::string last_words_;
};

}  // namespace herring::elastic::testing

#include "elastic/world_switch.h"
