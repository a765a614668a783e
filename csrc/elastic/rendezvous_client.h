#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/types.h"
#include "elastic/message.h"

namespace herring::elastic {

struct RendezvousClientOptions {
  std::string host;
  std::uint16_t port = 0;
  std::string secret;
  Message enter;                                  ///< What it says first.
  Duration dead_after = std::chrono::seconds(5);  ///< Silence after which the rendezvous is lost.
};

/// One process's connection to the rendezvous. A thread of its own answers the signs of life. Calls are safe from any
/// thread.
class RendezvousClient final {
 public:
  /// Connects and authenticates both ways; keeps trying until the deadline, then throws Error(kTimeout) that says where
  /// it looked, kInvalidArgument for another secret.
  RendezvousClient(const RendezvousClientOptions& options, Instant deadline);
  ~RendezvousClient();  ///< close()
  RendezvousClient(const RendezvousClient&) = delete;
  RendezvousClient& operator=(const RendezvousClient&) = delete;

  void send(Message message);
  /// The next message, in order. Where the connection ends: kEnd, with a text that says so, once. False at the deadline
  /// and after wake().
  bool next(Message& message, Instant deadline);
  void wake();
  /// What has come, and not been taken by next(), ends that generation or the job.
  bool has_broken(std::uint64_t generation) const;
  /// Sends what was queued, half a second at most, and ends the connection. One thread at a time; idempotent.
  void close();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::elastic
