#pragma once

#include "core/config.h"

namespace herring::python {

/// Python's Config: the values and where each came from. Immutable.
struct PyConfig {
  ConfigResult result;
};

}  // namespace herring::python
