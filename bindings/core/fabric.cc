#include "bindings/core/py_config.h"
#include "bindings/core/python.h"
#include "intra_node/neighborhood.h"
#include "runtime/network.h"

namespace herring::python {
namespace {

py::dict entry_of(const std::string& name, const std::string& domain, bool usable, const std::string& reason) {
  py::dict entry;
  entry["name"] = name;
  entry["domain"] = domain;
  entry["usable"] = usable;
  entry["reason"] = reason;
  return entry;
}

py::dict probe(const PyConfig& config, std::vector<std::string> search) {
  const runtime::NetworkReport report = call_interruptibly(
      [settings = config.result.config, search] { return runtime::probe_network(settings, search); });
  py::list providers;
  for (const efa::ProviderReport& provider : report.fabric.providers) {
    providers.append(entry_of(provider.name, provider.domain, provider.usable, provider.reason));
  }
  py::list interfaces;
  for (const tcp::InterfaceReport& one : report.builtin.interfaces) {
    interfaces.append(entry_of("builtin", one.name + " (" + one.address + ")", one.usable, one.reason));
  }
  py::dict result;
  result["path"] = report.fabric.path;
  result["version"] = report.fabric.version;
  result["tried"] = report.fabric.tried;
  result["providers"] = providers;
  result["chosen"] = report.fabric.chosen;
  result["no_devices"] = report.fabric.no_devices;
  result["interfaces"] = interfaces;
  result["interface"] = report.builtin.chosen;
  result["is_builtin"] = report.is_builtin;
  result["why_builtin"] = report.why;
  result["no_builtin"] = report.no_builtin;
  return result;
}

}  // namespace

void bind_fabric(py::module_& module) {
  module.def("probe_fabric", &probe, py::arg("config"), py::arg("search") = std::vector<std::string>{});
  module.def("host_identity", &intra_node::host_identity);
}

}  // namespace herring::python
