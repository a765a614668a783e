#include "control/hub.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "bindings/core/py_config.h"
#include "bindings/core/py_hub.h"
#include "bindings/core/py_runtime.h"
#include "bindings/core/python.h"
#include "core/clock.h"
#include "runtime/own_member.h"

namespace herring::python {

namespace {

using control::Hub;
using control::HubClient;
using control::Member;
using control::Role;

struct PyHub {
  explicit PyHub(std::shared_ptr<Hub> hub) : owned(std::move(hub)) {}
  ProcessOwned<Hub> owned;
};

std::unique_ptr<PyHub> make_hub(std::string listen_host, std::vector<std::uint16_t> ports, std::uint32_t workers,
                                std::uint64_t job_id, const PyConfig& config, std::string meet_host,
                                std::uint16_t master_port, double doubt_for, double start_delay, std::string launch) {
  const Config& settings = config.result.config;
  control::HubOptions options;
  options.listen_host = std::move(listen_host);
  options.ports = std::move(ports);
  options.workers = workers;
  options.servers = settings.servers;
  options.secret = settings.secret;
  options.job_id = job_id;
  options.heartbeat = duration_of(settings.heartbeat_s);
  options.dead_after = duration_of(settings.dead_after_s);
  options.logger = std::make_shared<Logger>(logger_options(settings, "rank 0"));
  options.lead = runtime::own_member(Role::kWorker, 0, std::move(launch));
  options.meet_host = std::move(meet_host);
  options.master_port = master_port;
  options.doubt_for = duration_of(doubt_for);
  options.start_delay = duration_of(start_delay);
  return std::make_unique<PyHub>(call_interruptibly([options] { return std::make_shared<Hub>(options); }));
}

Role parse_role(const std::string& role) {
  if (role == "worker") return Role::kWorker;
  if (role == "server") return Role::kServer;
  throw Error(Code::kInvalidArgument, "a role is 'worker' or 'server', not '" + role + "'");
}

std::unique_ptr<PyHubClient> join(std::string host, std::vector<std::uint16_t> ports, const std::string& role,
                                  std::uint32_t rank, std::uint32_t workers, const PyConfig& config, double timeout,
                                  std::uint16_t master_port, std::string launch) {
  control::HubClientOptions options;
  options.host = std::move(host);
  options.ports = std::move(ports);
  options.secret = config.result.config.secret;
  options.self = runtime::own_member(parse_role(role), rank, std::move(launch));
  options.workers = workers;
  options.servers = config.result.config.servers;
  options.master_port = master_port;
  const Instant deadline = deadline_after(timeout);
  return std::make_unique<PyHubClient>(
      call_interruptibly([options, deadline] { return std::make_shared<HubClient>(options, deadline); }));
}

py::list exchange(const PyHubClient& self, std::string name, const py::bytes& blob, double timeout) {
  const std::string_view view = blob;
  std::vector<std::byte> mine(view.size());
  if (!view.empty()) std::memcpy(mine.data(), view.data(), view.size());
  const Instant deadline = deadline_after(timeout);
  const auto blobs = call_interruptibly([client = self.owned.get(), name = std::move(name), mine = std::move(mine),
                                         deadline] { return client->exchange(name, mine, deadline); });
  py::list result;
  for (const auto& each : blobs) result.append(py::bytes(reinterpret_cast<const char*>(each.data()), each.size()));
  return result;
}

}  // namespace

void bind_hub(py::module_& module) {
  py::class_<Member>(module, "Member")
      .def_property_readonly("role",
                             [](const Member& self) { return self.role == Role::kServer ? "server" : "worker"; })
      .def_readonly("rank", &Member::rank)
      .def_readonly("pid", &Member::pid)
      .def_readonly("host_identity", &Member::host_identity)
      .def_readonly("host_name", &Member::host_name)
      .def("__str__", [](const Member& self) { return control::to_string(self); })
      .def("__repr__", [](const Member& self) { return "<herring Member " + control::to_string(self) + ">"; });

  py::class_<PyHub>(module, "Hub")
      .def(py::init(&make_hub), py::kw_only(), py::arg("listen_host"), py::arg("ports"), py::arg("workers"),
           py::arg("job_id"), py::arg("config"), py::arg("meet_host") = "", py::arg("master_port") = 0,
           py::arg("doubt_for") = 0.0, py::arg("start_delay") = 0.0, py::arg("launch") = "")
      .def_property_readonly("port", [](const PyHub& self) { return self.owned.get()->port(); })
      .def("counters",
           [](const PyHub& self) {
             const control::HubCounters seen = self.owned.get()->counters();
             py::dict counters;
             counters["accepted"] = seen.accepted;
             counters["bad_strangers"] = seen.bad_strangers;
             counters["slow_strangers"] = seen.slow_strangers;
             counters["failed_handshakes"] = seen.failed_handshakes;
             counters["joined"] = seen.joined;
             counters["refused"] = seen.refused;
             counters["lost"] = seen.lost;
             counters["protocol_errors"] = seen.protocol_errors;
             return counters;
           })
      .def("close", [](PyHub& self) { self.owned.reset(); });

  py::class_<PyHubClient>(module, "HubClient")
      .def(py::init(&join), py::kw_only(), py::arg("host"), py::arg("ports"), py::arg("role"), py::arg("rank"),
           py::arg("workers"), py::arg("config"), py::arg("timeout"), py::arg("master_port") = 0,
           py::arg("launch") = "")
      .def_property_readonly("job_id", [](const PyHubClient& self) { return self.owned.get()->job_id(); })
      .def_property_readonly("workers", [](const PyHubClient& self) { return self.owned.get()->workers(); })
      .def_property_readonly("servers", [](const PyHubClient& self) { return self.owned.get()->servers(); })
      .def("exchange", &exchange, py::arg("name"), py::arg("blob"), py::arg("timeout"))
      .def(
          "report_failure",
          [](const PyHubClient& self, const std::string& reason) {
            const auto client = self.owned.get();
            py::gil_scoped_release unlocked;
            client->report_failure(reason);
          },
          py::arg("reason"))
      .def("leave", [](const PyHubClient& self) {
        const auto client = self.owned.get();
        py::gil_scoped_release unlocked;
        client->leave();
      });
}

}  // namespace herring::python
