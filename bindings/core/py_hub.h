#pragma once

#include <memory>

#include "bindings/core/python.h"
#include "control/hub.h"

namespace herring::python {

/// Python's HubClient: what Runtime and ServerProcess take their shared reference from.
struct PyHubClient {
  explicit PyHubClient(std::shared_ptr<control::HubClient> client) : owned(std::move(client)) {}
  ProcessOwned<control::HubClient> owned;
};

}  // namespace herring::python
