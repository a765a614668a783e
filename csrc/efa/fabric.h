#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "transport/cards.h"
#include "transport/transport.h"

/// libfabric, loaded at run time. The only folder that includes rdma/*.h.
namespace herring::efa {

/// The processes of this host that share its cards, in the same order in all of them.
struct CardShare {
  std::vector<transport::CardUser> users;
  std::uint32_t self = 0;
  std::uint32_t first = 0;  ///< deal_cards(), same name.

  /// Of cards that are taken in turns instead, this process's first one.
  std::uint32_t turn() const { return first + self; }
  std::uint32_t endpoints() const { return users.empty() ? 1 : users[self].endpoints; }
};

struct FabricOptions {
  std::string library;            ///< Path of libfabric.so; empty: search.
  std::string provider = "auto";  ///< auto (efa, verbs, tcp), or one of them.
  std::string interface;          ///< Interface name, address, or empty: prefer one that can reach other hosts.
  /// Of several EFA devices the number-th, from 0 and round again, of those that are dealt to this process
  /// (transport::deal_cards()); of all, where `cards` has no users.
  std::uint32_t number = 0;
  CardShare cards;
  /// Further files to try last: where PyPI wheels keep theirs (the binding finds them).
  std::vector<std::string> search;
  std::size_t receives = 8192;    ///< Posted at the same moment on one endpoint: layered providers make room for them.
  double connect_timeout_s = 20;  ///< A peer that takes no message for this long fails the sends that wait for it.
  bool takes_devices = false;     ///< GPUDirect: memory of devices too, where the chosen card does; else as ever.
  bool always_registers = false;  ///< Memory is registered though the provider would take any: as with EFA, for tests.
};

/// Which of several devices this process's number-th one is, by their nodes (at least one).
std::uint32_t place_among(std::span<const int> nodes, const CardShare& cards, std::uint32_t number);

struct ProviderReport {
  std::string name;    ///< "tcp"
  std::string domain;  ///< "eth0"
  bool usable = false;
  std::string reason;  ///< Why not usable, or why chosen.
};

/// What a look around found, for `herring doctor`. Never throws for what is merely absent.
struct FabricReport {
  std::string path;                ///< Empty: no library found.
  std::string version;             ///< "2.5"
  std::vector<std::string> tried;  ///< "path: reason", in order.
  std::vector<ProviderReport> providers;
  int chosen = -1;         ///< Index into providers.
  std::string no_devices;  ///< Of FabricOptions::takes_devices: why the chosen one takes no memory of devices.
};
FabricReport probe(const FabricOptions& options);

/// A loaded library with one provider chosen: opens endpoints. Thread-safe. Endpoints keep the library loaded.
class Fabric final {
 public:
  /// Throws Error(kUnavailable) that lists what was tried and what to install or set. Where the provider wants memory
  /// registered, its card is added to `domain`, which outlives every endpoint.
  Fabric(const FabricOptions& options, memory::Domain& domain);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  const std::string& provider() const;
  /// Of the devices that FabricOptions::number chose among; at least one.
  const std::vector<int>& nodes() const;
  /// Why memory of devices is not taken (MemoryKind::kDevice); empty: it is.
  const std::string& no_devices() const;
  /// Each endpoint has a completion queue of its own. Where memory is registered, they share a libfabric domain, and so
  /// what is registered; else nothing.
  std::unique_ptr<transport::Endpoint> open_endpoint();

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace herring::efa
