#include "runtime/job_needs.h"

#include "bindings/core/py_config.h"
#include "bindings/core/python.h"

namespace herring::python {
namespace {

py::dict process_dict(const runtime::ProcessNeeds& needs) {
  py::dict result;
  result["lanes"] = needs.lanes;
  result["connections"] = needs.connections;
  result["descriptors"] = needs.descriptors;
  result["bytes"] = needs.bytes;
  result["registered_bytes"] = needs.registered_bytes;
  result["record_bytes"] = needs.record_bytes;
  return result;
}

py::dict needs_dict(const PyConfig& config, const runtime::JobShape& shape) {
  const runtime::JobNeeds needs = runtime::job_needs(config.result.config, shape);
  const runtime::Placement& placement = needs.placement;
  const runtime::Budget& budget = placement.budget;
  py::dict result;
  result["lanes"] = placement.lanes.size();
  result["is_failover"] = placement.failover;
  result["chunk_bytes"] = placement.chunk_bytes;
  result["eager_bytes"] = budget.eager_bytes;
  result["announce_credits"] = budget.announce_credits;
  result["most_eager_bytes"] = needs.of_two.eager_bytes;
  result["most_announce_credits"] = needs.of_two.announce_credits;
  result["lane_windows"] = budget.lane_windows;
  result["posted_limit"] = needs.posts;
  result["posted_worker"] = budget.worker.total();
  result["posted_messages"] = budget.messages.total();
  result["posted_lane"] = budget.lane.total();
  result["worker"] = process_dict(needs.worker);
  result["hub_connections"] = needs.hub_connections;
  result["hub_descriptors"] = needs.hub_descriptors;
  result["server"] = process_dict(needs.server);
  return result;
}

}  // namespace

void bind_job_needs(py::module_& module) {
  module.def(
      "job_needs",
      [](const PyConfig& config, std::uint32_t workers, std::uint32_t hosts, std::uint32_t servers,
         std::uint32_t server_hosts) {
        return needs_dict(config, {workers, hosts, servers, server_hosts});
      },
      py::arg("config"), py::kw_only(), py::arg("workers"), py::arg("hosts"), py::arg("servers"),
      py::arg("server_hosts"));
}

}  // namespace herring::python
