#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/descriptors.h"
#include "efa/fabric.h"
#include "memory/domain.h"
#include "tcp/tcp.h"
#include "transport/transport.h"

namespace herring::runtime {

/// What a process's endpoints are opened on: one provider of libfabric, or Herring's own tcp.
class Network {
 public:
  virtual ~Network() = default;
  /// This process's number-th one, from 0: where there are several cards or interfaces, each is on the next.
  virtual std::unique_ptr<transport::Endpoint> open_endpoint(std::uint32_t number) = 0;
  /// Each connection is a file descriptor.
  virtual bool takes_descriptors() const = 0;
  /// Why its endpoints take no memory of devices; empty: they do.
  virtual std::string no_devices() const = 0;
  /// As long as it is there.
  void keep(DescriptorClaim claim) { claim_ = std::move(claim); }

 private:
  DescriptorClaim claim_;
};

struct NetworkOptions {
  std::vector<std::string> fabric_search;  ///< efa::FabricOptions, same names.
  std::size_t receives = 8192;
  std::uint32_t member = 0;  ///< Index of this process in the job, from 0.
  /// Network::open_endpoint() will be called with cards.endpoints() numbers: cards that register memory have to be
  /// known before any is allocated. Interfaces that HERRING_INTERFACE names are taken in turns.
  efa::CardShare cards = {};
  bool takes_devices = false;                                ///< efa::FabricOptions, same name.
  bool always_registers = false;                             ///< efa::FabricOptions, same name.
  std::uint64_t job_id = 0;                                  ///< With the secret it makes the connections' key.
  std::function<void(const std::string&)> on_stranger = {};  ///< tcp::Options, same names.
  std::shared_ptr<tcp::StrangerCounters> strangers = {};
};

/// By HERRING_PROVIDER. Cards that want memory registered are added to `domain`, which outlives every endpoint. Throws
/// Error(kUnavailable) that says what was looked at.
std::unique_ptr<Network> open_network(const Config& config, const NetworkOptions& options, memory::Domain& domain);

/// What open_network() would choose here, and why, for `herring doctor`.
struct NetworkReport {
  bool is_builtin = false;  ///< Herring's own tcp; else what `fabric` has chosen, if anything.
  std::string why;          ///< Where it is builtin.
  tcp::Report builtin;
  std::string no_builtin;  ///< Why no connection of it could be opened, whatever the interfaces; empty: nothing known.
  efa::FabricReport fabric;
};
NetworkReport probe_network(const Config& config, std::span<const std::string> fabric_search);

}  // namespace herring::runtime
