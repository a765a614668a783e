#include "elastic/rendezvous.h"

#include <algorithm>
#include <utility>

#include "control/membership.h"
#include "control/protocol.h"

namespace herring::elastic {
namespace {

using control::Role;
using control::seconds_text;

// A process that is alive leaves a generation within this; one that does not is given up.
constexpr Duration kPatience = std::chrono::seconds(60);
// Before a planned switch that failed is tried again.
constexpr Duration kPlanPause = std::chrono::seconds(2);
// Before a hub that could not be opened is tried again.
constexpr Duration kHubPause = std::chrono::milliseconds(500);
constexpr std::uint32_t kMaxFruitless = 4;

}  // namespace

std::vector<Rendezvous::Action> Rendezvous::take_actions() { return std::exchange(actions_, {}); }

std::string Rendezvous::name(const Member& member) {
  const std::string who = member.enter.role == Role::kServer ? "server " : "worker ";
  const std::string number = member.state == State::kNew ? "(not in yet)" : std::to_string(member.rank);
  return who + number + " (pid " + std::to_string(member.enter.pid) + " on " + member.enter.host + ")";
}

Rendezvous::Member* Rendezvous::find(std::uint64_t id) {
  const auto found = members_.find(id);
  return found == members_.end() ? nullptr : &found->second;
}

bool Rendezvous::is_in(const std::vector<std::uint64_t>& ids, std::uint64_t id) const {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

std::vector<std::uint64_t> Rendezvous::present(const std::vector<std::uint64_t>& ids) const {
  std::vector<std::uint64_t> result;
  std::copy_if(ids.begin(), ids.end(), std::back_inserter(result),
               [this](std::uint64_t id) { return members_.contains(id); });
  return result;
}

std::vector<std::uint64_t> Rendezvous::all(Role role, State state) const {
  std::vector<std::uint64_t> result;
  for (const auto& [id, member] : members_) {
    if (member.enter.role == role && member.state == state) result.push_back(id);
  }
  return result;
}

bool Rendezvous::is_elastic() const {
  return std::all_of(members_.begin(), members_.end(), [](const auto& entry) {
    return entry.second.enter.role == Role::kServer || entry.second.enter.is_elastic;
  });
}

void Rendezvous::send(const Member& member, Message message) {
  actions_.push_back({Action::Kind::kSend, member.connection, std::move(message), 0, 0, 0});
}

void Rendezvous::receive(ConnectionId connection, const Message& message, Instant now) {
  const auto found = id_of_.find(connection);
  if (found == id_of_.end()) {
    if (message.kind == MessageKind::kEnter) return enter(connection, message, now);
    actions_.push_back({Action::Kind::kClose, connection, {}, 0, 0, 0});
    return;
  }
  const std::uint64_t id = found->second;
  Member& member = members_.at(id);
  member.heard = now;
  switch (message.kind) {
    case MessageKind::kReady:
      ready(member, message, now);
      break;
    case MessageKind::kBroken:
      broken(member, message, now);
      break;
    case MessageKind::kCompleted:
      completed(message);
      break;
    case MessageKind::kLeave:
      leave(id, message.generation, now);
      break;
    case MessageKind::kBuilt:
      built(member, message, now);
      break;
    case MessageKind::kSwitched:
      switched(member, message);
      break;
    case MessageKind::kQuery:
      answer(member);
      break;
    default:
      actions_.push_back({Action::Kind::kClose, connection, {}, 0, 0, 0});
      remove(id, "dropped: it sent a message that no correct process sends", now);
  }
  consider(now);
}

void Rendezvous::enter(ConnectionId connection, const Message& message, Instant now) {
  Member member{next_id_++, connection, message, State::kNew, 0, false, false, false, now};
  std::string refusal;
  if (ended_) refusal = "the job of this rendezvous is over";
  if (const Member* rival = ended_ ? nullptr : rival_of(message)) {
    refusal = two_jobs_text(message, *rival);
    const bool is_young = current_.number == 0 || now - current_.formed < options_.start_within;
    if (is_young) end(false, refusal + ". This job has ended, because some of its processes may be the other job's");
  } else if (current_.number > 0 && message.role == Role::kWorker && !(elastic_ && message.is_elastic)) {
    refusal = "the job has started, and no worker can join: it is not elastic (HERRING_ELASTIC)";
  }
  if (!refusal.empty()) return refuse(connection, refusal);
  if (members_.empty()) {
    next_ping_ = now + options_.heartbeat;
    last_tick_ = now;
    if (current_.number == 0) start_deadline_ = now + options_.start_within;
  }
  id_of_[connection] = member.id;
  members_.emplace(member.id, std::move(member));
  consider(now);
}

void Rendezvous::refuse(ConnectionId connection, const std::string& text) {
  Message answer;
  answer.kind = MessageKind::kEnd;
  answer.text = text;
  actions_.push_back({Action::Kind::kSend, connection, std::move(answer), 0, 0, 0});
  actions_.push_back({Action::Kind::kClose, connection, {}, 0, 0, 0});
}

/// Who has the place that this worker was launched for. One of the two is of another job: launchers give each place
/// once, and who has died is not here any more. Once an elastic job has begun there are no places.
const Rendezvous::Member* Rendezvous::rival_of(const Message& newcomer) const {
  const auto has_place = [this](const Message& enter) {
    return enter.role == Role::kWorker && enter.workers > 1 && enter.workers == options_.workers;
  };
  if (!has_place(newcomer) || (current_.number > 0 && elastic_)) return nullptr;
  for (const auto& [id, member] : members_) {
    if (has_place(member.enter) && member.enter.rank == newcomer.rank) return &member;
  }
  return nullptr;
}

std::string Rendezvous::two_jobs_text(const Message& newcomer, const Member& rival) const {
  const auto named = [](const Message& enter) {
    return "worker " + std::to_string(enter.rank) + " (pid " + std::to_string(enter.pid) + " on " + enter.host + ")";
  };
  return "two processes came for one place: " + named(newcomer) + " and " + named(rival.enter) +
         ", which is here with " + std::to_string(members_.size()) +
         " processes. Two jobs that have one HERRING_RENDEZVOUS and one secret cannot be told apart: give each a "
         "HERRING_RENDEZVOUS of its own, and set HERRING_SECRET, another one for each job";
}

void Rendezvous::heard(ConnectionId connection, Instant now) {
  if (const auto found = id_of_.find(connection); found != id_of_.end()) members_.at(found->second).heard = now;
}

void Rendezvous::disconnected(ConnectionId connection, const std::string& reason, Instant now) {
  const auto found = id_of_.find(connection);
  if (found == id_of_.end()) return;
  remove(found->second, reason, now);
  consider(now);
}

void Rendezvous::leave(std::uint64_t id, std::uint64_t generation, Instant now) {
  const Member gone = members_.at(id);
  actions_.push_back({Action::Kind::kClose, gone.connection, {}, 0, 0, 0});
  remove(id, "", now);
  // It never came to the present one, where the others wait for it.
  const bool is_missed = elastic_ && is_in(current_.workers, id) && generation < current_.number;
  if (is_missed) break_current(name(gone) + " has left", now);
}

/// `lost` is empty where it said goodbye.
void Rendezvous::remove(std::uint64_t id, const std::string& lost, Instant now) {
  const Member gone = members_.at(id);
  members_.erase(id);
  id_of_.erase(gone.connection);
  const bool is_worker = gone.enter.role == Role::kWorker;
  const std::string text = name(gone) + (lost.empty() ? " has left" : " is lost: " + lost);
  if (planned_.number != 0 && (is_in(planned_.workers, id) || is_in(planned_.servers, id))) cancel_planned(text, now);
  if (!is_in(is_worker ? current_.workers : current_.servers, id)) return;
  current_.has_shrunk = true;
  // Where a loss ends the job, those who end because of it are lost after it; a process that had to wait for a core
  // may see several at once.
  constexpr std::size_t kMaxReason = 1000;
  if (elastic_ || !lost_any_) {
    last_reason_ = text;
  } else if (!lost.empty() && is_worker && last_reason_.size() < kMaxReason) {
    last_reason_ += "; then " + text;
  }
  left_any_ = left_any_ || (lost.empty() && is_worker);
  if (!lost.empty() && !is_worker && !lost_any_) lost_server_ = text;
  if (!lost.empty()) {
    // It may not have joined the hub yet, which then waits for it.
    Message news;
    news.role = gone.enter.role;
    news.rank = gone.rank;
    news.text = text;
    actions_.push_back({Action::Kind::kTellHub, 0, std::move(news), current_.number, 0, 0});
  }
  if (lost.empty() || !is_worker) return;
  lost_any_ = true;
  if (gone.enter.is_elastic) break_current(text, now);
}

void Rendezvous::ready(Member& member, const Message& message, Instant now) {
  if (member.state == State::kNew) return;
  member.state = State::kReady;
  const bool is_current = message.generation == current_.number;
  member.at_boundary = message.at_boundary && is_current;
  cancel_planned(name(member) + " has left the generation before", now);
  // It left one that was over already: the present one cannot do without it.
  if (!is_current && member.enter.role == Role::kWorker) break_current(name(member) + " could not go over", now);
  if (member.enter.role == Role::kWorker && !member.at_boundary && !current_.is_broken) {
    break_current(name(member) + " could not go on", now);
  }
}

void Rendezvous::broken(const Member& member, const Message& message, Instant now) {
  if (planned_.number != 0 && message.generation == planned_.number) {
    return cancel_planned(name(member) + ": " + message.text, now);
  }
  if (message.generation != current_.number || current_.is_broken || member.enter.role == Role::kServer) return;
  break_current(name(member) + ": " + message.text, now);
}

void Rendezvous::break_current(const std::string& reason, Instant now) {
  cancel_planned(reason, now);
  if (current_.is_broken || current_.number == 0) return;
  current_.is_broken = true;
  current_.reason = reason;
  current_.patience = now + kPatience;
  last_reason_ = reason;
  Message message;
  message.kind = MessageKind::kBreak;
  message.generation = current_.number;
  message.text = reason;
  for (const auto& [id, member] : members_) {
    if (member.state == State::kIn && (is_in(current_.workers, id) || is_in(current_.servers, id))) {
      send(member, message);
    }
  }
  // Who is still joining it learns at once that there is nothing to join.
  actions_.push_back({Action::Kind::kCloseHubs, 0, {}, current_.number + 1, 0, 0});
}

void Rendezvous::cancel_planned(const std::string& reason, Instant now) {
  if (planned_.number == 0) return;
  Message message;
  message.kind = MessageKind::kBreak;
  message.generation = planned_.number;
  message.is_planned = true;
  message.text = reason;
  for (const auto& [id, member] : members_) {
    if (is_in(planned_.workers, id) || is_in(planned_.servers, id)) send(member, message);
  }
  actions_.push_back({Action::Kind::kCloseHub, 0, {}, planned_.number, 0, 0});
  planned_ = {};
  plan_after_ = now + kPlanPause;
}

void Rendezvous::completed(const Message& message) {
  // Of a generation that has broken: everybody says it again in the next.
  if (message.generation < tally_since_ || message.counts.size() != message.operations.size()) return;
  Message settled;
  settled.kind = MessageKind::kSettled;
  for (std::size_t i = 0; i < message.operations.size(); ++i) {
    Tally& tally = tally_[message.operations[i]];
    tally.needed = message.counts[i];
    if (++tally.complete < tally.needed) continue;
    settled.operations.push_back(message.operations[i]);
    tally_.erase(message.operations[i]);
  }
  if (settled.operations.empty()) return;
  for (const std::uint64_t id : current_.workers) {
    if (const Member* member = find(id)) send(*member, settled);
  }
}

void Rendezvous::built(Member& member, const Message& message, Instant) {
  if (planned_.number == 0 || message.generation != planned_.number) return;
  member.built = true;
  const auto is_built = [this](std::uint64_t id) { return members_.at(id).built; };
  if (!std::all_of(planned_.workers.begin(), planned_.workers.end(), is_built)) return;
  // From here on there is no way back: everybody is connected, and a death is one in the new generation.
  Generation next = std::exchange(planned_, {});
  next.patience = Instant::max();  // That was for building it.
  has_drained_ = false;
  Message go_over;
  go_over.kind = MessageKind::kSwitch;
  go_over.generation = next.number;
  for (std::uint32_t rank = 0; rank < next.workers.size(); ++rank) {
    Member& worker = members_.at(next.workers[rank]);
    worker.rank = rank;
    worker.has_drained = false;
    send(worker, go_over);
  }
  for (std::uint32_t rank = 0; rank < next.servers.size(); ++rank) {
    Member& server = members_.at(next.servers[rank]);
    server.rank = rank;
    server.state = State::kIn;
    send(server, go_over);
  }
  current_ = std::move(next);
}

void Rendezvous::switched(Member& member, const Message& message) {
  if (message.generation == current_.number) member.has_drained = true;
}

void Rendezvous::answer(const Member& member) {
  Message message;
  message.kind = MessageKind::kMissing;
  message.generation = current_.number;
  message.text = missing_text();
  send(member, std::move(message));
}

/// By the ranks that they wished for; who wished for one that is taken stands for the first that nobody wished for.
std::string Rendezvous::missing_text() const {
  if (current_.number > 0) {
    return "the job has begun; workers come in where all that are inside call herring.elastic.step(), servers when the "
           "last switch is over";
  }
  std::vector<bool> here(std::size_t{options_.workers} + options_.servers);
  std::vector<Role> others;
  const auto first_of = [this](Role role) { return role == Role::kWorker ? std::size_t{0} : options_.workers; };
  const auto count_of = [this](Role role) { return role == Role::kWorker ? options_.workers : options_.servers; };
  for (const auto& [id, member] : members_) {
    const Role role = member.enter.role;
    const std::size_t wished = first_of(role) + member.enter.rank;
    if (member.enter.rank < count_of(role) && !here[wished]) {
      here[wished] = true;
    } else {
      others.push_back(role);
    }
  }
  for (const Role role : others) {
    std::size_t place = first_of(role);
    const std::size_t end = place + count_of(role);
    while (place < end && here[place]) ++place;
    if (place < end) here[place] = true;
  }
  return control::waiting_text(here, options_.workers, "are here");
}

/// What was under way at a planned switch goes through the generation before, whose hub has to live so long.
void Rendezvous::consider_drained() {
  if (has_drained_) return;
  for (const std::uint64_t id : present(current_.workers)) {
    if (!members_.at(id).has_drained) return;
  }
  has_drained_ = true;
  actions_.push_back({Action::Kind::kCloseHubs, 0, {}, current_.number, 0, 0});
}

void Rendezvous::consider(Instant now) {
  if (ended_ || (form_again_ && now < *form_again_)) return;
  form_again_.reset();
  if (current_.number == 0) {
    consider_start(now);
  } else if (present(current_.workers).empty()) {
    const bool well = elastic_ ? left_any_ : !lost_any_;
    // While a job begins the workers may have ended because of it.
    const std::string before = lost_server_.empty() ? "" : "; before that " + lost_server_;
    end(well, well ? "all workers have finished" : "no worker is left: " + last_reason_ + before);
  } else if (!consider_next(now)) {
    consider_drained();
    consider_planned(now);
  }
  announce_newcomers();
}

void Rendezvous::consider_start(Instant now) {
  Generation first;
  first.workers = all(Role::kWorker, State::kNew);
  first.servers = all(Role::kServer, State::kNew);
  const bool complete = first.workers.size() >= options_.workers && first.servers.size() >= options_.servers;
  const bool enough = first.workers.size() >= options_.min_workers && is_elastic() && !first.workers.empty();
  if (!complete && !(enough && now >= start_deadline_)) return;
  const auto by_wish = [this](std::uint64_t a, std::uint64_t b) {
    return std::pair(members_.at(a).enter.rank, a) < std::pair(members_.at(b).enter.rank, b);
  };
  std::sort(first.workers.begin(), first.workers.end(), by_wish);
  std::sort(first.servers.begin(), first.servers.end(), by_wish);
  before_.start_deadline = std::exchange(start_deadline_, Instant::max());
  before_.fruitless = fruitless_;
  before_.tally_since = tally_since_;
  elastic_ = is_elastic();
  form(std::move(first), now);
}

/// True where the present generation is on its way out.
bool Rendezvous::consider_next(Instant now) {
  const std::vector<std::uint64_t> workers = present(current_.workers);
  const auto is_ready = [this](std::uint64_t id) { return members_.at(id).state == State::kReady; };
  const bool any_ready = std::any_of(workers.begin(), workers.end(), is_ready);
  if (!current_.is_broken && !any_ready) return false;
  if (!std::all_of(workers.begin(), workers.end(), is_ready)) return true;
  for (const std::uint64_t id : present(current_.servers)) {
    if (!is_ready(id)) {
      current_.patience = std::min(current_.patience, now + kPatience);
      return true;
    }
  }
  Generation next;
  next.workers = workers;
  next.at_boundary =
      std::all_of(workers.begin(), workers.end(), [this](std::uint64_t id) { return members_.at(id).at_boundary; });
  next.why = current_.is_broken ? current_.reason : "";
  if (next.at_boundary) {
    for (const std::uint64_t id : all(Role::kWorker, State::kNew)) next.workers.push_back(id);
  }
  next.servers = present(current_.servers);
  for (const std::uint64_t id : all(Role::kServer, State::kNew)) next.servers.push_back(id);
  if (next.workers.size() < options_.min_workers) {
    end(false, "only " + std::to_string(next.workers.size()) + " workers are left, and at least " +
                   std::to_string(options_.min_workers) + " are needed: " + last_reason_);
    return true;
  }
  const bool was_in_vain = current_.is_broken && !current_.has_shrunk && now - current_.formed < kPatience;
  before_.fruitless = std::exchange(fruitless_, was_in_vain ? fruitless_ + 1 : 0);
  before_.start_deadline = start_deadline_;
  before_.tally_since = tally_since_;
  if (fruitless_ >= kMaxFruitless) {
    end(false, "the job broke " + std::to_string(fruitless_) +
                   " times in a row though no process was lost; the last time: " + current_.reason);
    return true;
  }
  tally_.clear();
  form(std::move(next), now);
  tally_since_ = current_.number;
  return true;
}

/// Servers that wait are taken in while training goes on.
void Rendezvous::consider_planned(Instant now) {
  const std::vector<std::uint64_t> waiting = all(Role::kServer, State::kNew);
  if (planned_.number != 0 || waiting.empty() || now < plan_after_) return;
  // A worker keeps two generations at most: the one before the last switch has to be over for all.
  if (!has_drained_) return;
  if (present(current_.workers).size() != current_.workers.size()) return;  // Some have finished: not worth it.
  Generation next;
  next.is_planned = true;
  next.workers = current_.workers;
  next.servers = present(current_.servers);
  next.servers.insert(next.servers.end(), waiting.begin(), waiting.end());
  next.why = "servers have come: " + std::to_string(waiting.size());
  form(std::move(next), now);
}

void Rendezvous::form(Generation generation, Instant now) {
  generation.number = ++last_number_;
  generation.formed = now;
  generation.patience = generation.is_planned ? now + kPatience : Instant::max();
  actions_.push_back({Action::Kind::kOpenHub,
                      0,
                      {},
                      generation.number,
                      static_cast<std::uint32_t>(generation.workers.size()),
                      static_cast<std::uint32_t>(generation.servers.size())});
  if (generation.is_planned) {
    planned_ = std::move(generation);
    return;
  }
  has_drained_ = true;  // All have left what was before.
  before_.current = std::exchange(current_, std::move(generation));
}

void Rendezvous::hub_failed(std::uint64_t generation, const std::string& reason, Instant now) {
  if (planned_.number == generation) return cancel_planned(reason, now);
  if (current_.number != generation || ended_) return;
  if (!failing_since_) failing_since_ = now;
  if (now - *failing_since_ >= kPatience) return end(false, "no hub could be opened: " + reason);
  // Nobody has heard of it: all is as it was.
  current_ = std::exchange(before_.current, {});
  tally_since_ = before_.tally_since;
  fruitless_ = before_.fruitless;
  start_deadline_ = before_.start_deadline;
  form_again_ = now + kHubPause;
}

void Rendezvous::hub_opened(std::uint64_t generation, std::uint16_t port, Instant) {
  const bool is_planned = planned_.number == generation;
  const Generation& formed = is_planned ? planned_ : current_;
  if (formed.number != generation) return;
  failing_since_.reset();
  Message go;
  go.kind = MessageKind::kGo;
  go.generation = generation;
  go.workers = static_cast<std::uint32_t>(formed.workers.size());
  go.servers = static_cast<std::uint32_t>(formed.servers.size());
  go.port = port;
  go.members = formed.workers;
  go.at_boundary = formed.at_boundary;
  go.is_planned = is_planned;
  go.text = formed.why;
  const auto tell = [&](const std::vector<std::uint64_t>& ids) {
    for (std::uint32_t rank = 0; rank < ids.size(); ++rank) {
      Member& member = members_.at(ids[rank]);
      member.built = false;
      if (!is_planned) {
        member.state = State::kIn;
        member.rank = rank;
        member.at_boundary = false;
      }
      go.rank = rank;
      send(member, go);
    }
  };
  tell(formed.workers);
  tell(formed.servers);
  if (!is_planned) actions_.push_back({Action::Kind::kCloseHubs, 0, {}, generation, 0, 0});
  announced_ = 0;
  announce_newcomers();
}

void Rendezvous::announce_newcomers() {
  const auto waiting = static_cast<std::uint32_t>(all(Role::kWorker, State::kNew).size());
  if (ended_ || waiting == announced_ || current_.number == 0) return;
  announced_ = waiting;
  Message message;
  message.kind = MessageKind::kNewcomers;
  message.workers = waiting;
  for (const std::uint64_t id : present(current_.workers)) send(members_.at(id), message);
}

void Rendezvous::end(bool well, const std::string& text) {
  ended_ = true;
  ended_well_ = well;
  Message message;
  message.kind = MessageKind::kEnd;
  message.is_elastic = well;
  message.text = text;
  for (const auto& [id, member] : members_) {
    send(member, message);
    actions_.push_back({Action::Kind::kClose, member.connection, {}, 0, 0, 0});
  }
  members_.clear();
  id_of_.clear();
  next_ping_ = Instant::max();
}

void Rendezvous::close(const std::string& reason) {
  if (!ended_) end(false, reason);
}

void Rendezvous::tick(Instant now) {
  if (ended_ || members_.empty()) return;
  if (now - last_tick_ > options_.heartbeat + options_.dead_after / 2) {
    // It did not run itself: nobody's silence can be told from its own.
    for (auto& [id, member] : members_) member.heard = now;
  }
  last_tick_ = now;
  std::vector<std::pair<std::uint64_t, std::string>> lost;
  const bool out_of_patience = now >= current_.patience;
  for (const auto& [id, member] : members_) {
    if (now - member.heard >= options_.dead_after) {
      lost.emplace_back(id, "silent for " + seconds_text(now - member.heard));
    } else if (out_of_patience && member.state == State::kIn &&
               (is_in(current_.workers, id) || is_in(current_.servers, id))) {
      lost.emplace_back(id, "it did not leave a generation that was over");
    }
  }
  for (const auto& [id, reason] : lost) {
    const Member member = members_.at(id);
    Message message;
    message.kind = MessageKind::kEnd;
    message.text = "this process was given up by the others: " + reason;
    send(member, message);
    actions_.push_back({Action::Kind::kClose, member.connection, {}, 0, 0, 0});
    remove(id, reason, now);
  }
  if (planned_.number != 0 && now >= planned_.patience) cancel_planned("it took too long", now);
  if (now >= next_ping_) {
    for (const auto& [id, member] : members_) {
      actions_.push_back({Action::Kind::kPing, member.connection, {}, 0, 0, 0});
    }
    next_ping_ = now + options_.heartbeat;
  }
  consider(now);
}

Instant Rendezvous::next_wakeup() const {
  // Silence is found with the pings, which are more frequent.
  if (members_.empty() || ended_) return Instant::max();
  return std::min({next_ping_, start_deadline_, form_again_.value_or(Instant::max())});
}

}  // namespace herring::elastic
