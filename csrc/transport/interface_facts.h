#pragma once

#include <functional>
#include <string>

namespace herring::transport {

/// What is to know of a network interface of this host, to choose among several.
struct InterfaceFacts {
  bool up = true;
  bool loopback = false;
  bool local_only = false;  ///< A bridge or tunnel between containers of this host: others cannot reach it.
  bool default_route = false;
};
/// Reads /sys/class/net and /proc/net/route. An interface that is not there (an RDMA device) is up and ordinary.
InterfaceFacts read_interface_facts(const std::string& name);
using InterfaceFactsReader = std::function<InterfaceFacts(const std::string& name)>;

/// Larger is better: others can reach it, the default route goes there, IPv4.
int interface_score(const InterfaceFacts& facts, bool is_ipv6);

}  // namespace herring::transport
