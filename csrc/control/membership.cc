#include "control/membership.h"

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "core/text.h"

namespace herring::control {
namespace {

/// "worker 3", "workers 1-5, 9"; at most 8 ranges are spelled out.
std::string ranks_text(std::string_view role, const std::vector<std::uint32_t>& ranks) {
  constexpr std::size_t kMaxRanges = 8;
  std::string text(role);
  if (ranks.size() > 1) text += 's';
  std::size_t ranges = 0;
  for (std::size_t i = 0; i < ranks.size(); ++ranges) {
    if (ranges == kMaxRanges) return text + " and " + std::to_string(ranks.size() - i) + " more";
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
    if (last > i) text += (last == i + 1 ? ", " : "-") + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace

std::string waiting_text(const std::vector<bool>& here, std::uint32_t workers, std::string_view verb) {
  std::vector<std::uint32_t> missing_workers;
  std::vector<std::uint32_t> missing_servers;
  for (std::uint32_t i = 0; i < here.size(); ++i) {
    if (here[i]) continue;
    if (i < workers) {
      missing_workers.push_back(i);
    } else {
      missing_servers.push_back(i - workers);
    }
  }
  const std::size_t missing = missing_workers.size() + missing_servers.size();
  if (missing == 0) return "nobody is missing any more; all " + std::to_string(here.size()) + " " + std::string(verb);
  std::string text = "waiting for ";
  if (!missing_workers.empty()) text += ranks_text("worker", missing_workers);
  if (!missing_workers.empty() && !missing_servers.empty()) text += " and ";
  if (!missing_servers.empty()) text += ranks_text("server", missing_servers);
  return text + "; " + std::to_string(here.size() - missing) + " of " + std::to_string(here.size()) + " " +
         std::string(verb);
}

Membership::Membership(const Options& options)
    : options_(options),
      slots_(std::size_t{options.workers} + options.servers),
      heartbeats_(options.heartbeat, options.dead_after) {}

std::vector<Membership::Action> Membership::take_actions() { return std::exchange(actions_, {}); }

void Membership::send(ConnectionId connection, FrameType type, SharedBody body) {
  actions_.push_back({Action::Kind::kSend, connection, type, std::move(body)});
}

void Membership::send_all(FrameType type, const SharedBody& body) {
  for (const Slot& slot : slots_) {
    if (slot.connection != 0) send(slot.connection, type, body);
  }
}

void Membership::close_connection(Slot& slot) {
  actions_.push_back({Action::Kind::kClose, slot.connection, FrameType::kClosing, nullptr});
  unwatch(slot);
}

void Membership::unwatch(Slot& slot) {
  slot.heard = heartbeats_.last_heard(slot.connection);
  heartbeats_.forget(slot.connection);
  index_of_.erase(slot.connection);
  slot.connection = 0;
}

std::size_t Membership::index_of(const Member& member) const {
  return member.role == Role::kWorker ? member.rank : std::size_t{options_.workers} + member.rank;
}

/// Some worker is gone: whoever comes now is of the next job at this port, and waits for that one's hub.
bool Membership::is_over() const {
  const auto workers = slots_.begin() + options_.workers;
  return started_ && std::any_of(slots_.begin(), workers, [](const Slot& slot) { return slot.state != State::kHere; });
}

void Membership::join(ConnectionId connection, const Join& join, Instant now) {
  auto refuse = reason_to_refuse(join);
  if (const auto other = other_launch(join.member); other && doubt_.empty()) {
    refuse = other;
  } else if (const auto rival = rival_of(join); rival && doubt_.empty()) {
    refuse = Refuse{RefuseCode::kOtherJob, two_jobs_text(join.member, *rival, now)};
    // With other sizes none of its processes was let in, nor will be.
    if (fits(join) && options_.doubt_for > Duration::zero() &&
        (!started_ || now - options_.opened < options_.doubt_for)) {
      end_in_doubt(refuse->text);
    }
  }
  if (refuse) {
    ++counters_.refused;
    send(connection, FrameType::kRefuse, make_body(encode(*refuse)));
    actions_.push_back({Action::Kind::kClose, connection, FrameType::kClosing, nullptr});
    return;
  }
  const std::size_t index = index_of(join.member);
  slots_[index] = Slot{join.member, State::kHere, connection, {}, {}, {}, false};
  index_of_[connection] = index;
  heartbeats_.watch(connection, now);
  ++counters_.joined;
  send(connection, FrameType::kWelcome, make_body(encode(Welcome{options_.heartbeat, options_.dead_after})));
  start_when_complete(now);
}

void Membership::start_when_complete(Instant now) {
  if (started_ || index_of_.size() < slots_.size() || !doubt_.empty() || now < options_.opened + options_.start_delay)
    return;
  started_ = true;
  std::vector<Member> members;
  members.reserve(slots_.size());
  for (const Slot& slot : slots_) members.push_back(slot.member);
  for (auto& frame : encode_roster(options_.job_id, members)) {
    send_all(FrameType::kRoster, make_body(std::move(frame)));
  }
}

void Membership::receive(ConnectionId connection, const Frame& frame, Instant now) {
  const auto found = index_of_.find(connection);
  if (found == index_of_.end()) return;
  const std::size_t index = found->second;
  heartbeats_.heard(connection, now);
  switch (frame.type) {
    case FrameType::kPong:
      if (!decode_serial(frame.body)) violation(index, "a bad Pong");
      return;
    case FrameType::kExchange:
      if (const auto body = decode_exchange(frame.body); body && started_) return exchange(index, *body, now);
      return violation(index, "a bad Exchange");
    case FrameType::kQuery:
      if (const auto name = decode_text(frame.body)) return answer_query(index, *name);
      return violation(index, "a bad Query");
    case FrameType::kFail:
      if (const auto reason = decode_text(frame.body); reason && started_) {
        return gone(index, State::kFailed, HubEvent::Kind::kFailed, *reason);
      }
      return violation(index, "a bad Fail");
    case FrameType::kUnreachable:
      if (const auto body = decode_unreachable(frame.body);
          body && started_ && std::ranges::all_of(body->indices, [&](std::uint32_t other) {
            return other < slots_.size() && other != index;
          })) {
        return judge_links(index, *body);
      }
      return violation(index, "a bad Unreachable");
    case FrameType::kAbortGroup:
      if (const auto body = decode_abort_group(frame.body); body && started_ && index < options_.workers) {
        return tell_others(
            index, {HubEvent::Kind::kGroupAborted, static_cast<std::uint32_t>(index), body->reason, body->group});
      }
      return violation(index, "a bad AbortGroup");
    case FrameType::kLeaveGroup:
      if (const auto body = decode_leave_group(frame.body); body && started_ && index < options_.workers) {
        return tell_others(
            index, {HubEvent::Kind::kGroupLeft, static_cast<std::uint32_t>(index), "", body->group, body->calls});
      }
      return violation(index, "a bad LeaveGroup");
    case FrameType::kLeave:
      close_connection(slots_[index]);
      return gone(index, State::kLeft, HubEvent::Kind::kLeft, "left");
    default:
      return violation(index, "a frame of type " + std::to_string(static_cast<int>(frame.type)));
  }
}

void Membership::disconnected(ConnectionId connection, const std::string& reason, Instant now) {
  const auto found = index_of_.find(connection);
  if (found == index_of_.end()) return;
  const std::size_t index = found->second;
  unwatch(slots_[index]);
  ++counters_.lost;
  const std::string heard = "last heard from " + seconds_text(std::max(now - slots_[index].heard, Duration::zero()));
  gone(index, State::kLost, HubEvent::Kind::kLost, reason + "; " + heard + " before");
}

void Membership::violation(std::size_t index, const std::string& what) {
  ++counters_.protocol_errors;
  ++counters_.lost;
  const std::string reason = "dropped: it sent " + what + ", which no correct member sends at that point";
  send(slots_[index].connection, FrameType::kClosing, make_body(encode_text(reason)));
  close_connection(slots_[index]);
  gone(index, State::kLost, HubEvent::Kind::kLost, reason);
}

/// Both ends answer the hub, and nothing passes between them. One of them has to go: the one that is not reached, which
/// is a server's lane wherever there is a choice and may cost nothing; or the one that reaches nobody.
void Membership::judge_links(std::size_t index, const Unreachable& unreachable) {
  if (slots_[index].state != State::kHere) return;
  const std::string tail =
      " over the data plane: nothing came back for " + seconds_text(unreachable.silent) +
      ", though both answer worker 0. Look at the network between their hosts, and at filters on the way";
  if (unreachable.of > 1 && unreachable.answering == 0) {
    const std::string whom = to_string(slots_[unreachable.indices.front()].member) + " and the " +
                             std::to_string(unreachable.of - 1) + " others that it waits for";
    return drop_for_link(index, "it cannot reach " + whom + tail);
  }
  for (const std::uint32_t other : unreachable.indices) {
    if (slots_[other].state != State::kHere) continue;
    drop_for_link(other, to_string(slots_[index].member) + " cannot reach it" + tail);
  }
}

/// The others hear first: worker 0's process may end when it hears.
void Membership::drop_for_link(std::size_t index, const std::string& reason) {
  ++counters_.lost;
  const ConnectionId connection = slots_[index].connection;
  gone(index, State::kLost, HubEvent::Kind::kLost, reason);
  if (connection == 0) return;
  send(connection, FrameType::kClosing,
       make_body(encode_text(to_string(slots_[index].member) + ", this process, counts as lost: " + reason)));
  close_connection(slots_[index]);
}

void Membership::gone(std::size_t index, State state, HubEvent::Kind kind, const std::string& reason) {
  Slot& slot = slots_[index];
  if (!started_) {
    slot.state = State::kAbsent;  // Its place is free again: a restarted process may take it, for a while.
    slot.gave_up = kind == HubEvent::Kind::kLeft;
    if (kind == HubEvent::Kind::kLost) {
      slot.lost = to_string(slot.member) + " is lost: " + reason;
      slot.back_until = slot.heard + options_.dead_after;
      next_return_ = std::min(next_return_, slot.back_until);
    }
    return;
  }
  if (slot.state != State::kHere) return;  // One event a member: the first says why.
  slot.state = state;
  ++gone_count_;
  if (!first_gone_) {
    first_gone_ = index;
    first_gone_reason_ = reason;
  }
  if (!first_needed_gone_ && index < options_.workers) first_needed_gone_ = index;
  const SharedBody body = make_body(encode(Event{kind, static_cast<std::uint32_t>(index), reason}));
  // All workers have said goodbye: they wait for nobody, but for worker 0's process not to end before the job does.
  const bool is_quiet = has_parted_ && kind == HubEvent::Kind::kLeft && index != 0;
  // Worker 0 last: its process holds the hub, and may end when it hears, before the hub has told the others.
  for (std::size_t other = slots_.size(); other-- > 0;) {
    const bool is_told = slots_[other].connection != 0 && other != index && (!is_quiet || other >= options_.workers);
    if (is_told) send(slots_[other].connection, FrameType::kEvent, body);
  }
  fail_rounds_without(index);
}

/// Whoever is not in the group takes no notice: the hub knows no groups.
void Membership::tell_others(std::size_t index, const Event& event) {
  if (slots_[index].state != State::kHere) return;
  const SharedBody body = make_body(encode(event));
  for (const Slot& other : slots_) {
    if (other.connection != 0 && &other != &slots_[index]) send(other.connection, FrameType::kEvent, body);
  }
}

std::string Membership::gone_text(std::size_t index) const {
  const Slot& slot = slots_[index];
  if (slot.state == State::kLeft) return to_string(slot.member) + " has left";
  const std::string why = first_gone_ == index ? ": " + first_gone_reason_ : "";
  return to_string(slot.member) + (slot.state == State::kFailed ? " has failed" : " is lost") + why;
}

/// A server that is gone has nobody to say goodbye to.
bool Membership::is_needed(std::size_t index, const std::string& name) const {
  return name != kGoodbyeRound || index < options_.workers || slots_[index].state == State::kHere;
}

bool Membership::is_complete(const std::string& name, const Round& round) const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!round.brought[i] && is_needed(i, name)) return false;
  }
  return true;
}

void Membership::fail_rounds_without(std::size_t gone) {
  for (auto it = rounds_.begin(); it != rounds_.end();) {
    const Round& round = it->second;
    if (round.brought[gone]) {
      ++it;
      continue;
    }
    if (!is_needed(gone, it->first)) {
      if (!is_complete(it->first, round)) {
        ++it;
        continue;
      }
      complete(it->first, round);
      it = rounds_.erase(it);
      continue;
    }
    const SharedBody body =
        make_body(encode(ExchangeFailed{it->first, static_cast<std::uint32_t>(gone), gone_text(gone)}));
    for (std::size_t i = slots_.size(); i-- > 0;) {
      if (round.brought[i] && slots_[i].connection != 0) send(slots_[i].connection, FrameType::kExchangeFailed, body);
    }
    it = rounds_.erase(it);
  }
}

void Membership::exchange(std::size_t index, const Exchange& exchange, Instant now) {
  auto it = rounds_.find(exchange.name);
  if (it == rounds_.end()) {
    const auto missing = exchange.name == kGoodbyeRound ? first_needed_gone_ : first_gone_;
    if (missing) {
      // A new round needs everybody.
      send(slots_[index].connection, FrameType::kExchangeFailed,
           make_body(encode(ExchangeFailed{exchange.name, static_cast<std::uint32_t>(*missing), gone_text(*missing)})));
      return;
    }
    if (rounds_.size() >= kMaxOpenRounds) return violation(index, "more names at once than the hub keeps");
    it = rounds_.emplace(exchange.name, Round{}).first;
    it->second.blobs.resize(slots_.size());
    it->second.brought.resize(slots_.size(), false);
    it->second.wants.resize(slots_.size(), false);
  }
  Round& round = it->second;
  if (round.brought[index]) return violation(index, "a second blob for exchange \"" + exchange.name + "\"");
  round.brought[index] = true;
  ++round.count;
  round.wants[index] = exchange.wants == Wants::kBlobs;
  round.blobs[index].assign(exchange.blob.begin(), exchange.blob.end());
  // Looked at by all only where it may be: a large job has as many of these messages as members.
  if (round.count + gone_count_ >= slots_.size() && is_complete(it->first, round)) {
    complete(it->first, round);
    rounds_.erase(it);
  } else if (exchange.name == kGoodbyeRound && index < options_.workers) {
    finished_.push_back(static_cast<std::uint32_t>(index));
    next_finished_ = std::min(next_finished_, now + goodbye_patience());
  }
}

/// Each word to everybody costs as much as there are members, and as many may have to be told.
Duration Membership::goodbye_patience() const {
  return std::max<Duration>(kGoodbyePatience, std::chrono::milliseconds(1) * options_.workers);
}

void Membership::tell_finished(Instant now) {
  if (now < next_finished_) return;
  next_finished_ = Instant::max();
  const auto round = rounds_.find(std::string(kGoodbyeRound));
  for (const std::uint32_t index : std::exchange(finished_, {})) {
    if (slots_[index].state != State::kHere) continue;
    const SharedBody body = make_body(encode(Event{HubEvent::Kind::kFinished, index, "waits to say goodbye"}));
    for (std::size_t other = 0; other < slots_.size(); ++other) {
      const bool has_come = round != rounds_.end() && round->second.brought[other];
      if (slots_[other].connection != 0 && other != index && !has_come) {
        send(slots_[other].connection, FrameType::kEvent, body);
      }
    }
  }
}

void Membership::complete(const std::string& name, const Round& round) {
  ++counters_.exchanges;
  if (name == kGoodbyeRound) {
    finished_.clear();
    has_parted_ = true;
  }
  std::vector<SharedBody> frames;
  if (std::ranges::count(round.wants, true) > 0) {
    for (auto& frame : encode_gathered(name, round.blobs)) frames.push_back(make_body(std::move(frame)));
  }
  const SharedBody completed = make_body(encode_completed(name));
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const ConnectionId connection = slots_[i].connection;
    if (connection == 0 || !round.brought[i]) continue;
    if (!round.wants[i]) send(connection, FrameType::kGathered, completed);
    for (std::size_t k = 0; round.wants[i] && k < frames.size(); ++k) send(connection, FrameType::kGathered, frames[k]);
  }
}

void Membership::answer_query(std::size_t index, const std::string& name) {
  std::vector<bool> here(slots_.size(), true);
  std::string text;
  if (name.empty()) {
    for (std::size_t i = 0; i < slots_.size(); ++i) here[i] = slots_[i].state != State::kAbsent || slots_[i].gave_up;
    text = waiting_text(here, options_.workers, "are here");
    if (failed_handshakes_ > 0 && !started_) {
      text +=
          ". " + counted(failed_handshakes_, "connection") + " ended in the handshake: HERRING_SECRET may differ there";
    }
  } else {
    if (const auto it = rounds_.find(name); it != rounds_.end()) here = it->second.brought;
    text = waiting_text(here, options_.workers, "have brought theirs");
  }
  send(slots_[index].connection, FrameType::kMissing, make_body(encode_missing(name, text)));
}

void Membership::never_comes(Role role, std::uint32_t rank, const std::string& why) {
  if (started_ || closing_ || !start_failure_.empty() || !doubt_.empty()) return;
  const std::size_t index = index_of(Member{role, rank, 0, {}, {}});
  // Who is here ends its connection itself, and may be replaced for a while.
  if (index >= slots_.size() || slots_[index].state == State::kHere) return;
  start_failure_ = why + "; the job could not start without it";
  const auto number = static_cast<std::uint32_t>(index);
  send_all(FrameType::kEvent, make_body(encode(Event{HubEvent::Kind::kLost, number, start_failure_})));
}

/// Who had come and went before all were there is given dead_after to come back; then nobody waits for it any more.
void Membership::find_lost_before_start(Instant now) {
  if (now < next_return_) return;
  next_return_ = Instant::max();
  if (started_ || !start_failure_.empty() || !doubt_.empty()) return;
  for (std::uint32_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.lost.empty()) continue;
    if (now < slot.back_until) {
      next_return_ = std::min(next_return_, slot.back_until);
      continue;
    }
    next_return_ = Instant::max();
    start_failure_ = slot.lost + "; the job could not start without it";
    send_all(FrameType::kEvent, make_body(encode(Event{HubEvent::Kind::kLost, i, start_failure_})));
    return;
  }
}

void Membership::watch_silence(Instant now) {
  const Heartbeats::Due due = heartbeats_.tick(now);
  if (due.stalled) {
    // The hub itself did not run: who is to come back may have tried.
    for (Slot& slot : slots_) slot.back_until = now + options_.dead_after;
    if (next_return_ != Instant::max()) next_return_ = now + options_.dead_after;
  }
  for (const ConnectionId connection : due.silent) {
    const auto found = index_of_.find(connection);
    if (found == index_of_.end()) continue;
    const std::size_t index = found->second;
    const std::string reason = "silent for " + seconds_text(now - heartbeats_.last_heard(connection));
    ++counters_.lost;
    send(connection, FrameType::kClosing, make_body(encode_text("this process was " + reason + " and counts as lost")));
    close_connection(slots_[index]);
    gone(index, State::kLost, HubEvent::Kind::kLost, reason);
  }
  if (due.ping) send_all(FrameType::kPing, make_body(encode_serial(++ping_serial_)));
}

void Membership::tick(Instant now) {
  if (index_of_.empty()) return;
  watch_silence(now);
  find_lost_before_start(now);
  start_when_complete(now);
  tell_finished(now);
}

Instant Membership::next_wakeup() const {
  if (index_of_.empty()) return Instant::max();
  const bool may_start = !started_ && index_of_.size() == slots_.size() && doubt_.empty();
  const Instant start = may_start ? options_.opened + options_.start_delay : Instant::max();
  return std::min({heartbeats_.next_wakeup(), next_return_, next_finished_, start});
}

void Membership::close() {
  closing_ = true;
  const Slot& first = slots_.front();
  std::string reason = "worker 0's process has closed the hub";
  if (first.state == State::kLeft) reason = "worker 0 has finished";
  if (first.state == State::kFailed) reason = gone_text(0);
  const SharedBody body = make_body(encode_text(reason));
  for (Slot& slot : slots_) {
    if (slot.connection == 0) continue;
    send(slot.connection, FrameType::kClosing, body);
    close_connection(slot);
  }
}

}  // namespace herring::control
