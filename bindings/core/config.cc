#include "core/config.h"

#include <map>
#include <string>

#include "bindings/core/py_config.h"
#include "bindings/core/python.h"

namespace herring::python {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

const char* text(Switch value) {
  switch (value) {
    case Switch::kAuto:
      return "auto";
    case Switch::kOn:
      return "on";
    case Switch::kOff:
      break;
  }
  return "off";
}

const char* text(Toggle value) { return value == Toggle::kOn ? "on" : "off"; }

const char* text(LogLevel level) {
  switch (level) {
    case LogLevel::kError:
      return "error";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kDebug:
      break;
  }
  return "debug";
}

/// A property that reads one field of Config.
template <class Field>
auto reader(Field Config::*field) {
  return [field](const PyConfig& self) { return self.result.config.*field; };
}

py::list origins(const PyConfig& self) {
  py::list rows;
  for (const ConfigOrigin& origin : self.result.origins) {
    rows.append(py::make_tuple(std::string(origin.name), origin.value, std::string(origin.source)));
  }
  return rows;
}

py::list table() {
  py::list rows;
  for (const ConfigRow& row : config_table()) {
    py::dict entry;
    entry["name"] = std::string(row.name);
    entry["type"] = std::string(row.type);
    entry["default"] = row.default_text;
    entry["range"] = std::string(row.range);
    entry["help"] = std::string(row.help);
    rows.append(entry);
  }
  return rows;
}

PyConfig read(const std::map<std::string, std::string>& overrides) {
  const Pairs arguments(overrides.begin(), overrides.end());
  return PyConfig{read_config(process_environment(), arguments)};
}

}  // namespace

void bind_config(py::module_& module) {
  py::class_<PyConfig>(module, "Config")
      .def_property_readonly("servers", reader(&Config::servers))
      .def_property_readonly("lanes", reader(&Config::lanes))
      .def_property_readonly("part_bytes", reader(&Config::part_bytes))
      .def_property_readonly("chunk_bytes", reader(&Config::chunk_bytes))
      .def_property_readonly("window", reader(&Config::window))
      .def_property_readonly("eager_bytes", reader(&Config::eager_bytes))
      .def_property_readonly("one_hop_hosts", reader(&Config::one_hop_hosts))
      .def_property_readonly("one_hop_bytes", reader(&Config::one_hop_bytes))
      .def_property_readonly("local_part_bytes", reader(&Config::local_part_bytes))
      .def_property_readonly("fusion_bytes", reader(&Config::fusion_bytes))
      .def_property_readonly("fusion_cycle_ms", reader(&Config::fusion_cycle_ms))
      .def_property_readonly("arena_bytes", reader(&Config::arena_bytes))
      .def_property_readonly("failover", [](const PyConfig& self) { return text(self.result.config.failover); })
      .def_property_readonly("checksum", [](const PyConfig& self) { return text(self.result.config.checksum); })
      .def_property_readonly("check_finite", [](const PyConfig& self) { return text(self.result.config.check_finite); })
      .def_property_readonly("intra_node", [](const PyConfig& self) { return text(self.result.config.intra_node); })
      .def_property_readonly("backup_workers", reader(&Config::backup_workers))
      .def_property_readonly("backup_grace_s", reader(&Config::backup_grace_s))
      .def_property_readonly("backup_bytes", reader(&Config::backup_bytes))
      .def_property_readonly("timeout_s", reader(&Config::timeout_s))
      .def_property_readonly("join_timeout_s", reader(&Config::join_timeout_s))
      .def_property_readonly("heartbeat_s", reader(&Config::heartbeat_s))
      .def_property_readonly("dead_after_s", reader(&Config::dead_after_s))
      .def_property_readonly("lane_threads", [](const PyConfig& self) { return text(self.result.config.lane_threads); })
      .def_property_readonly("deadlock_after_s", reader(&Config::deadlock_after_s))
      .def_property_readonly("stall_warning_s", reader(&Config::stall_warning_s))
      .def_property_readonly("cuda", [](const PyConfig& self) { return text(self.result.config.cuda); })
      .def_property_readonly("on_host", reader(&Config::on_host))
      .def_property_readonly("device_memory_bytes", reader(&Config::device_memory_bytes))
      .def_property_readonly("device_blocks", reader(&Config::device_blocks))
      .def_property_readonly("nccl", reader(&Config::nccl))
      .def_property_readonly("gpudirect", [](const PyConfig& self) { return text(self.result.config.gpudirect); })
      .def_property_readonly("tensorflow_stream",
                             [](const PyConfig& self) { return text(self.result.config.tensorflow_stream); })
      .def_property_readonly("spin_us", reader(&Config::spin_us))
      .def_property_readonly("slice_us", reader(&Config::slice_us))
      .def_property_readonly("tcp_congestion", reader(&Config::tcp_congestion))
      .def_property_readonly("libfabric", reader(&Config::libfabric))
      .def_property_readonly("provider", reader(&Config::provider))
      .def_property_readonly("interface", reader(&Config::interface))
      .def_property_readonly("simd", reader(&Config::simd))
      .def_property_readonly("secret", reader(&Config::secret))
      .def_property_readonly("hub", reader(&Config::hub))
      .def_property_readonly("elastic", [](const PyConfig& self) { return text(self.result.config.elastic); })
      .def_property_readonly("rendezvous", reader(&Config::rendezvous))
      .def_property_readonly("journal_bytes", reader(&Config::journal_bytes))
      .def_property_readonly("log_level", [](const PyConfig& self) { return text(self.result.config.log_level); })
      .def_property_readonly("origins", &origins)
      .def_property_readonly("ignored", [](const PyConfig& self) { return self.result.ignored; })
      .def("with_secret",
           [](const PyConfig& self, std::string secret) {
             PyConfig copy = self;
             copy.result.config.secret = std::move(secret);
             return copy;
           })
      .def("__repr__", [](const PyConfig& self) {
        std::string set;
        for (const ConfigOrigin& origin : self.result.origins) {
          if (origin.source == "default") continue;
          set += (set.empty() ? "" : ", ") + std::string(origin.name) + "=" + origin.value;
        }
        return "<herring Config " + (set.empty() ? "all defaults" : set) + ">";
      });
  module.def("read_config", &read, py::arg("overrides") = std::map<std::string, std::string>{});
  module.def("config_table", &table);
}

}  // namespace herring::python
