#pragma once

#include <cstdint>
#include <vector>

#include "runtime/job.h"

/// The ways that a job of several workers can take, for tests that must hold on each.
namespace herring::runtime::testing {

struct Place {
  const char* what;
  JobShape shape;
};

inline std::vector<Place> places(std::uint32_t workers) {
  std::vector<Place> all{{"shared memory", {.workers = workers}}};
  if (!has_fabric()) return all;
  all.push_back({"servers", {.workers = workers, .servers = 2}});
  all.push_back({"several hosts", {.workers = workers, .hosts = workers}});
  if (workers > 2) all.push_back({"two hosts", {.workers = workers, .hosts = 2}});
  Config failover;
  failover.failover = Switch::kOn;
  all.push_back({"failover", {.workers = workers, .servers = 2, .config = failover}});
  return all;
}

inline void on_every_place(std::uint32_t workers, const Body& body) {
  for (const Place& place : places(workers)) {
    SCOPED_TRACE(place.what);
    expect_clean(run_job(place.shape, body));
  }
}

}  // namespace herring::runtime::testing
