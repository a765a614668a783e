#pragma once

#include <string_view>

namespace herring {

/// Whether a variable is one that Kubernetes (and Docker's links) put into every container for a service whose name
/// begins with "herring": HERRING_SERVICE_HOST=10.0.0.1, HERRING_SERVICE_PORT=80, HERRING_SERVICE_PORT_HTTP=80,
/// HERRING_PORT=tcp://10.0.0.1:80, HERRING_PORT_80_TCP=tcp://10.0.0.1:80 and its _PROTO, _PORT and _ADDR; for a service
/// "herring-hub" with HERRING_HUB_ in front. Name and value must both be as there.
bool is_service_link(std::string_view name, std::string_view value);

}  // namespace herring
