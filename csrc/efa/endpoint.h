#pragma once

#include <memory>

#include "efa/card.h"
#include "efa/fabric.h"
#include "efa/select.h"
#include "transport/transport.h"

namespace herring::efa {

/// A card's place in the domain that knows what is registered with it. No domain: nothing has to be.
struct CardMemory {
  memory::Domain* domain = nullptr;
  memory::NicId nic;
};

/// Opens address vector, completion queue and endpoint of their own on the card. Throws Error(kTransport) naming the
/// call that failed.
std::unique_ptr<transport::Endpoint> open_endpoint(std::shared_ptr<Card> card, ProviderKind kind,
                                                   const CardMemory& memory, const FabricOptions& options);

}  // namespace herring::efa
