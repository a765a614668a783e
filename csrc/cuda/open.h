#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/device.h"
#include "core/device_collectives.h"

/// For those who know core's contract alone.
namespace herring::cuda {

/// A GPU, in the context that the process's other users of it have too. The driver is opened with the first one. Throws
/// Error(kUnavailable).
std::unique_ptr<Device> open_device(DeviceId id);

/// NCCL: the library at this path, or if that is empty the one that this process has already (torch's), else by the
/// loader's search path. Opened once for each path. Throws Error(kUnavailable).
std::shared_ptr<DeviceCollectivesLibrary> open_nccl(const std::string& library);

/// The same for a device of another kind, which a plug-in of the framework brings: opened as the plug-in says. Throws
/// Error(kUnavailable) where none has said anything.
std::unique_ptr<Device> open_plug_in(DeviceId id);
using Opener = std::function<std::unique_ptr<Device>(DeviceId)>;
void set_plug_in(Opener opener);

}  // namespace herring::cuda
