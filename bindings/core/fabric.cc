#include "efa/fabric.h"

#include "bindings/core/py_config.h"
#include "bindings/core/python.h"
#include "intra_node/neighborhood.h"

namespace herring::python {
namespace {

py::dict probe(const PyConfig& config, std::vector<std::string> search) {
  const efa::FabricOptions options{config.result.config.libfabric, config.result.config.provider,
                                   config.result.config.interface, std::move(search)};
  const efa::FabricReport report = call_interruptibly([options] { return efa::probe(options); });
  py::list providers;
  for (const efa::ProviderReport& provider : report.providers) {
    py::dict entry;
    entry["name"] = provider.name;
    entry["domain"] = provider.domain;
    entry["usable"] = provider.usable;
    entry["reason"] = provider.reason;
    providers.append(entry);
  }
  py::dict result;
  result["path"] = report.path;
  result["version"] = report.version;
  result["tried"] = report.tried;
  result["providers"] = providers;
  result["chosen"] = report.chosen;
  return result;
}

}  // namespace

void bind_fabric(py::module_& module) {
  module.def("probe_fabric", &probe, py::arg("config"), py::arg("search") = std::vector<std::string>{});
  module.def("host_identity", &intra_node::host_identity);
}

}  // namespace herring::python
