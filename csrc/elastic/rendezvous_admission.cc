// Who may come in, who is of another job, and who has not come yet.
#include <utility>

#include "control/membership.h"
#include "elastic/rendezvous.h"

namespace herring::elastic {

using control::Role;

void Rendezvous::enter(ConnectionId connection, const Message& message, Instant now) {
  Member member{next_id_++, connection, message, State::kNew, 0, false, false, false, true};
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
  if (members_.empty() && current_.number == 0) start_deadline_ = now + options_.start_within;
  heartbeats_.watch(connection, now);
  id_of_[connection] = member.id;
  if (has_place(message)) placed_.try_emplace(message.rank, member.id);
  if (message.role == Role::kWorker && !message.is_elastic) ++fixed_workers_;
  count(member, 1);
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
  if (!has_place(newcomer) || (current_.number > 0 && elastic_)) return nullptr;
  const auto found = placed_.find(newcomer.rank);
  return found == placed_.end() ? nullptr : &members_.at(found->second);
}

bool Rendezvous::has_place(const Message& enter) const {
  return enter.role == Role::kWorker && enter.workers > 1 && enter.workers == options_.workers;
}

std::string Rendezvous::two_jobs_text(const Message& newcomer, const Member& rival) const {
  const auto named = [](const Message& enter) {
    return "worker " + std::to_string(enter.rank) + " (pid " + std::to_string(enter.pid) + " on " + enter.host + ")";
  };
  return "two processes claim the same rank: " + named(newcomer) + " and " + named(rival.enter) +
         ", which is here with " + std::to_string(members_.size()) +
         " processes. Two jobs with the same HERRING_RENDEZVOUS and secret cannot be told apart: give each job a "
         "HERRING_RENDEZVOUS of its own and a HERRING_SECRET of its own";
}

/// By the ranks that they wished for; who wished for one that is taken stands for the first that nobody wished for.
std::string Rendezvous::missing_text() const {
  if (current_.number > 0) {
    return "the job has begun; new workers join when all others call herring.elastic.step(), new servers when the "
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

}  // namespace herring::elastic
