#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/log.h"
#include "elastic/rendezvous.h"

namespace herring::elastic {

struct RendezvousServerOptions {
  std::string listen_host;  ///< Address to bind; empty: all. The hubs listen there as well, on any port.
  std::uint16_t port = 0;   ///< 0: any.
  std::string secret;       ///< Of the job; as the hub's.
  Rendezvous::Options job;
  std::shared_ptr<Logger> logger;  ///< Told of generations and of strangers. May be empty.
};

/// Carries out what the Rendezvous decides: sockets, and a hub for each generation. Runs on its own thread from
/// construction to destruction.
class RendezvousServer final {
 public:
  explicit RendezvousServer(const RendezvousServerOptions& options);  ///< Throws Error where the port is taken.
  ~RendezvousServer();
  RendezvousServer(const RendezvousServer&) = delete;
  RendezvousServer& operator=(const RendezvousServer&) = delete;
  std::uint16_t port() const;
  /// Until the job has ended, or the deadline (false).
  bool wait(Instant deadline);
  bool ended_well() const;
  std::uint64_t generation() const;  ///< The latest; 0 before the first.
  std::uint64_t messages() const;    ///< That workers and servers have sent since they came in.

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::elastic
