#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/types.h"
#include "transport/transport.h"

/// What Endpoint::address() carries: "HTA" and a format number, the address family, port, IP address, instance.
namespace herring::tcp {

/// Of one endpoint of one job, or random: a process that has got the port of another is not taken for it.
using Instance = std::array<std::byte, 16>;

struct SocketAddress {
  sockaddr_storage storage{};  ///< sockaddr_in or sockaddr_in6.

  int family() const { return storage.ss_family; }
  socklen_t length() const;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  std::span<const std::byte> ip() const;  ///< 4 or 16 bytes.
  bool is_loopback() const;
  bool is_link_local() const;
};

/// "192.0.2.2", "2001:db8::1"
std::string ip_text(const SocketAddress& address);
/// "192.0.2.2:41234", "[2001:db8::1]:41234"
std::string to_string(const SocketAddress& address);

struct EndpointAddress {
  SocketAddress socket;
  Instance instance{};
};

transport::Address encode_address(const EndpointAddress& address);

/// Decodes a peer's address and checks that an endpoint at `own` can talk to it. Throws Error(kInvalidArgument) that
/// names the peer and says what to set: not an address of these endpoints, another family, loopback on one side only.
EndpointAddress decode_peer_address(PeerId peer, std::span<const std::byte> bytes, const EndpointAddress& own);

}  // namespace herring::tcp
