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
    Worker worker(is_elastic_);
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

  struct Fate {
    std::uint32_t deaths = 0;
    std::uint32_t arrivals = 0;
    std::uint32_t restarts = 0;  ///< Of servers.
    std::uint32_t aborts = 0;
    std::uint32_t quits = 0;     ///< Workers that shut down in the middle.
    std::uint32_t anews = 0;     ///< Times that all start again from an earlier state.
    bool in_the_middle = false;  ///< Then, while something is under way that not all have called.
  };
  /// Plays until all have finished; returns what was wrong, "" for nothing.
  std::string play(std::uint64_t steps, Fate fate) {
    steps_ = steps;
    calls_more_ = fate.in_the_middle;
    for (std::uint64_t turn = 0; turn < 200'000; ++turn) {
      if (rendezvous_.generation() > 0) strike(fate);
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
  std::uint64_t anews = 0;     // Of one worker each.
  std::uint64_t aborted = 0;   // In another phase than kRunning.
  std::uint64_t refused = 0;   // Planned switches, by who has shut down.

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
  bool leave_present(Worker& worker);

  // world_fate.h: what befalls the job, and how a worker ends.
  void strike(Fate& fate);
  void kill(Worker& worker);
  void abort(Worker& worker);
  bool let_go(Worker& worker);
  bool shut_down(Worker& worker);
  bool is_old(const Worker& worker, const OperationId& id) const;
  void drop_beside(Worker& worker);

  std::size_t alive() const {
    return static_cast<std::size_t>(std::count_if(workers_.begin(), workers_.end(), [](const Worker& worker) {
      return worker.is_alive && !worker.life.has_ended() && worker.life.present() > 0;
    }));
  }
  bool somebody_is_done() const {
    return std::any_of(workers_.begin(), workers_.end(),
                       [](const Worker& worker) { return worker.line == Worker::Line::kDone && !worker.quits; });
  }

  static void lose(Meeting& meeting, WorkerId id) {
    const auto& members = meeting.members;
    if (std::find(members.begin(), members.end(), id) != members.end()) meeting.left.insert(id);
  }

  /// One thing that this worker, or its connection, can do; false where there is none.
  bool act(Worker& worker) {
    constexpr int kKinds = 12;
    const std::uint64_t first = pick(kKinds);
    for (int i = 0; i < kKinds; ++i) {
      if (try_one(worker, static_cast<int>((first + static_cast<std::uint64_t>(i)) % kKinds))) return true;
    }
    return false;
  }

  bool try_one(Worker& worker, int kind) {
    if (kind == 0) return say(worker);
    if (!worker.is_alive || worker.has_left()) return false;
    if (worker.life.has_ended()) return let_go(worker);
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
      case 10:
        return leave_present(worker);
      default:
        return take_turn(worker);
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
      const bool needs_it = worker.is_alive && worker.life.starts_operations() && worker.life.is_draining();
      if (needs_it && worker.old < generation && !broken_.contains(worker.life.present())) {
        problem_ = "the hub of a generation was closed that still drains";
      }
    }
  }

  bool hear(Worker& worker) {
    if (worker.inbox.empty() || !worker.life.listens()) return false;
    const Message message = worker.inbox.front();
    worker.inbox.pop_front();
    if (message.kind == MessageKind::kGo && !message.is_planned && worker.life.phase() != Phase::kOutside) {
      problem_ = "a worker was sent on that has not asked for it";
    }
    using Command = Lifecycle::Command;
    switch (worker.life.hear(message, false).command) {
      case Command::kJoin:
        begin_to_join(worker, message);
        break;
      case Command::kConnect:
        drop_beside(worker);
        worker.beside = message;
        break;
      case Command::kRefuse:
        ++refused;
        tell(worker, MessageKind::kBroken, message.generation);
        break;
      case Command::kDropBeside:
        drop_beside(worker);
        break;
      case Command::kGoOver:
        for (const auto& [id, group] : worker.journal.groups()) {
          meetings_[message.generation].submitted[worker.id].groups.push_back(group);
        }
        break;
      case Command::kNoteNewcomers:
        worker.newcomers = message.workers;
        break;
      case Command::kSettle:
        settle(worker, message);
        break;
      case Command::kEnd:
        problem_ = "a worker was given up: " + message.text;
        break;
      case Command::kNothing:
      case Command::kLeave:  // leave_present() is next.
      case Command::kStopListening:
        break;
    }
    return true;
  }

  void begin_to_join(Worker& worker, const Message& go) {
    worker.go = go;
    Meeting& meeting = meetings_[go.generation];
    meeting.members = go.members;
    for (const Worker& other : workers_) {
      if (!other.is_alive || other.life.has_ended()) lose(meeting, other.id);
    }
    if (!go.at_boundary) return;
    ++boundaries;
    if (!worker.journal.is_new()) mark_start(worker);
  }

  void settle(Worker& worker, const Message& message) {
    for (const OperationId& id : message.operations) {
      const auto found = worker.operations.find(id);
      if (found == worker.operations.end()) continue;
      if (!found->second.value && !found->second.has_failed) problem_ = "settled, but pending here";
      worker.operations.erase(found);
      worker.journal.forget(id);
    }
  }

  /// All have everything: that is what makes it a boundary.
  void mark_start(Worker& worker) {
    worker.journal.mark_start();
    for (const auto& [id, operation] : std::exchange(worker.operations, {})) {
      if (!operation.value && !operation.has_failed) problem_ = "something is under way at a boundary";
      worker.journal.forget(id);
    }
  }

  void tell(Worker& worker, MessageKind kind, std::uint64_t generation, bool at_boundary = false) {
    Message message;
    message.kind = kind;
    message.generation = generation;
    message.at_boundary = at_boundary;
    worker.outbox.push_back(message);
  }

  static bool is_ready_for_boundary(const Worker& worker) {
    if (worker.life.boundary() != Departure::kAnew) return worker.operations.empty();
    return std::none_of(worker.operations.begin(), worker.operations.end(),
                        [](const auto& entry) { return entry.second.value.has_value(); });
  }

  /// The supervisor, before it listens.
  bool take_turn(Worker& worker) {
    if (worker.life.phase() != Phase::kRunning && worker.life.phase() != Phase::kConnected) return false;
    // Who leaves earlier takes away what others still need to get there.
    if (worker.life.take_turn(is_ready_for_boundary(worker)) != Lifecycle::Turn::kListen) return true;
    if (!worker.life.take_break()) return false;
    tell(worker, MessageKind::kBroken, worker.life.present());
    return true;
  }

  bool notice_loss(Worker& worker) {
    if (!is_elastic_) return false;
    const bool joins = worker.life.phase() == Phase::kJoining || worker.life.phase() == Phase::kPlanning;
    if (!joins && !worker.life.starts_operations()) return false;
    const std::uint64_t number = joins ? worker.go.generation : worker.life.present();
    if (meetings_[number].left.empty()) return false;
    if (joins) return fail_to_join(worker);
    // At a boundary others leave before this one does; it follows by itself.
    if (!worker.life.is_sound() || worker.life.boundary() == Departure::kBoundary) return false;
    const bool is_needed = std::any_of(worker.operations.begin(), worker.operations.end(), [](const auto& entry) {
      return !entry.second.value && !entry.second.has_failed;
    });
    if (is_needed) worker.life.break_off("a worker is lost");
    return is_needed;
  }

  bool fail_to_join(Worker& worker) {
    Meeting& meeting = meetings_[worker.go.generation];
    // Who leaves well has sent all that the others need to get in, and they hear that first.
    const bool all_left_well = std::none_of(workers_.begin(), workers_.end(), [&](const Worker& other) {
      return !other.is_alive && meeting.left.contains(other.id);
    });
    if (all_left_well && plan_of(worker)) return false;
    meeting.left.insert(worker.id);
    static_cast<void>(worker.life.advance(Event::kFailToJoin));
    tell(worker, MessageKind::kBroken, worker.go.generation);
    tell(worker, MessageKind::kReady, worker.go.generation);
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
    operation.run = is_old(worker, id) ? worker.old : worker.life.present();
    const auto& crew = worker.crew;
    if (operation.root != 0 && std::find(crew.begin(), crew.end(), operation.root) == crew.end()) {
      operation.root = crew.front();
      worker.journal.set_root(id, operation.root);
    }
    meetings_[operation.run].running[worker.id][id] = operation.number;
  }

  bool complete_one(Worker& worker) {
    const Phase phase = worker.life.phase();
    if (!worker.life.starts_operations() && phase != Phase::kSwitching && phase != Phase::kLeaving) return false;
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
    if (!worker.life.reports() || worker.unreported.empty()) return false;
    Message message;
    message.kind = MessageKind::kCompleted;
    message.generation = worker.life.present();
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
    } else if (worker.life.starts_operations()) {
      start(worker, id, kept);
    }
    return id;
  }

  /// The user's thread: synchronise, then steps of some gradients each, with new workers let in between.
  bool run_program(Worker& worker) {
    if (worker.life.present() == 0) return false;  // Still in init().
    if (!worker.waits_for.empty()) return wait(worker);
    if (worker.life.holds_calls()) return false;
    if (worker.quits && !worker.life.awaits_boundary()) worker.line = Worker::Line::kDone;
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
        submit(worker, "step", worker.wants_anew ? 2 : worker.newcomers > 0 ? 1 : 0, false);
        return true;
      case Line::kAsked:
        return false;
      case Line::kBoundary:
        if (worker.life.awaits_boundary()) return false;
        worker.line = Line::kSync;
        return true;
      case Line::kDone:
        return shut_down(worker);
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
        worker.wants_anew = false;
        const bool is_anew = last.value->number == 2;
        if (calls_more_ && is_anew && pick(2) == 0) {
          submit(worker, "spare", 0, false);  // Some call more than others, and nobody waits for it.
          worker.waits_for.clear();
        }
        worker.life.call_boundary(is_anew ? Departure::kAnew : Departure::kBoundary);
        worker.line = Line::kBoundary;
      }
    }
    return true;
  }

  /// Who is left saw everything, and every operation ended in one way for all of them.
  std::string check_results() const {
    std::map<OperationId, Pending> all;
    for (const Worker& worker : workers_) {
      if (!worker.is_alive || worker.id == 0 || worker.life.present() == 0) continue;
      if (worker.step != steps_ && !worker.quits) return "a worker left too early";
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
      text += "[id " + std::to_string(worker.id) + " " + to_string(worker.life.phase()) + " generation " +
              std::to_string(worker.life.present()) + " line " + std::to_string(static_cast<int>(worker.line)) +
              " step " + std::to_string(worker.step) + " waits " + std::to_string(worker.waits_for.size()) +
              (worker.life.awaits_boundary() ? " boundary" : "") + "] ";
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
  bool calls_more_ = false;
  std::string problem_;
  std::string last_words_;
};

}  // namespace herring::elastic::testing

#include "elastic/world_fate.h"
#include "elastic/world_switch.h"
