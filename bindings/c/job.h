#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "collectives/operations.h"
#include "control/hub.h"
#include "runtime/communicator.h"

/// What the handles of the C interface are, for bindings in C++ that have them from elsewhere.

struct herring_job {
  std::shared_ptr<herring::control::Hub> hub;  ///< Of worker 0, where this has opened it.
  std::shared_ptr<herring::control::HubClient> client;
  std::shared_ptr<herring::runtime::Communicator> runtime;
  std::shared_ptr<herring::collectives::Operations> operations;

  /// The job's for a group that the interface does not know.
  std::uint32_t group_size(std::uint32_t group) const;
  mutable std::mutex mutex;
  std::map<std::uint32_t, std::uint32_t> groups;  ///< Sizes by id. Guarded by mutex.
};

struct herring_work {
  std::shared_ptr<herring::runtime::Work> work;
};

struct herring_memory {
  std::shared_ptr<std::byte> bytes;
};
