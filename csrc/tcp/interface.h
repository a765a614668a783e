#pragma once

#include <span>
#include <string>
#include <vector>

#include "tcp/address.h"
#include "tcp/tcp.h"
#include "transport/interface_facts.h"

/// Which address of which interface: the same preferences as among libfabric's tcp providers (efa/select.h).
namespace herring::tcp {

struct Candidate {
  std::string name;      ///< "eth0"
  std::string text;      ///< "192.0.2.2"
  SocketAddress socket;  ///< With port 0.
  SocketAddress mask;    ///< Of its network; of no family where none is known.
  transport::InterfaceFacts facts;
};

/// The IP addresses of this host's interfaces.
std::vector<Candidate> find_candidates();

/// Index of the best candidate, or -1. `reasons` gets one line for each: why not, or why.
int choose(std::span<const Candidate> candidates, const std::string& interface, std::vector<std::string>& reasons);

/// The candidates of Options::interfaces, that of the endpoint first; one, where none is named.
/// Throws Error(kUnavailable) that lists what is there.
std::vector<Candidate> choose_candidates(const Options& options);

/// Whether the address is in the candidate's network.
bool is_in_network(const SocketAddress& address, const Candidate& candidate);

}  // namespace herring::tcp
