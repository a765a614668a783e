#pragma once

#include <string>
#include <vector>

#include "core/config.h"
#include "core/types.h"
#include "runtime/control.h"
#include "transport/transport.h"

/// How the members of a job that has started learn where the others' endpoints are.
namespace herring::runtime {

/// What a process has opened. Nothing in it where the job needs no network.
struct OwnAddresses {
  std::vector<transport::Address> worker;  ///< A worker's: the endpoint that talks to lanes, the one for other workers.
  std::vector<transport::Address> lanes;   ///< Of this process.
};

/// What it has to know of the others.
struct OthersAddresses {
  std::vector<transport::Address> workers;                ///< By rank: where lanes reach them. Empty without lanes.
  control::Blobs peers;                                   ///< By rank: where other workers reach them.
  std::vector<std::vector<transport::Address>> lanes_of;  ///< By the member's index.
};

/// The settings that both ends of the data plane derive sizes from.
std::string settings_that_must_agree(const Config& config);

/// Tells the others, and learns from them. Throws Error(kMismatch) where settings differ, naming the member and both
/// values; kProtocol where a member told something else than a correct one does; and as HubClient::exchange().
OthersAddresses introduce(HubClient& hub, const std::string& settings, const OwnAddresses& own, Instant deadline);

}  // namespace herring::runtime
