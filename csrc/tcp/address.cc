#include "tcp/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "core/status.h"

namespace herring::tcp {
namespace {

constexpr std::array<std::byte, 4> kMagic{std::byte{'H'}, std::byte{'T'}, std::byte{'A'}, std::byte{1}};
constexpr std::size_t kHeadBytes = 7;  // Magic, family (4 or 6), port as 2 bytes, least significant first.
constexpr std::byte kVersion4{4};
constexpr std::byte kVersion6{6};

sockaddr_in as_v4(const SocketAddress& address) {
  sockaddr_in in{};
  std::memcpy(&in, &address.storage, sizeof(in));
  return in;
}

sockaddr_in6 as_v6(const SocketAddress& address) {
  sockaddr_in6 in{};
  std::memcpy(&in, &address.storage, sizeof(in));
  return in;
}

[[noreturn]] void refuse(PeerId peer, const std::string& what) {
  throw Error(Code::kInvalidArgument, "add_peer: the address of peer " + std::to_string(peer.value) + " " + what);
}

void append(transport::Address& bytes, const void* from, std::size_t count) {
  const auto* const first = static_cast<const std::byte*>(from);
  bytes.insert(bytes.end(), first, first + count);
}

}  // namespace

socklen_t SocketAddress::length() const { return family() == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in); }

bool SocketAddress::is_loopback() const {
  if (family() == AF_INET) return (ntohl(as_v4(*this).sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  const sockaddr_in6 in = as_v6(*this);
  return IN6_IS_ADDR_LOOPBACK(&in.sin6_addr);
}

bool SocketAddress::is_link_local() const {
  if (family() != AF_INET6) return false;
  const sockaddr_in6 in = as_v6(*this);
  return IN6_IS_ADDR_LINKLOCAL(&in.sin6_addr);
}

std::span<const std::byte> SocketAddress::ip() const {
  const bool is_v6 = family() == AF_INET6;
  return std::as_bytes(std::span(&storage, 1))
      .subspan(is_v6 ? offsetof(sockaddr_in6, sin6_addr) : offsetof(sockaddr_in, sin_addr),
               is_v6 ? sizeof(in6_addr) : sizeof(in_addr));
}

std::string ip_text(const SocketAddress& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(address.family(), address.ip().data(), text.data(), text.size());
  return text.data();
}

std::string to_string(const SocketAddress& address) {
  const std::string port = std::to_string(ntohs(as_v4(address).sin_port));  // Where sockaddr_in6 has it too.
  return address.family() == AF_INET6 ? "[" + ip_text(address) + "]:" + port : ip_text(address) + ":" + port;
}

transport::Address encode_address(const EndpointAddress& address) {
  transport::Address bytes(kMagic.begin(), kMagic.end());
  const bool is_v6 = address.socket.family() == AF_INET6;
  bytes.push_back(is_v6 ? kVersion6 : kVersion4);
  const std::uint16_t port = ntohs(as_v4(address.socket).sin_port);
  bytes.push_back(static_cast<std::byte>(port & 0xFF));
  bytes.push_back(static_cast<std::byte>(port >> 8));
  const std::span<const std::byte> ip = address.socket.ip();
  bytes.insert(bytes.end(), ip.begin(), ip.end());
  append(bytes, address.instance.data(), address.instance.size());
  return bytes;
}

EndpointAddress decode_peer_address(PeerId peer, std::span<const std::byte> bytes, const EndpointAddress& own) {
  constexpr std::string_view kFabric = "HFA";
  if (bytes.size() > kFabric.size() && std::memcmp(bytes.data(), kFabric.data(), kFabric.size()) == 0) {
    refuse(peer,
           "is one of libfabric, but this process uses Herring's builtin tcp: set HERRING_PROVIDER to the same value "
           "on all hosts (auto chooses by what each host has)");
  }
  const bool is_ours = bytes.size() > kHeadBytes && std::equal(kMagic.begin(), kMagic.end(), bytes.begin()) &&
                       (bytes[4] == kVersion4 || bytes[4] == kVersion6);
  const bool is_v6 = is_ours && bytes[4] == kVersion6;
  const std::size_t ip_bytes = is_v6 ? sizeof(in6_addr) : sizeof(in_addr);
  if (!is_ours || bytes.size() != kHeadBytes + ip_bytes + sizeof(Instance)) {
    refuse(peer, "is not one that a Herring tcp endpoint gave (" + std::to_string(bytes.size()) +
                     " bytes): do all processes run the same version of Herring?");
  }
  const auto port =
      htons(static_cast<std::uint16_t>(std::to_integer<unsigned>(bytes[5]) | std::to_integer<unsigned>(bytes[6]) << 8));
  EndpointAddress address;
  if (is_v6) {
    sockaddr_in6 in{};
    in.sin6_family = AF_INET6;
    in.sin6_port = port;
    std::memcpy(&in.sin6_addr, &bytes[kHeadBytes], ip_bytes);
    // A link-local address means something together with an interface: this host's own.
    if (IN6_IS_ADDR_LINKLOCAL(&in.sin6_addr)) in.sin6_scope_id = as_v6(own.socket).sin6_scope_id;
    std::memcpy(&address.socket.storage, &in, sizeof(in));
  } else {
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_port = port;
    std::memcpy(&in.sin_addr, &bytes[kHeadBytes], ip_bytes);
    std::memcpy(&address.socket.storage, &in, sizeof(in));
  }
  std::memcpy(address.instance.data(), &bytes[kHeadBytes + ip_bytes], address.instance.size());
  if (address.socket.family() != own.socket.family()) {
    refuse(peer, to_string(address.socket) + " is of another kind than this process's " + to_string(own.socket) +
                     ": set HERRING_INTERFACE so that all hosts use IPv4, or all IPv6");
  }
  if (address.socket.is_loopback() != own.socket.is_loopback()) {
    refuse(peer, to_string(address.socket) + " cannot be reached from this process's " + to_string(own.socket) +
                     ": one of them is bound to loopback. Set HERRING_INTERFACE to an interface that both can reach");
  }
  return address;
}

}  // namespace herring::tcp
