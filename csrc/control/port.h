#pragma once

#include <cstdint>

#include "control/hub.h"
#include "control/socket.h"

/// Where worker 0's hub listens, and that no other job's hub is there.
namespace herring::control {

/// Binds the first free one of options.ports, as listen_on() does, for options.lead. What holds a port before it, and
/// what is at the others, is asked whether it is a hub with the same secret: members could not tell it from this one.
/// Then throws Error(kMismatch) that names its worker 0. Another program, a hub with another secret, and one whose job
/// is over are no obstacle; the only port is waited for a few seconds where such a job still has it.
UniqueFd listen_alone(const HubOptions& options, std::uint16_t& port);

}  // namespace herring::control
