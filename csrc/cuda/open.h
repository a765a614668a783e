#pragma once

#include <memory>

#include "core/device.h"

/// For those who know core's contract alone.
namespace herring::cuda {

/// A GPU, in the context that the process's other users of it have too. The driver is opened with the first one. Throws
/// Error(kUnavailable).
std::unique_ptr<Device> open_device(DeviceId id);

}  // namespace herring::cuda
