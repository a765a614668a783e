#pragma once

#include <memory>

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include "efa/address.h"
#include "efa/card.h"
#include "efa/select.h"

namespace herring::efa {

/// The libfabric objects of one endpoint, open and enabled. Members are in the order in which they are opened; they
/// close in reverse, which is the order that libfabric wants, except that the endpoint goes before its queues.
struct FabricObjects {
  /// Throws Error(kTransport) that names the call and the provider.
  FabricObjects(std::shared_ptr<Card> on, ProviderKind kind, std::size_t receives);

  std::shared_ptr<Card> card;
  InfoPtr info;
  FidPtr<fid_av> addresses;
  FidPtr<fid_cq> queue;
  FidPtr<fid_eq> events;  ///< What concerns no post; null where the provider has none for such endpoints.
  FidPtr<fid_ep> endpoint;
  int wait_descriptor = -1;  ///< Readable when there may be something to read; -1: the provider has none.
  FabricAddress own_address;
};

}  // namespace herring::efa
