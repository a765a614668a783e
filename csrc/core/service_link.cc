#include "core/service_link.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "core/config_value.h"

namespace herring {
namespace {

constexpr std::string_view kServicePort = "_SERVICE_PORT";
constexpr std::string_view kPortEnding = "_PORT";
constexpr std::array<std::string_view, 3> kProtocols = {"tcp", "udp", "sctp"};

bool is_address(std::string_view text) {
  const std::string zero_ended(text);
  std::array<unsigned char, sizeof(in6_addr)> address{};
  return inet_pton(AF_INET, zero_ended.c_str(), address.data()) == 1 ||
         inet_pton(AF_INET6, zero_ended.c_str(), address.data()) == 1;
}

bool is_port(std::string_view text) {
  const auto number = parse_count(text);
  return number && *number >= 1 && *number <= std::numeric_limits<std::uint16_t>::max();
}

/// "tcp://10.0.0.1:80", "udp://[fd00::1]:53"; where `protocol` and `port` are not empty, with these.
bool is_url(std::string_view text, std::string_view protocol = {}, std::string_view port = {}) {
  const std::size_t slashes = text.find("://"), colon = text.rfind(':');
  if (slashes == std::string_view::npos || colon < slashes + 3) return false;
  const std::string_view its_protocol = text.substr(0, slashes), its_port = text.substr(colon + 1);
  std::string_view host = text.substr(slashes + 3, colon - slashes - 3);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (std::find(kProtocols.begin(), kProtocols.end(), its_protocol) == kProtocols.end()) return false;
  return is_address(host) && is_port(its_port) && (protocol.empty() || protocol == its_protocol) &&
         (port.empty() || port == its_port);
}

std::optional<std::string_view> without(std::string_view name, std::string_view ending) {
  if (!name.ends_with(ending)) return std::nullopt;
  return name.substr(0, name.size() - ending.size());
}

/// HERRING_PORT_80_TCP and what is made of it: the port and the protocol stand in the name.
bool is_port_link(std::string_view name, std::string_view value) {
  enum class What : std::uint8_t { kUrl, kProtocol, kPort, kAddress } what = What::kUrl;
  const auto cut = [&](std::string_view ending, What meaning) {
    if (const auto rest = without(name, ending)) {
      name = *rest;
      what = meaning;
      return true;
    }
    return false;
  };
  static_cast<void>(cut("_PROTO", What::kProtocol) || cut("_PORT", What::kPort) || cut("_ADDR", What::kAddress));
  for (const std::string_view protocol : kProtocols) {
    std::string ending = "_" + std::string(protocol);
    std::transform(ending.begin() + 1, ending.end(), ending.begin() + 1,
                   [](char c) { return static_cast<char>(c - 'a' + 'A'); });
    const auto numbered = without(name, ending);
    if (!numbered) continue;
    const std::size_t underscore = numbered->rfind('_');
    if (underscore == std::string_view::npos) return false;
    const std::string_view port = numbered->substr(underscore + 1);
    if (!is_port(port) || !numbered->substr(0, underscore).ends_with(kPortEnding)) return false;
    switch (what) {
      case What::kUrl:
        return is_url(value, protocol, port);
      case What::kProtocol:
        return value == protocol;
      case What::kPort:
        return value == port;
      case What::kAddress:
        return is_address(value);
    }
  }
  return false;
}

}  // namespace

bool is_service_link(std::string_view name, std::string_view value) {
  const auto of_a_name = [](char c) { return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; };
  if (!name.starts_with("HERRING_") || !std::all_of(name.begin(), name.end(), of_a_name)) return false;
  if (name.ends_with("_SERVICE_HOST")) return is_address(value);
  if (name.ends_with(kServicePort)) return is_port(value);
  if (is_port_link(name, value)) return true;
  if (name.ends_with(kPortEnding)) return is_url(value);
  // A port with a name, HERRING_SERVICE_PORT_HTTP.
  const std::size_t named = name.find(std::string(kServicePort) + "_");
  return named != std::string_view::npos && named + kServicePort.size() + 1 < name.size() && is_port(value);
}

}  // namespace herring
