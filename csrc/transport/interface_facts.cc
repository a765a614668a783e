#include "transport/interface_facts.h"

#include <net/if.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

namespace herring::transport {
namespace {

unsigned interface_flags(const std::filesystem::path& directory) {
  std::ifstream file(directory / "flags");
  unsigned flags = IFF_UP;
  file >> std::hex >> flags;
  return flags;
}

bool has_default_route(const std::string& name) {
  std::ifstream routes("/proc/net/route");
  std::string line;
  while (std::getline(routes, line)) {
    std::istringstream fields(line);
    std::string interface, destination;
    if (fields >> interface >> destination && interface == name && destination == "00000000") return true;
  }
  return false;
}

}  // namespace

InterfaceFacts read_interface_facts(const std::string& name) {
  InterfaceFacts facts;
  std::error_code ignored;
  const std::filesystem::path directory = std::filesystem::path("/sys/class/net") / name;
  if (name.empty() || !std::filesystem::exists(directory, ignored)) return facts;
  const unsigned flags = interface_flags(directory);
  facts.up = (flags & IFF_UP) != 0;
  facts.loopback = (flags & IFF_LOOPBACK) != 0;
  facts.local_only = std::filesystem::exists(directory / "bridge", ignored) ||
                     std::filesystem::exists(directory / "tun_flags", ignored);
  facts.default_route = has_default_route(name);
  return facts;
}

int interface_score(const InterfaceFacts& facts, bool is_ipv6) {
  int value = 0;
  if (!facts.loopback) value += 800;
  if (!facts.loopback && !facts.local_only) value += 400;
  if (facts.default_route) value += 200;
  if (!is_ipv6) value += 100;
  return value;
}

}  // namespace herring::transport
