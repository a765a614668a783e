#pragma once

#include <memory>

#include "efa/fabric.h"
#include "efa/library.h"
#include "efa/select.h"
#include "transport/transport.h"

namespace herring::efa {

/// Opens fabric, domain, address vector, completion queue and endpoint of their own on the provider that `info` names.
/// Keeps the library. Throws Error(kTransport) naming the call that failed.
std::unique_ptr<transport::Endpoint> open_endpoint(std::shared_ptr<const Library> library, ProviderKind kind,
                                                   const fi_info& info, const FabricOptions& options);

}  // namespace herring::efa
