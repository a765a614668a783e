// Who may join, and who is of another job.
#include <algorithm>
#include <utility>

#include "control/membership.h"
#include "core/status.h"
#include "core/text.h"

namespace herring::control {
namespace {

/// Where the launchers of two workers say that they are of two jobs: how each calls its own. The first variable that
/// both have decides: a launcher may run under another one, and they need not nest alike.
std::optional<std::pair<std::string, std::string>> different_launches(std::string_view one, std::string_view other) {
  const auto entries = [](std::string_view text) {
    std::vector<std::pair<std::string, std::string>> result;
    while (!text.empty()) {
      const std::string_view line = text.substr(0, text.find('\n'));
      text.remove_prefix(std::min(line.size() + 1, text.size()));
      const std::size_t equals = line.find('=');
      if (equals != line.npos) result.emplace_back(line.substr(0, equals), line.substr(equals + 1));
    }
    return result;
  };
  const auto others = entries(other);
  for (const auto& [name, value] : entries(one)) {
    const auto found = std::ranges::find(others, name, &std::pair<std::string, std::string>::first);
    if (found == others.end()) continue;
    if (value == found->second) return std::nullopt;
    return std::pair(printable(name + "=" + value), printable(name + "=" + found->second));
  }
  return std::nullopt;
}

std::string sizes_text(std::uint32_t workers, std::uint32_t servers) {
  return std::to_string(workers) + " workers and " + std::to_string(servers) + " servers";
}

}  // namespace

bool Membership::fits(const Join& join) const {
  const bool is_told = join.workers == 0 && join.member.role == Role::kServer;
  return (is_told || join.workers == options_.workers) && join.servers == options_.servers;
}

std::optional<Refuse> Membership::reason_to_refuse(const Join& join) const {
  if (closing_) return Refuse{RefuseCode::kClosing, "the hub is closing"};
  if (!doubt_.empty()) return Refuse{RefuseCode::kOtherJob, doubt_};
  if (!start_failure_.empty()) return Refuse{RefuseCode::kLost, start_failure_};
  if (started_) {
    return Refuse{RefuseCode::kStarted, "the job of this hub has already started with all its " +
                                            sizes_text(options_.workers, options_.servers)};
  }
  if (!fits(join)) {
    return Refuse{RefuseCode::kSizes, to_string(join.member) + " was started for " +
                                          sizes_text(join.workers, join.servers) + ", but worker 0 for " +
                                          sizes_text(options_.workers, options_.servers) +
                                          "; start all processes with the same numbers"};
  }
  if (join.member.rank >= (join.member.role == Role::kWorker ? options_.workers : options_.servers)) {
    return Refuse{RefuseCode::kRankRange, to_string(join.member) + " has a rank that does not exist: the job has " +
                                              sizes_text(options_.workers, options_.servers) + ", counted from 0"};
  }
  const Slot& slot = slots_[index_of(join.member)];
  if (slot.state != State::kAbsent) {
    return Refuse{RefuseCode::kRankTaken, to_string(join.member) + " cannot join: this rank is taken by " +
                                              to_string(slot.member) + "; give every process a rank of its own"};
  }
  return std::nullopt;
}

/// Launchers number their jobs: two workers that have different numbers are of two jobs, and neither is in doubt.
std::optional<Refuse> Membership::other_launch(const Member& newcomer) const {
  if (!options_.lead || newcomer.role != Role::kWorker || closing_ || is_over()) return std::nullopt;
  const auto found = different_launches(options_.lead->launch, newcomer.launch);
  if (!found) return std::nullopt;
  return Refuse{RefuseCode::kOtherJob,
                to_string(newcomer) + " was launched with " + found->second + ", and " + to_string(*options_.lead) +
                    ", whose hub this is, with " + found->first +
                    ": they are two jobs. Give each a MASTER_PORT of its own; if they are to be one job, set "
                    "HERRING_SECRET to the same value in all its processes"};
}

/// Who has the place that this process comes for, where that is another process of a job that lives.
std::optional<Member> Membership::rival_of(const Join& join) const {
  if (closing_ || is_over() || !start_failure_.empty()) return std::nullopt;
  const Member& self = join.member;
  const auto is_other = [&self](const Member& member) {
    return member.pid != self.pid || member.host_identity != self.host_identity;
  };
  const bool is_lead = self.role == Role::kWorker && self.rank == 0;
  if (is_lead && options_.lead) return is_other(*options_.lead) ? options_.lead : std::nullopt;
  if (options_.doubt_for == Duration::zero() ||
      self.rank >= (self.role == Role::kWorker ? options_.workers : options_.servers)) {
    return std::nullopt;
  }
  const Slot& slot = slots_[index_of(self)];
  if (slot.state != State::kHere || !is_other(slot.member)) return std::nullopt;
  return slot.member;
}

std::string Membership::two_jobs_text(const Member& newcomer, const Member& rival, Instant now) const {
  std::string text = "two processes claim the same rank: " + to_string(newcomer) + " and " + to_string(rival) + ". ";
  if (options_.lead) {
    text += "The hub of the job that was here first is that of " + to_string(*options_.lead) + ", for " +
            seconds_text(now - options_.opened) + ", with " + std::to_string(index_of_.size()) + " of " +
            std::to_string(slots_.size()) + " members. ";
  }
  return text +
         "Two jobs with the same MASTER_ADDR, MASTER_PORT (or HERRING_HUB) and secret cannot be told apart: "
         "give "
         "each a MASTER_PORT of its own, or start them with herringrun, which does";
}

/// The other job's processes may be among the members already, or be let in next.
void Membership::end_in_doubt(const std::string& text) {
  doubt_ = text + ". This job has ended, because some of its processes may be the other job's";
  if (!started_) {
    send_all(FrameType::kEvent, make_body(encode(Event{HubEvent::Kind::kFailed, 0, doubt_})));
    return;
  }
  const ConnectionId lead = slots_.front().connection;
  gone(0, State::kFailed, HubEvent::Kind::kFailed, doubt_);
  if (lead != 0) send(lead, FrameType::kEvent, make_body(encode(Event{HubEvent::Kind::kFailed, 0, doubt_})));
}

}  // namespace herring::control
