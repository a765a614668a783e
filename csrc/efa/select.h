#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efa/fabric.h"
#include "efa/library.h"
#include "transport/interface_facts.h"

/// Which provider on which interface: what fi_getinfo offers, turned into plain facts; and a pure choice among them.
namespace herring::efa {

/// Numbers are part of an endpoint's address and are never reused.
enum class ProviderKind : std::uint8_t { kEfa = 1, kVerbs = 2, kTcp = 3, kTcpOverRxm = 4, kNet = 5 };

/// libfabric's name: "efa", "verbs;ofi_rxm", "tcp", "net" (what became tcp's own RDM endpoint, in 1.16 and 1.17),
/// "tcp;ofi_rxm"; "unknown" for a number that names none.
std::string_view fabric_name(ProviderKind kind) noexcept;
/// The name that HERRING_PROVIDER takes: "efa", "verbs", "tcp".
std::string_view option_name(ProviderKind kind) noexcept;

using transport::InterfaceFacts;
using transport::InterfaceFactsReader;

struct Candidate {
  ProviderKind kind = ProviderKind::kTcp;
  std::string domain;   ///< "eth0", "rdmap0s6-rdm"
  std::string address;  ///< "192.0.2.2", empty where it is no IP address.
  bool ipv6 = false;
  bool link_local = false;
  InterfaceFacts interface;
  int node = kUnknownNode;  ///< Where its card is.
  std::string problem;      ///< Not empty: cannot carry our messages, and why.
};

/// Indices of the best candidates: EFA devices, of which a host's processes take different ones (all of a subnet's
/// reach each other, which is not known of other kinds); or one of another kind, or none.
std::vector<std::size_t> alternatives(std::span<const Candidate> candidates, const FabricOptions& options);

/// Index of the best candidate, FabricOptions::number counting where several are alike, or -1. `reasons` gets one line
/// for each: why not, or why. Throws Error(kInvalidArgument) where options.provider is no known word.
int choose(std::span<const Candidate> candidates, const FabricOptions& options, std::vector<std::string>& reasons);

struct Selection {
  std::vector<ProviderReport> reports;  ///< Candidates in order, then providers that offered nothing.
  int chosen = -1;
  std::vector<int> nodes{kUnknownNode};  ///< Of the alternatives(); of one where there are none.
  ProviderKind kind = ProviderKind::kTcp;
  InfoPtr info;  ///< The chosen one; null where chosen is -1.
};
/// What was chosen, asked for again with memory of devices (FI_HMEM). Null, and why: it is not to be had so.
InfoPtr select_with_devices(const Library& library, const Selection& chosen, std::string& why);

/// kWhatIsNeeded asks for no provider that options.provider rules out, and for none after one that is preferred to all
/// that follow: asking may start a provider's threads and open its devices. kAll is for a report.
enum class Look : std::uint8_t { kWhatIsNeeded, kAll };
Selection select(const Library& library, const FabricOptions& options, Look look,
                 const InterfaceFactsReader& facts = transport::read_interface_facts);

}  // namespace herring::efa
