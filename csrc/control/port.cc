#include "control/port.h"

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "control/connect.h"
#include "core/status.h"

namespace herring::control {
namespace {

using Clock = std::chrono::steady_clock;

// A hub on a machine under load answers within this; another program that says nothing costs it once.
constexpr Duration kAnswerPatience = std::chrono::seconds(3);
constexpr Duration kEndPatience = std::chrono::seconds(5);
constexpr Duration kRetryPause = std::chrono::milliseconds(50);

/// Asks what is at the port for worker 0's place, which no living job gives to a second one. Throws where that is a hub
/// of ours by its secret.
void ask(const HubOptions& options, std::uint16_t port) {
  HubClientOptions member;
  member.host = !options.meet_host.empty() ? options.meet_host : options.listen_host;
  if (member.host.empty()) member.host = "127.0.0.1";
  member.ports = {port};
  member.secret = options.secret;
  member.self = *options.lead;
  member.workers = options.workers;
  member.servers = options.servers;
  HubSearch search(member);
  const Instant until = Clock::now() + kAnswerPatience;
  try {
    while (!search.try_ports(until)) {
      if (const auto text = search.other_job()) throw Error(Code::kMismatch, *text);
      if (!search.is_silent() || Clock::now() >= until) return;
    }
  } catch (const Error&) {
    if (search.other_job()) throw;
    return;  // Its job will never start, or it has another version.
  }
  throw Error(Code::kMismatch, "another job's hub with the same secret is at " + member.host + ":" +
                                   std::to_string(port) + ", where " + to_string(*options.lead) +
                                   " was to open one; give each job a MASTER_PORT of its own");
}

}  // namespace

UniqueFd listen_alone(const HubOptions& options, std::uint16_t& port) {
  std::vector<std::uint16_t> ports = options.ports;
  std::erase(ports, std::uint16_t{0});
  if (ports.empty()) return listen_on(options.listen_host, {}, port);
  const Instant end_by = Clock::now() + kEndPatience;
  UniqueFd listener;
  std::string tried;
  while (!listener) {
    tried.clear();
    for (const std::uint16_t candidate : ports) {
      std::string why;
      listener = try_listen_on(options.listen_host, candidate, why);
      if (listener) {
        port = candidate;
        break;
      }
      tried += (tried.empty() ? "" : ", ") + std::to_string(candidate) + " (" + why + ")";
      ask(options, candidate);
    }
    if (listener) break;
    if (ports.size() > 1 || Clock::now() >= end_by) throw no_port(options.listen_host, tried);
    std::this_thread::sleep_for(kRetryPause);
  }
  // The job that is there may have found this one taken. Two that open at once see each other here: who binds last.
  const auto own = std::find(ports.begin(), ports.end(), port);
  for (auto other = own + 1; other != ports.end(); ++other) ask(options, *other);
  return listener;
}

}  // namespace herring::control
