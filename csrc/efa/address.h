#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/types.h"
#include "efa/select.h"
#include "transport/transport.h"

/// What Endpoint::address() carries: "HFA" and a format number, the provider, libfabric's address format, fi_getname.
namespace herring::efa {

struct FabricAddress {
  ProviderKind kind = ProviderKind::kTcp;
  std::uint32_t format = 0;     ///< FI_SOCKADDR_IN, FI_ADDR_EFA, ...
  std::vector<std::byte> name;  ///< What fi_getname gave and fi_av_insert takes.
};

transport::Address encode_address(const FabricAddress& address);

/// Decodes a peer's address and checks that an endpoint with address `own` can talk to it. Throws
/// Error(kInvalidArgument) that names the peer and says what to set: not an address, another provider or address
/// format, loopback on one side only.
FabricAddress decode_peer_address(PeerId peer, std::span<const std::byte> bytes, const FabricAddress& own);

/// "192.0.2.2:41234" for IP addresses; hexadecimal otherwise.
std::string to_string(const FabricAddress& address);

}  // namespace herring::efa
