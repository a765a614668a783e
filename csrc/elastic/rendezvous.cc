#include "elastic/rendezvous.h"

#include <algorithm>
#include <utility>

#include "control/protocol.h"
#include "core/text.h"
#include "elastic/reports.h"

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

void Rendezvous::count(const Member& member, int sign) {
  const auto add = static_cast<std::uint32_t>(sign);
  Census& all = census(member);
  (member.state == State::kNew ? all.waiting : all.inside) += add;
  if (member.state == State::kReady) all.ready += add;
}

void Rendezvous::set_state(Member& member, State state) {
  count(member, -1);
  member.state = state;
  count(member, 1);
}

void Rendezvous::set_drained(Member& member, bool has_drained) {
  if (member.has_drained == has_drained) return;
  member.has_drained = has_drained;
  undrained_ += has_drained ? static_cast<std::uint32_t>(-1) : 1u;
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
  heartbeats_.heard(connection, now);
  switch (message.kind) {
    case MessageKind::kReady:
      ready(member, message, now);
      break;
    case MessageKind::kBroken:
      broken(member, message, now);
      break;
    case MessageKind::kCompleted:
      return completed(message, now);
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
      return answer(member);
    default:
      actions_.push_back({Action::Kind::kClose, connection, {}, 0, 0, 0});
      remove(id, "dropped: it sent a message that no correct process sends", now);
  }
  consider(now);
}

void Rendezvous::heard(ConnectionId connection, Instant now) { heartbeats_.heard(connection, now); }

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
  const bool is_missed =
      elastic_ && gone.enter.role == Role::kWorker && is_inside(gone) && generation < current_.number;
  if (is_missed) break_current(name(gone) + " has left", now);
}

/// `lost` is empty where it said goodbye.
void Rendezvous::remove(std::uint64_t id, const std::string& lost, Instant now) {
  set_drained(members_.at(id), true);
  const Member gone = members_.at(id);
  members_.erase(id);
  id_of_.erase(gone.connection);
  heartbeats_.forget(gone.connection);
  count(gone, -1);
  if (const auto placed = placed_.find(gone.enter.rank); placed != placed_.end() && placed->second == id) {
    placed_.erase(placed);
  }
  if (gone.enter.role == Role::kWorker && !gone.enter.is_elastic) --fixed_workers_;
  const bool is_worker = gone.enter.role == Role::kWorker;
  const std::string text = name(gone) + (lost.empty() ? " has left" : " is lost: " + lost);
  if (gone.is_planned) cancel_planned(text, now);
  if (!is_inside(gone)) return;
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
  set_state(member, State::kReady);
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
    if (member.state == State::kIn) send(member, message);
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
  for (auto& [id, member] : members_) {
    if (member.is_planned) send(member, message);
    member.is_planned = false;
  }
  actions_.push_back({Action::Kind::kCloseHub, 0, {}, planned_.number, 0, 0});
  planned_ = {};
  plan_after_ = now + kPlanPause;
}

void Rendezvous::completed(const Message& message, Instant now) {
  // Of a generation that has broken: everybody says it again in the next.
  if (message.generation < tally_since_ || message.counts.size() != message.operations.size()) return;
  for (std::size_t i = 0; i < message.operations.size(); ++i) {
    const auto found = tally_.try_emplace(message.operations[i]).first;
    found->second.needed = message.counts[i];
    if (++found->second.complete < found->second.needed) continue;
    settled_.push_back(message.operations[i]);
    tally_.erase(found);
  }
  tell_settled(now);
}

void Rendezvous::tell_settled(Instant now) {
  if (settled_.empty() || now < tell_settled_at_) return;
  tell_settled_at_ = now + settled_pause(workers_.inside);
  for (std::size_t first = 0; first < settled_.size(); first += kMaxOperations) {
    Message message;
    message.kind = MessageKind::kSettled;
    const auto begin = settled_.begin() + static_cast<std::ptrdiff_t>(first);
    const auto count = static_cast<std::ptrdiff_t>(std::min(kMaxOperations, settled_.size() - first));
    message.operations.assign(begin, begin + count);
    for (const std::uint64_t id : current_.workers) {
      if (const Member* member = find(id)) send(*member, message);
    }
  }
  settled_.clear();
}

void Rendezvous::built(Member& member, const Message& message, Instant) {
  if (planned_.number == 0 || message.generation != planned_.number) return;
  if (!member.is_planned || member.enter.role != Role::kWorker || member.built) return;
  member.built = true;
  if (--unbuilt_ > 0) return;
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
    worker.is_planned = false;
    set_drained(worker, false);
    send(worker, go_over);
  }
  for (std::uint32_t rank = 0; rank < next.servers.size(); ++rank) {
    Member& server = members_.at(next.servers[rank]);
    server.rank = rank;
    server.is_planned = false;
    set_state(server, State::kIn);
    send(server, go_over);
  }
  current_ = std::move(next);
}

void Rendezvous::switched(Member& member, const Message& message) {
  if (message.generation == current_.number) set_drained(member, true);
}

void Rendezvous::answer(const Member& member) {
  Message message;
  message.kind = MessageKind::kMissing;
  message.generation = current_.number;
  message.text = missing_text();
  send(member, std::move(message));
}

/// What was under way at a planned switch goes through the generation before, whose hub has to live so long.
void Rendezvous::consider_drained() {
  if (has_drained_ || undrained_ > 0) return;
  has_drained_ = true;
  actions_.push_back({Action::Kind::kCloseHubs, 0, {}, current_.number, 0, 0});
}

void Rendezvous::consider(Instant now) {
  considered_ = now;
  if (ended_ || (form_again_ && now < *form_again_)) return;
  form_again_.reset();
  if (current_.number == 0) {
    consider_start(now);
  } else if (workers_.inside == 0) {
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
  const bool complete = workers_.waiting >= options_.workers && servers_.waiting >= options_.servers;
  const bool enough = workers_.waiting >= options_.min_workers && is_elastic() && workers_.waiting > 0;
  if (!complete && !(enough && now >= start_deadline_)) return;
  Generation first;
  first.workers = all(Role::kWorker, State::kNew);
  first.servers = all(Role::kServer, State::kNew);
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
  if (!current_.is_broken && workers_.ready == 0) return false;
  if (workers_.ready < workers_.inside) return true;
  if (servers_.ready < servers_.inside) {
    current_.patience = std::min(current_.patience, now + kPatience);
    return true;
  }
  const std::vector<std::uint64_t> workers = present(current_.workers);
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
    end(false, "only " + counted(next.workers.size(), "worker is", "workers are") + " left, and at least " +
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
  settled_.clear();
  form(std::move(next), now);
  tally_since_ = current_.number;
  return true;
}

/// Servers that wait are taken in while training goes on.
void Rendezvous::consider_planned(Instant now) {
  if (planned_.number != 0 || servers_.waiting == 0 || now < plan_after_) return;
  // A worker keeps two generations at most: the one before the last switch has to be over for all.
  if (!has_drained_) return;
  if (workers_.inside != current_.workers.size()) return;  // Some have finished: not worth it.
  const std::vector<std::uint64_t> waiting = all(Role::kServer, State::kNew);
  Generation next;
  next.is_planned = true;
  next.workers = current_.workers;
  next.servers = present(current_.servers);
  next.servers.insert(next.servers.end(), waiting.begin(), waiting.end());
  next.why = "new servers: " + std::to_string(waiting.size());
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
    unbuilt_ = static_cast<std::uint32_t>(planned_.workers.size());
    for (const auto* ids : {&planned_.workers, &planned_.servers}) {
      for (const std::uint64_t id : *ids) members_.at(id).is_planned = true;
    }
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
        set_state(member, State::kIn);
        set_drained(member, true);
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
  const std::uint32_t waiting = workers_.waiting;
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
  placed_.clear();
  settled_.clear();
  heartbeats_ = control::Heartbeats(options_.heartbeat, options_.dead_after);
  workers_ = servers_ = {};
  fixed_workers_ = undrained_ = 0;
}

void Rendezvous::close(const std::string& reason) {
  if (!ended_) end(false, reason);
}

void Rendezvous::tick(Instant now) {
  if (ended_ || members_.empty()) return;
  const control::Heartbeats::Due due = heartbeats_.tick(now);
  for (const ConnectionId connection : due.silent) {
    const auto found = id_of_.find(connection);
    if (found == id_of_.end()) continue;
    give_up(found->second, "silent for " + seconds_text(now - heartbeats_.last_heard(connection)), now);
  }
  if (now >= current_.patience) give_up_the_stubborn(now);
  if (planned_.number != 0 && now >= planned_.patience) cancel_planned("it took too long", now);
  if (due.ping) {
    for (const auto& [id, member] : members_) {
      actions_.push_back({Action::Kind::kPing, member.connection, {}, 0, 0, 0});
    }
  }
  tell_settled(now);
  // Nothing has happened but time.
  if (due.ping || !due.silent.empty() || now >= next_deadline()) consider(now);
}

void Rendezvous::give_up(std::uint64_t id, const std::string& reason, Instant now) {
  const Member& member = members_.at(id);
  Message message;
  message.kind = MessageKind::kEnd;
  message.text = "the rendezvous counts this process as lost: " + reason;
  send(member, message);
  actions_.push_back({Action::Kind::kClose, member.connection, {}, 0, 0, 0});
  remove(id, reason, now);
}

void Rendezvous::give_up_the_stubborn(Instant now) {
  std::vector<std::uint64_t> stubborn;
  for (const auto& [id, member] : members_) {
    if (member.state == State::kIn) stubborn.push_back(id);
  }
  for (const std::uint64_t id : stubborn) give_up(id, "it did not leave a generation that was over", now);
}

/// When something is due that is no message, ping or silence.
Instant Rendezvous::next_deadline() const {
  return std::min({start_deadline_, form_again_.value_or(Instant::max()), current_.patience, planned_.patience});
}

Instant Rendezvous::next_wakeup() const {
  if (members_.empty() || ended_) return Instant::max();
  const Instant settled = settled_.empty() ? Instant::max() : tell_settled_at_;
  // Once it has passed without enough workers, the next one that comes is waited for.
  const Instant start = start_deadline_ > considered_ ? start_deadline_ : Instant::max();
  return std::min({heartbeats_.next_wakeup(), start, form_again_.value_or(Instant::max()), settled});
}

}  // namespace herring::elastic
