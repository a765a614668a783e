#include "control/connect.h"

#include <algorithm>
#include <utility>

#include "core/status.h"

namespace herring::control {
namespace {

using Clock = std::chrono::steady_clock;
// A job that ends, or its connections that have not been found dead yet, may still be in the way.
constexpr Duration kHopelessPatience = std::chrono::seconds(2);
constexpr Duration kMaxPause = std::chrono::milliseconds(250);

}  // namespace

HubSearch::HubSearch(const HubClientOptions& options) : options_(options) {
  const Member& self = options.self;
  const std::uint32_t members = self.role == Role::kWorker ? options.workers : options.servers;
  if (self.rank >= members) {
    throw Error(Code::kInvalidArgument, to_string(self) + " has a rank that does not exist: the job has " +
                                            std::to_string(options.workers) + " workers and " +
                                            std::to_string(options.servers) + " servers, counted from 0");
  }
  if (options.host.empty() || options.ports.empty() || std::count(options.ports.begin(), options.ports.end(), 0) > 0) {
    throw Error(
        Code::kInvalidArgument,
        to_string(self) + " does not know where the hub is: it needs a host and a port (HERRING_HUB=host:port)");
  }
}

std::string HubSearch::place(std::uint16_t port) const { return options_.host + ":" + std::to_string(port); }

Duration HubSearch::pause() const {
  // From 10 ms, doubling; ranks differ a little so that thousands do not come in step.
  const auto base = std::chrono::milliseconds(10) * (1u << std::min(rounds_, 5u));
  const auto spread = std::chrono::microseconds(options_.self.rank * 7919u % 10'000u);
  return std::min<Duration>(base + spread, kMaxPause);
}

std::optional<Session> HubSearch::try_ports(Instant deadline) {
  for (const std::uint16_t port : options_.ports) {
    if (Clock::now() >= deadline) break;
    if (auto session = try_port(port, deadline)) {
      last_hub_port_ = port;
      return session;
    }
  }
  ++rounds_;
  check_patience();
  return std::nullopt;
}

void HubSearch::check_patience() {
  const auto found = std::find_if(answers_.begin(), answers_.end(), [](const auto& it) {
    return (it.second.other_secret && it.second.is_ours) || it.second.other_job;
  });
  if (found == answers_.end()) {
    hopeless_since_ = Instant::max();
    return;
  }
  const Instant now = Clock::now();
  hopeless_since_ = std::min(hopeless_since_, now);
  if (now - hopeless_since_ < kHopelessPatience) return;
  throw found->second.other_job ? refusal(found->first, found->second.text) : other_secret(found->first);
}

std::optional<std::string> HubSearch::other_job() const {
  for (const auto& [port, answer] : answers_) {
    if (answer.other_job) return refusal(port, answer.text).status().message();
  }
  return std::nullopt;
}

bool HubSearch::is_silent() const {
  return std::any_of(answers_.begin(), answers_.end(), [](const auto& it) { return it.second.is_silent; });
}

std::optional<Session> HubSearch::try_port(std::uint16_t port, Instant deadline) {
  // Another program on the port costs a second; a hub under load gets more time in later rounds.
  const Duration patience = std::chrono::seconds(std::min(1u + rounds_, 5u));
  const Instant until = std::min(deadline, Clock::now() + patience);
  Answer answer;
  UniqueFd fd = connect_to(options_.host, port, until, answer.text);
  if (!fd) {
    answers_[port] = std::move(answer);
    return std::nullopt;
  }
  return shake_hands(port, FrameSocket(std::move(fd)), until);
}

void HubSearch::refused(std::uint16_t port, const Refuse& refuse) {
  Answer answer;
  answer.text = refuse.text;
  answer.is_hub = true;
  answer.other_job = refuse.code == RefuseCode::kOtherJob;
  answers_[port] = answer;
  if (refuse.code == RefuseCode::kStarted || refuse.code == RefuseCode::kClosing || answer.other_job) return;
  if (refuse.code == RefuseCode::kLost) throw Error(Code::kPeerLost, refuse.text);
  throw refusal(port, refuse.text);
}

Error HubSearch::refusal(std::uint16_t port, const std::string& text) const {
  return Error(Code::kMismatch, "the hub at " + place(port) + " refused " + to_string(options_.self) + ": " + text);
}

std::optional<Session> HubSearch::shake_hands(std::uint16_t port, FrameSocket socket, Instant deadline) {
  Meeting meeting = meet(socket, options_.secret, deadline);
  switch (meeting.verdict) {
    case Guest::Verdict::kProven:
      return ask_in(port, std::move(socket), deadline);
    case Guest::Verdict::kRefused:
      refused(port, meeting.refusal);
      return std::nullopt;
    case Guest::Verdict::kNoHost:
      answers_[port] = Answer::of(meeting);
      return std::nullopt;
    case Guest::Verdict::kOtherSecret:
      break;
  }
  Answer answer;
  answer.text = "a hub with another secret (HERRING_SECRET)";
  answer.other_secret = true;
  // Else another job's hub may sit on a port that ours would have had, and ours is still to come on another.
  const Challenge& challenge = meeting.challenge;
  answer.is_ours = options_.ports.size() == 1 ||
                   (challenge.master_port != 0 && challenge.master_port == options_.master_port && !challenge.started);
  answers_[port] = std::move(answer);
  return std::nullopt;
}

/// For its place, of a hub that has the secret.
std::optional<Session> HubSearch::ask_in(std::uint16_t port, FrameSocket socket, Instant deadline) {
  Meeting meeting;
  socket.send(FrameType::kJoin, make_body(encode(Join{options_.self, options_.workers, options_.servers})));
  const auto frame = await_frame(socket, deadline, meeting);
  if (frame && frame->type == FrameType::kRefuse) {
    if (const auto refuse = decode_refuse(frame->body)) {
      refused(port, *refuse);
      return std::nullopt;
    }
  }
  const auto welcome = frame && frame->type == FrameType::kWelcome ? decode_welcome(frame->body) : std::nullopt;
  if (welcome) return Session{std::move(socket), *welcome};
  if (meeting.why.empty()) meeting.why = "the hub broke the protocol in the handshake";
  answers_[port] = Answer::of(meeting);
  return std::nullopt;
}

void HubSearch::note_lost(const std::string& reason) {
  lost_reason_ = reason;
  answers_[last_hub_port_] = Answer{"the hub was there and went away: " + reason, true};
  ++rounds_;
}

Error HubSearch::hub_lost() const {
  return Error(Code::kPeerLost, options_.holder + ", which runs the job's hub, is lost: " + lost_reason_ +
                                    "; the job could not start without it");
}

Error HubSearch::other_secret(std::uint16_t port) const {
  return Error(Code::kInvalidArgument, "the secret differs: the hub at " + place(port) + " has another one than " +
                                           to_string(options_.self) +
                                           ". Set HERRING_SECRET to the same value in all processes of the job; "
                                           "if that hub is another job's, give each job a MASTER_PORT of its own");
}

Error HubSearch::failure(Duration tried) const {
  std::string found;
  bool is_hub = false;
  for (const std::uint16_t port : options_.ports) {
    const auto it = answers_.find(port);
    if (it == answers_.end()) continue;
    if (it->second.other_secret) return other_secret(port);
    is_hub = is_hub || it->second.is_hub;
    found += (found.empty() ? "" : "; ") + std::string("port ") + std::to_string(port) + ": " + it->second.text;
  }
  const std::string who = to_string(options_.self);
  const std::string check =
      "Check that worker 0 runs, that host and port are right, and that no firewall is in between";
  if (found.empty()) {
    return Error(Code::kTimeout, who + " had no time left to look for the hub at " + options_.host +
                                     ": all of the time to join had passed before (HERRING_JOIN_TIMEOUT_S). " + check);
  }
  const std::string where = " at " + options_.host + " for " + seconds_text(tried) + " (" + found + "). ";
  if (is_hub) {
    return Error(Code::kTimeout, who + " found no hub that could take it" + where +
                                     "If an earlier job still runs there, end it or choose another port (HERRING_HUB)");
  }
  return Error(Code::kTimeout, who + " found no hub" + where + check);
}

}  // namespace herring::control
