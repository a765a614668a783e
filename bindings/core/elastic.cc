#include <pybind11/functional.h>

#include "bindings/core/buffer.h"
#include "bindings/core/py_config.h"
#include "bindings/core/py_runtime.h"
#include "bindings/core/python.h"
#include "core/clock.h"
#include "elastic/elastic_runtime.h"
#include "elastic/rendezvous_server.h"
#include "runtime/own_member.h"

namespace herring::python {
namespace {

using elastic::Change;
using elastic::ElasticRuntime;
using elastic::ElasticServer;
using elastic::RendezvousServer;

elastic::Home make_home(const PyConfig& config, std::string host, std::uint16_t port, std::uint32_t rank,
                        std::vector<std::string> fabric_search) {
  elastic::Home home;
  home.config = config.result.config;
  home.host = std::move(host);
  home.port = port;
  home.self = runtime::own_member(control::Role::kWorker, rank);
  home.fabric_search = std::move(fabric_search);
  return home;
}

struct PyElasticRuntime : PyRuntime {
  PyElasticRuntime(std::shared_ptr<ElasticRuntime> runtime, const Config& config)
      : PyRuntime(runtime, config), elastic(runtime) {}
  std::shared_ptr<ElasticRuntime> get() const {
    owned.get();  // Throws in a forked child.
    if (auto runtime = elastic.lock()) return runtime;
    throw Error(Code::kShutdown, "this object was closed");
  }
  std::weak_ptr<ElasticRuntime> elastic;
};

struct PyElasticServer {
  explicit PyElasticServer(std::shared_ptr<ElasticServer> server) : owned(std::move(server)) {}
  ProcessOwned<ElasticServer> owned;
};

struct PyRendezvous {
  explicit PyRendezvous(std::shared_ptr<RendezvousServer> server) : owned(std::move(server)) {}
  ProcessOwned<RendezvousServer> owned;
};

std::unique_ptr<PyElasticRuntime> join_elastic(const PyConfig& config, std::string host, std::uint16_t port,
                                               std::uint32_t rank, std::vector<std::string> fabric_search,
                                               double timeout, std::uint32_t workers) {
  elastic::Home home = make_home(config, std::move(host), port, rank, std::move(fabric_search));
  home.workers = workers;
  Config config_of_calls = home.config;
  config_of_calls.fusion_bytes = 0;  // Its journal is by the name of each operation, and its ranks change.
  const Instant deadline = deadline_after(timeout);
  return std::make_unique<PyElasticRuntime>(
      call_interruptibly([home, deadline] { return std::make_shared<ElasticRuntime>(home, deadline); }),
      config_of_calls);
}

std::unique_ptr<PyElasticServer> join_as_server(const PyConfig& config, std::string host, std::uint16_t port,
                                                std::uint32_t rank, std::vector<std::string> fabric_search,
                                                double timeout) {
  const elastic::Home home = make_home(config, std::move(host), port, rank, std::move(fabric_search));
  const Instant deadline = deadline_after(timeout);
  return std::make_unique<PyElasticServer>(
      call_interruptibly([home, deadline] { return std::make_shared<ElasticServer>(home, deadline); }));
}

std::unique_ptr<PyRendezvous> open_rendezvous(const PyConfig& config, std::string listen_host, std::uint16_t port,
                                              std::uint32_t workers, std::uint32_t servers, std::uint32_t min_workers) {
  const Config& settings = config.result.config;
  elastic::RendezvousServerOptions options;
  options.listen_host = std::move(listen_host);
  options.port = port;
  options.secret = settings.secret;
  options.job.workers = workers;
  options.job.servers = servers;
  options.job.min_workers = min_workers;
  options.job.heartbeat = duration_of(settings.heartbeat_s);
  options.job.dead_after = duration_of(settings.dead_after_s);
  // Before those that wait give up.
  options.job.start_within = duration_of(settings.join_timeout_s * 0.8);
  options.logger = std::make_shared<Logger>(logger_options(settings, "rendezvous"));
  return std::make_unique<PyRendezvous>(std::make_shared<RendezvousServer>(options));
}

void call_on_change(const PyElasticRuntime& self, const py::function& function) {
  const std::int32_t pid = process_id();
  const std::shared_ptr<py::function> kept(new py::function(function), [pid](py::function* callback) {
    if (is_finalizing() || process_id() != pid) return;
    py::gil_scoped_acquire locked;
    delete callback;
  });
  const auto runtime = self.get();
  py::gil_scoped_release unlocked;
  runtime->on_change([kept, pid](const Change& change) {
    if (is_finalizing() || process_id() != pid) return;
    py::gil_scoped_acquire locked;
    try {
      (*kept)(change.generation, change.rank, change.size, change.lost, change.joined, change.reason);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a callback of herring.on_membership_change");
    }
  });
}

bool wait_until_over(const PyRendezvous& self) {
  const auto rendezvous = self.owned.get();
  while (true) {
    {
      py::gil_scoped_release unlocked;
      if (rendezvous->wait(std::chrono::steady_clock::now() + kSignalPeriod)) break;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  return rendezvous->ended_well();
}

}  // namespace

void bind_elastic(py::module_& module) {
  py::class_<PyElasticRuntime, PyRuntime>(module, "ElasticRuntime")
      .def(py::init(&join_elastic), py::kw_only(), py::arg("config"), py::arg("host"), py::arg("port"), py::arg("rank"),
           py::arg("fabric_search"), py::arg("timeout"), py::arg("workers") = 0)
      .def_property_readonly("generation", [](const PyElasticRuntime& self) { return self.get()->generation(); })
      .def_property_readonly("job_id", [](const PyElasticRuntime& self) { return self.get()->job_id(); })
      .def_property_readonly("workers", [](const PyElasticRuntime& self) { return self.get()->members(); })
      .def_property_readonly("server_processes",
                             [](const PyElasticRuntime& self) { return self.get()->server_processes(); })
      .def_property_readonly("waiting", [](const PyElasticRuntime& self) { return self.get()->waiting(); })
      .def(
          "let_in",
          [](const PyElasticRuntime& self, double timeout) {
            const Instant deadline = deadline_after(timeout);
            return call_interruptibly([runtime = self.get(), deadline] { return runtime->let_in(deadline); });
          },
          py::arg("timeout"))
      .def(
          "start_again",
          [](const PyElasticRuntime& self, double timeout) {
            const Instant deadline = deadline_after(timeout);
            call_interruptibly([runtime = self.get(), deadline] { runtime->start_again(deadline); });
          },
          py::arg("timeout"))
      .def("on_change", &call_on_change, py::arg("callback"));
  py::class_<PyElasticServer>(module, "ElasticServer")
      .def(py::init(&join_as_server), py::kw_only(), py::arg("config"), py::arg("host"), py::arg("port"),
           py::arg("rank"), py::arg("fabric_search"), py::arg("timeout"))
      .def("run",
           [](const PyElasticServer& self) {
             const auto server = self.owned.get();
             call_interruptibly([server] { return server->run(); }, [server] { server->stop(); }).or_throw();
           })
      .def("stop", [](const PyElasticServer& self) { self.owned.get()->stop(); })
      .def("counters", [](const PyElasticServer& self) { return to_dict(self.owned.get()->counters()); })
      .def("close", [](PyElasticServer& self) { self.owned.reset(); });
  py::class_<PyRendezvous>(module, "Rendezvous")
      .def(py::init(&open_rendezvous), py::kw_only(), py::arg("config"), py::arg("listen_host"), py::arg("port"),
           py::arg("workers"), py::arg("servers"), py::arg("min_workers"))
      .def_property_readonly("port", [](const PyRendezvous& self) { return self.owned.get()->port(); })
      .def_property_readonly("generation", [](const PyRendezvous& self) { return self.owned.get()->generation(); })
      .def("wait", &wait_until_over)
      .def("close", [](PyRendezvous& self) { self.owned.reset(); });
}

}  // namespace herring::python
