#include "efa/select.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <utility>

namespace herring::efa {
namespace {

constexpr std::array kKinds{ProviderKind::kEfa, ProviderKind::kVerbs, ProviderKind::kTcp, ProviderKind::kNet,
                            ProviderKind::kTcpOverRxm};
constexpr std::uint64_t kModes = FI_CONTEXT | FI_CONTEXT2;
constexpr int kMemoryModes = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
constexpr std::size_t kLargestMessage = std::size_t{64} << 20;
constexpr std::size_t kSpansPerMessage = 2;

bool known_option(std::string_view name) { return name == "auto" || name == "efa" || name == "verbs" || name == "tcp"; }

bool matches_interface(const Candidate& candidate, const std::string& wanted) {
  return candidate.domain == wanted || candidate.address == wanted ||
         (candidate.kind == ProviderKind::kEfa && candidate.domain == wanted + "-rdm");
}

bool is_rdma(const Candidate& candidate) {
  return candidate.kind == ProviderKind::kEfa || candidate.kind == ProviderKind::kVerbs;
}

/// Larger is better; -1: not to be used without being asked for by name.
int score(const Candidate& candidate, bool named) {
  int value = 0;
  if (candidate.kind == ProviderKind::kEfa) value += 4000;
  if (candidate.kind == ProviderKind::kVerbs) value += 3000;
  if (candidate.kind == ProviderKind::kTcp) value += 2;
  if (candidate.kind == ProviderKind::kNet) value += 1;
  if (is_rdma(candidate)) return value;
  // fe80:: addresses mean nothing on another host without naming its interface.
  if (candidate.link_local) return named ? value : -1;
  if (!candidate.interface.up) return named ? value : -1;
  return value + transport::interface_score(candidate.interface, candidate.ipv6);
}

bool is_ruled_out(ProviderKind kind, const FabricOptions& options) {
  return options.provider != "auto" && options.provider != option_name(kind);
}

/// Whether no kind that comes later in kKinds could be preferred: those of tcp compare by interface.
bool is_settled(std::span<const Candidate> candidates, int chosen) {
  return chosen >= 0 && option_name(candidates[static_cast<std::size_t>(chosen)].kind) != "tcp";
}

std::string why_not(const Candidate& candidate, const FabricOptions& options) {
  if (!candidate.problem.empty()) return candidate.problem;
  if (is_ruled_out(candidate.kind, options)) {
    return "provider " + options.provider + " was asked for";
  }
  if (!options.interface.empty() && !matches_interface(candidate, options.interface)) {
    return "interface " + options.interface + " was asked for";
  }
  if (score(candidate, !options.interface.empty()) >= 0) return {};
  return candidate.link_local ? "a link-local address, which other hosts cannot use" : "the interface is down";
}

std::string why(const Candidate& candidate, const FabricOptions& options) {
  if (!options.interface.empty()) return "chosen: interface " + options.interface + " was asked for";
  if (candidate.kind == ProviderKind::kEfa) return "chosen: EFA is the first choice";
  if (candidate.kind == ProviderKind::kVerbs) return "chosen: RDMA, and there is no EFA";
  if (candidate.interface.loopback) return "chosen: only loopback is there, so one host only";
  if (candidate.interface.default_route) return "chosen: the interface of the default route";
  return "chosen: an interface that can reach other hosts";
}

std::vector<int> nodes_of(std::span<const Candidate> candidates, std::span<const std::size_t> some) {
  std::vector<int> nodes;
  for (const std::size_t i : some) nodes.push_back(candidates[i].node);
  return nodes;
}

/// "0000:9f:00.0" has the card's node in sysfs.
int node_of(const fi_info& info) {
  if (info.nic == nullptr || info.nic->bus_attr == nullptr || info.nic->bus_attr->bus_type != FI_BUS_PCI) {
    return kUnknownNode;
  }
  const fi_pci_attr& pci = info.nic->bus_attr->attr.pci;
  std::array<char, 16> address{};
  std::snprintf(address.data(), address.size(), "%04x:%02x:%02x.%x", unsigned{pci.domain_id}, unsigned{pci.bus_id},
                unsigned{pci.device_id} & 0xFF, unsigned{pci.function_id} & 0xF);
  return node_of_pci_device(address.data());
}

std::string address_text(const fi_info& info, Candidate& candidate) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (info.src_addr == nullptr) return {};
  if (info.addr_format == FI_SOCKADDR_IN && info.src_addrlen >= sizeof(sockaddr_in)) {
    sockaddr_in address{};
    std::memcpy(&address, info.src_addr, sizeof(address));
    if (inet_ntop(AF_INET, &address.sin_addr, text.data(), text.size()) == nullptr) return {};
  } else if (info.addr_format == FI_SOCKADDR_IN6 && info.src_addrlen >= sizeof(sockaddr_in6)) {
    sockaddr_in6 address{};
    std::memcpy(&address, info.src_addr, sizeof(address));
    candidate.ipv6 = true;
    candidate.link_local = IN6_IS_ADDR_LINKLOCAL(&address.sin6_addr);
    if (inet_ntop(AF_INET6, &address.sin6_addr, text.data(), text.size()) == nullptr) return {};
  }
  return text.data();
}

std::string problem_with(const fi_info& info, int memory_modes = kMemoryModes) {
  if ((info.mode & ~kModes) != 0) return "needs fi_info modes that Herring does not offer";
  if ((info.domain_attr->mr_mode & ~memory_modes) != 0) return "needs memory registration modes Herring does not offer";
  if (info.tx_attr->iov_limit < kSpansPerMessage || info.rx_attr->iov_limit < kSpansPerMessage) {
    return "takes fewer than 2 buffers in one message";
  }
  if (info.ep_attr->max_msg_size < kLargestMessage) {
    return "largest message is " + std::to_string(info.ep_attr->max_msg_size) + " bytes; 64 MiB are needed";
  }
  return {};
}

InfoPtr hints_for(const Library& library, ProviderKind kind) {
  InfoPtr hints = library.allocate_info();
  hints->ep_attr->type = FI_EP_RDM;
  hints->caps = FI_TAGGED | FI_MSG;
  hints->mode = kModes;
  hints->domain_attr->mr_mode = kMemoryModes;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  // Manual: the lane's own thread drives progress; no provider thread competes with it for cores.
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->tx_attr->msg_order = FI_ORDER_NONE;
  hints->rx_attr->msg_order = FI_ORDER_NONE;
  // fi_freeinfo frees the name with free().
  hints->fabric_attr->prov_name = strdup(std::string(fabric_name(kind)).c_str());
  return hints;
}

struct Offer {
  Candidate candidate;
  const fi_info* info = nullptr;
};

bool same(const Candidate& a, const Candidate& b) {
  return a.kind == b.kind && a.domain == b.domain && a.address == b.address;
}

/// Appends what one fi_getinfo list holds of this provider, each domain and address once.
void collect(const fi_info* list, ProviderKind kind, const InterfaceFactsReader& facts, std::vector<Offer>& offers) {
  for (const fi_info* info = list; info != nullptr; info = info->next) {
    if (info->fabric_attr == nullptr || info->fabric_attr->prov_name == nullptr || info->domain_attr == nullptr ||
        info->domain_attr->name == nullptr) {
      continue;
    }
    if (fabric_name(kind) != info->fabric_attr->prov_name) continue;
    Offer offer;
    offer.info = info;
    offer.candidate.kind = kind;
    offer.candidate.domain = info->domain_attr->name;
    offer.candidate.address = address_text(*info, offer.candidate);
    offer.candidate.interface = facts(offer.candidate.domain);
    offer.candidate.node = node_of(*info);
    offer.candidate.problem = problem_with(*info);
    bool seen = false;
    for (const Offer& earlier : offers) seen = seen || same(earlier.candidate, offer.candidate);
    if (!seen) offers.push_back(std::move(offer));
  }
}

}  // namespace

std::string_view fabric_name(ProviderKind kind) noexcept {
  switch (kind) {
    case ProviderKind::kEfa:
      return "efa";
    case ProviderKind::kVerbs:
      return "verbs;ofi_rxm";
    case ProviderKind::kTcp:
      return "tcp";
    case ProviderKind::kTcpOverRxm:
      return "tcp;ofi_rxm";
    case ProviderKind::kNet:
      return "net";
  }
  return "unknown";
}

std::string_view option_name(ProviderKind kind) noexcept {
  switch (kind) {
    case ProviderKind::kEfa:
      return "efa";
    case ProviderKind::kVerbs:
      return "verbs";
    case ProviderKind::kTcp:
    case ProviderKind::kTcpOverRxm:
    case ProviderKind::kNet:
      return "tcp";
  }
  return "unknown";
}

std::vector<std::size_t> alternatives(std::span<const Candidate> candidates, const FabricOptions& options) {
  const bool named = !options.interface.empty();
  std::vector<std::size_t> best;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!why_not(candidates[i], options).empty()) continue;
    const int value = score(candidates[i], named);
    const int most = best.empty() ? -1 : score(candidates[best.front()], named);
    if (value > most) best.clear();
    if (value > most || (value == most && candidates[i].kind == ProviderKind::kEfa && !named)) best.push_back(i);
  }
  return best;
}

std::uint32_t place_among(std::span<const int> nodes, const CardShare& cards, std::uint32_t number) {
  if (cards.users.empty()) return number % static_cast<std::uint32_t>(nodes.size());
  const auto hands = transport::deal_cards(nodes, cards.users, cards.first);
  const std::vector<std::uint32_t>& own = hands.at(cards.self);
  return own[number % own.size()];
}

int choose(std::span<const Candidate> candidates, const FabricOptions& options, std::vector<std::string>& reasons) {
  if (!known_option(options.provider)) {
    throw Error(Code::kInvalidArgument,
                "provider is '" + options.provider + "' (HERRING_PROVIDER); it takes auto, efa, verbs or tcp");
  }
  const std::vector<std::size_t> best = alternatives(candidates, options);
  const int chosen =
      best.empty() ? -1
                   : static_cast<int>(best[place_among(nodes_of(candidates, best), options.cards, options.number)]);
  reasons.clear();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    reasons.push_back(why_not(candidates[i], options));
    if (static_cast<int>(i) == chosen) {
      reasons[i] = why(candidates[i], options);
    } else if (std::ranges::find(best, i) != best.end()) {
      reasons[i] = "usable; another process of this host takes it";
    } else if (reasons[i].empty()) {
      reasons[i] = "usable; another was preferred";
    }
  }
  return chosen;
}

Selection select(const Library& library, const FabricOptions& options, Look look, const InterfaceFactsReader& facts) {
  Selection selection;
  std::vector<InfoPtr> lists;
  std::vector<Offer> offers;
  std::vector<ProviderReport> absent;
  std::vector<Candidate> candidates;
  std::vector<std::string> reasons;
  selection.chosen = choose(candidates, options, reasons);
  for (const ProviderKind kind : kKinds) {
    if (look == Look::kWhatIsNeeded && (is_ruled_out(kind, options) || is_settled(candidates, selection.chosen))) {
      continue;
    }
    const InfoPtr hints = hints_for(library, kind);
    InfoPtr list;
    const int result = library.get_info(hints.get(), list);
    const std::size_t before = offers.size();
    collect(list.get(), kind, facts, offers);
    if (offers.size() == before) {
      const std::string detail = result != 0 ? library.error_text(result) : "no endpoint of the kind needed";
      absent.push_back({std::string(fabric_name(kind)), "", false,
                        "not offered by this libfabric on this machine (fi_getinfo: " + detail + ")"});
    }
    lists.push_back(std::move(list));
    for (std::size_t i = before; i < offers.size(); ++i) candidates.push_back(offers[i].candidate);
    selection.chosen = choose(candidates, options, reasons);
  }
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    const std::string domain = c.address.empty() ? c.domain : c.domain + " (" + c.address + ")";
    if (c.node != kUnknownNode) reasons[i] += "; on NUMA node " + std::to_string(c.node);
    selection.reports.push_back({std::string(fabric_name(c.kind)), domain, c.problem.empty(), reasons[i]});
  }
  selection.reports.insert(selection.reports.end(), absent.begin(), absent.end());
  const std::vector<std::size_t> alike = alternatives(candidates, options);
  if (!alike.empty()) selection.nodes = nodes_of(candidates, alike);
  if (selection.chosen >= 0) {
    const Offer& offer = offers[static_cast<std::size_t>(selection.chosen)];
    selection.kind = offer.candidate.kind;
    selection.info = library.duplicate(offer.info);
  }
  return selection;
}

InfoPtr select_with_devices(const Library& library, const Selection& chosen, std::string& why) {
  const InfoPtr hints = hints_for(library, chosen.kind);
  hints->caps |= FI_HMEM;
  hints->domain_attr->mr_mode |= FI_MR_HMEM;
  InfoPtr list;
  const int result = library.get_info(library.device_api_version(), hints.get(), list);
  const std::string card = std::string(fabric_name(chosen.kind)) + " (" + chosen.info->domain_attr->name + ")";
  Candidate wanted;
  const std::string address = address_text(*chosen.info, wanted);
  for (const fi_info* info = list.get(); info != nullptr; info = info->next) {
    if (info->domain_attr == nullptr || info->domain_attr->name == nullptr || (info->caps & FI_HMEM) == 0 ||
        std::strcmp(info->domain_attr->name, chosen.info->domain_attr->name) != 0 ||
        std::strcmp(info->fabric_attr->prov_name, chosen.info->fabric_attr->prov_name) != 0 ||
        address_text(*info, wanted) != address) {
      continue;
    }
    why = problem_with(*info, kMemoryModes | FI_MR_HMEM);
    if (!why.empty()) why = card + " with GPU memory " + why;
    return why.empty() ? library.duplicate(info) : nullptr;
  }
  why = card + " of libfabric " + library.version_text() + " takes no GPU memory (fi_getinfo with FI_HMEM: " +
        (result != 0 ? library.error_text(result) : "nothing for this card") + ")";
  return nullptr;
}

}  // namespace herring::efa
