#pragma once

#include "control/hub.h"

/// The words of the control plane that the composition root uses as its own.
namespace herring::runtime {

using control::Hub;
using control::HubClient;
using control::HubClientOptions;
using control::HubCounters;
using control::HubEvent;
using control::HubOptions;
using control::Member;
using control::Role;
using control::UsedGroup;
using control::Wants;

}  // namespace herring::runtime
