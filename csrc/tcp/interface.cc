#include "tcp/interface.h"

#include <ifaddrs.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "core/status.h"

namespace herring::tcp {
namespace {

std::string why_not(const Candidate& candidate, const std::string& interface) {
  if (!interface.empty()) {
    const bool is_meant = candidate.name == interface || candidate.text == interface;
    return is_meant ? "" : "interface " + interface + " was asked for";
  }
  if (candidate.socket.is_link_local()) return "a link-local address, which other hosts cannot use";
  return candidate.facts.up ? "" : "the interface is down";
}

std::string why(const Candidate& candidate, const std::string& interface) {
  if (!interface.empty()) return "chosen: interface " + interface + " was asked for";
  if (candidate.facts.loopback) return "chosen: only loopback is there, so one host only";
  if (candidate.facts.default_route) return "chosen: the interface of the default route";
  return "chosen: an interface that can reach other hosts";
}

/// Link-local ones come after all others.
int score(const Candidate& candidate) {
  const int value = transport::interface_score(candidate.facts, candidate.socket.family() == AF_INET6);
  return candidate.socket.is_link_local() ? value - 100'000 : value;
}

}  // namespace

std::vector<Candidate> find_candidates() {
  std::vector<Candidate> candidates;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return candidates;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(list, freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Candidate candidate;
    candidate.name = entry->ifa_name;
    candidate.socket.storage.ss_family = static_cast<sa_family_t>(family);
    std::memcpy(&candidate.socket.storage, entry->ifa_addr, candidate.socket.length());
    if (entry->ifa_netmask != nullptr && entry->ifa_netmask->sa_family == family) {
      std::memcpy(&candidate.mask.storage, entry->ifa_netmask, candidate.socket.length());
    }
    candidate.text = ip_text(candidate.socket);
    candidate.facts = transport::read_interface_facts(candidate.name);
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

int choose(std::span<const Candidate> candidates, const std::string& interface, std::vector<std::string>& reasons) {
  int best = -1;
  reasons.clear();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    reasons.push_back(why_not(candidates[i], interface));
    if (!reasons.back().empty()) continue;
    if (best < 0 || score(candidates[i]) > score(candidates[static_cast<std::size_t>(best)])) {
      best = static_cast<int>(i);
    }
  }
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (static_cast<int>(i) == best) {
      reasons[i] = why(candidates[i], interface);
    } else if (reasons[i].empty()) {
      reasons[i] = "usable; another was preferred";
    }
  }
  return best;
}

namespace {

Candidate choose_candidate(std::span<const Candidate> candidates, const std::string& interface) {
  std::vector<std::string> reasons;
  const int chosen = choose(candidates, interface, reasons);
  if (chosen >= 0) return candidates[static_cast<std::size_t>(chosen)];
  std::string text = "no interface for tcp:";
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    text += "\n  " + candidates[i].name + " (" + candidates[i].text + "): " + reasons[i];
  }
  if (candidates.empty()) text += " this host has none";
  throw Error(Code::kUnavailable, text + "\nCheck HERRING_INTERFACE; `herring doctor` shows what is there.");
}

}  // namespace

std::vector<Candidate> choose_candidates(const Options& options) {
  const std::vector<Candidate> all = find_candidates();
  if (options.interfaces.empty()) return {choose_candidate(all, "")};
  std::vector<Candidate> chosen;
  const std::size_t count = options.interfaces.size();
  for (std::size_t i = 0; i < count; ++i) {
    chosen.push_back(choose_candidate(all, options.interfaces[(options.number + i) % count]));
  }
  return chosen;
}

bool is_in_network(const SocketAddress& address, const Candidate& candidate) {
  if (address.family() != candidate.socket.family() || candidate.mask.family() != address.family()) return false;
  const std::span<const std::byte> its = address.ip();
  const std::span<const std::byte> own = candidate.socket.ip();
  const std::span<const std::byte> mask = candidate.mask.ip();
  for (std::size_t i = 0; i < its.size(); ++i) {
    if (((its[i] ^ own[i]) & mask[i]) != std::byte{0}) return false;
  }
  return true;
}

Report probe(const std::vector<std::string>& interfaces) {
  const std::vector<Candidate> candidates = find_candidates();
  std::vector<std::string> reasons;
  Report report;
  report.chosen = choose(candidates, interfaces.empty() ? "" : interfaces.front(), reasons);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const bool is_named =
        std::ranges::any_of(interfaces, [&](const std::string& name) { return why_not(candidates[i], name).empty(); });
    const bool is_usable = interfaces.empty() ? why_not(candidates[i], "").empty() : is_named;
    const bool is_other = is_named && static_cast<int>(i) != report.chosen && !reasons[i].starts_with("usable");
    report.interfaces.push_back({candidates[i].name, candidates[i].text, is_usable,
                                 is_other ? "usable; it was asked for, after the chosen one" : reasons[i]});
  }
  return report;
}

}  // namespace herring::tcp
