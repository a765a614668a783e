#include "efa/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fabric.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

namespace herring::efa {
namespace {

constexpr std::array<std::byte, 4> kMagic{std::byte{'H'}, std::byte{'F'}, std::byte{'A'}, std::byte{1}};
constexpr std::size_t kHeaderBytes = 9;  // Magic, provider, format as 4 bytes, least significant first.
constexpr std::size_t kMaxNameBytes = 256;

bool is_loopback(const FabricAddress& address) {
  if (address.format == FI_SOCKADDR_IN && address.name.size() >= sizeof(sockaddr_in)) {
    sockaddr_in in{};
    std::memcpy(&in, address.name.data(), sizeof(in));
    return (ntohl(in.sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  }
  if (address.format == FI_SOCKADDR_IN6 && address.name.size() >= sizeof(sockaddr_in6)) {
    sockaddr_in6 in{};
    std::memcpy(&in, address.name.data(), sizeof(in));
    return IN6_IS_ADDR_LOOPBACK(&in.sin6_addr);
  }
  return false;
}

[[noreturn]] void refuse(PeerId peer, const std::string& what) {
  throw Error(Code::kInvalidArgument, "add_peer: the address of peer " + std::to_string(peer.value) + " " + what);
}

bool known(ProviderKind kind) { return fabric_name(kind) != "unknown"; }

}  // namespace

transport::Address encode_address(const FabricAddress& address) {
  transport::Address bytes(kMagic.begin(), kMagic.end());
  bytes.push_back(static_cast<std::byte>(address.kind));
  for (unsigned shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<std::byte>(address.format >> shift));
  bytes.insert(bytes.end(), address.name.begin(), address.name.end());
  return bytes;
}

FabricAddress decode_peer_address(PeerId peer, std::span<const std::byte> bytes, const FabricAddress& own) {
  constexpr std::string_view kBuiltin = "HTA";
  if (bytes.size() > kBuiltin.size() && std::memcmp(bytes.data(), kBuiltin.data(), kBuiltin.size()) == 0) {
    refuse(peer, "is one of Herring's builtin tcp, but this process uses libfabric's " +
                     std::string(fabric_name(own.kind)) +
                     ": set HERRING_PROVIDER to the same value on all hosts (auto chooses by what each host has)");
  }
  if (bytes.size() <= kHeaderBytes || bytes.size() > kHeaderBytes + kMaxNameBytes ||
      !std::equal(kMagic.begin(), kMagic.end(), bytes.begin())) {
    refuse(peer, "is not one that a Herring libfabric endpoint gave (" + std::to_string(bytes.size()) +
                     " bytes): do all processes run the same version of Herring?");
  }
  FabricAddress address;
  address.kind = static_cast<ProviderKind>(bytes[4]);
  for (unsigned i = 0; i < 4; ++i) address.format |= static_cast<std::uint32_t>(bytes[5 + i]) << (8 * i);
  address.name.assign(bytes.begin() + kHeaderBytes, bytes.end());
  if (!known(address.kind)) refuse(peer, "names a provider that this version of Herring does not know");
  if (address.kind != own.kind) {
    refuse(peer, "is for provider " + std::string(fabric_name(address.kind)) + ", but this process uses " +
                     std::string(fabric_name(own.kind)) +
                     ": these two cannot communicate. Give all hosts the same libfabric (HERRING_LIBFABRIC) "
                     "and provider (HERRING_PROVIDER)");
  }
  if (address.format != own.format || address.name.size() != own.name.size()) {
    refuse(peer, to_string(address) + " is of another kind than this process's " + to_string(own) +
                     ": set HERRING_INTERFACE so that all hosts use IPv4, or all IPv6");
  }
  if (is_loopback(address) != is_loopback(own)) {
    refuse(peer, to_string(address) + " cannot be reached from this process's " + to_string(own) +
                     ": one of them is bound to loopback. Set HERRING_INTERFACE to an interface that both can reach");
  }
  return address;
}

std::string to_string(const FabricAddress& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.format == FI_SOCKADDR_IN && address.name.size() >= sizeof(sockaddr_in)) {
    sockaddr_in in{};
    std::memcpy(&in, address.name.data(), sizeof(in));
    inet_ntop(AF_INET, &in.sin_addr, text.data(), text.size());
    return std::string(text.data()) + ":" + std::to_string(ntohs(in.sin_port));
  }
  if (address.format == FI_SOCKADDR_IN6 && address.name.size() >= sizeof(sockaddr_in6)) {
    sockaddr_in6 in{};
    std::memcpy(&in, address.name.data(), sizeof(in));
    inet_ntop(AF_INET6, &in.sin6_addr, text.data(), text.size());
    std::string bracketed = "[";
    return bracketed.append(text.data()).append("]:").append(std::to_string(ntohs(in.sin6_port)));
  }
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  for (const std::byte byte : address.name) {
    hex += kDigits[static_cast<std::size_t>(byte >> 4)];
    hex += kDigits[static_cast<std::size_t>(byte & std::byte{15})];
  }
  return hex;
}

}  // namespace herring::efa
