#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/counter.h"
#include "core/hmac.h"
#include "transport/transport.h"

/// Endpoints over TCP sockets of Herring's own: no libfabric. docs/adr/0014-builtin-tcp.md says why and how.
namespace herring::tcp {

/// Connections from processes that are not of this job, over all endpoints that share it. Any thread.
struct StrangerCounters {
  Counter bad;     ///< Dropped for bytes that are not the handshake.
  Counter slow;    ///< Dropped because the handshake took too long, or to make room.
  Counter failed;  ///< Ended after the challenge: most likely another secret.
};

struct Options {
  /// Interface names or addresses: the endpoint is on the number-th, from 0 and round again; what goes to a network of
  /// another one starts there. Empty: prefer one that can reach other hosts.
  std::vector<std::string> interfaces = {};
  std::uint32_t number = 0;
  Digest key{};                      ///< Both ends of a connection prove to each other that they have it.
  double connect_timeout_s = 20;     ///< A peer that takes no message for this long fails the sends that wait for it.
  double handshake_limit_s = 6;      ///< A connection that has not proven the key by then is dropped.
  std::string congestion = "auto";   ///< CongestionControl (congestion.h) of all connections.
  std::size_t most_strangers = 512;  ///< Connections that have not proven the key; one more drops one of them.
  /// Told of each stranger: "192.0.2.7:4711 sent bytes that are not Herring's handshake". On the endpoint's thread; may
  /// be empty.
  std::function<void(const std::string&)> on_stranger = {};
  std::shared_ptr<StrangerCounters> strangers = {};  ///< Counted in; may be null.
  /// Tells the endpoint from all others that ever had its port. Zero: random.
  std::array<std::byte, 16> instance = {};
};

/// What one endpoint asked of the system, and for how much. Of the endpoint's thread.
struct Stats {
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t send_calls = 0;
  std::uint64_t receive_calls = 0;
  std::uint64_t event_calls = 0;   ///< epoll_wait and ppoll.
  std::uint64_t empty_events = 0;  ///< Of these, those that did not wait and found nothing.
  std::uint64_t stored = 0;        ///< Messages that came before their receive, and were set aside;
  std::uint64_t stored_bytes = 0;  ///< of which there are so many bytes now.
  std::uint64_t paused = 0;        ///< Times that a connection was not read on, for want of a receive.
  std::uint64_t connections = 0;   ///< That stand now.
};

class Endpoint : public transport::Endpoint {
 public:
  virtual const Stats& stats() const = 0;
};

/// One address of an interface of this host.
struct InterfaceReport {
  std::string name;     ///< "eth0"
  std::string address;  ///< "192.0.2.2"
  bool usable = false;
  std::string reason;  ///< Why not, or why chosen.
};
struct Report {
  std::vector<InterfaceReport> interfaces;
  int chosen = -1;  ///< Index into interfaces.
};
/// What a look around finds, for `herring doctor`.
/// The chosen one is the first of these interfaces; the others are usable too.
Report probe(const std::vector<std::string>& interfaces);

/// Throws Error: kUnavailable where there is no interface to use, kTransport naming the call that failed.
std::unique_ptr<Endpoint> open_endpoint(const Options& options);

}  // namespace herring::tcp
