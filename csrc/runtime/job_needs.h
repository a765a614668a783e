#pragma once

#include <cstdint>

#include "core/config.h"
#include "runtime/placement.h"
#include "transport/limits.h"

/// What a job would ask of its processes, before any of them exists: the placement and the budget for members that are
/// made up.
namespace herring::runtime {

struct JobShape {
  std::uint32_t workers = 1;
  std::uint32_t hosts = 1;  ///< Of the workers, who are spread evenly, by rank.
  std::uint32_t servers = 0;
  std::uint32_t server_hosts = 0;  ///< Of the servers' own; 0: they are on the workers' hosts.
};

/// Of one process, at most, beside tensors, shared memory and records of operations.
struct ProcessNeeds {
  std::uint32_t lanes = 0;             ///< Server lanes in it.
  std::uint64_t connections = 0;       ///< One to each process that it may talk to, the hub among them; with tcp.
  std::uint64_t descriptors = 0;       ///< Open files: two that connect to each other at once have two connections.
  std::uint64_t bytes = 0;             ///< Of Herring's own.
  std::uint64_t registered_bytes = 0;  ///< Of those: pinned where the network card wants that (EFA, verbs).
  std::uint64_t record_bytes = 0;      ///< Records of operations, which come on top.
};

struct JobNeeds {
  Placement placement;
  std::uint64_t posts = transport::kMaxOperations;  ///< Of an endpoint, at most; Budget has those of this job.
  Budget of_two;                                    ///< What two workers with one lane would get, with these settings.
  ProcessNeeds worker;                              ///< One with a server lane, where any worker has one.
  std::uint64_t hub_connections = 0;                ///< What the process of rank 0 has on top,
  std::uint64_t hub_descriptors = 0;                ///< because the hub is in it.
  ProcessNeeds server;                              ///< Each server process; zeros where there are none.
};

/// Throws Error(kInvalidArgument) as make_placement() does, and for hosts without a member.
JobNeeds job_needs(Config config, const JobShape& shape);

}  // namespace herring::runtime
