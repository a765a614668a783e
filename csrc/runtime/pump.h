#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/status.h"
#include "core/types.h"
#include "transport/transport.h"
#include "wire/action.h"
#include "wire/header.h"

namespace herring::runtime {

struct PumpOptions {
  std::size_t control_receives = 0;  ///< Pool of receives kept posted on kControlTag.
  std::size_t max_body_bytes = 0;    ///< Largest control body: an Announce and its eager payload, an error text.
};

struct PumpStats {
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t malformed = 0;  ///< Dropped: not a message of ours (bad magic, checksum, size).
};

/// What went to and came from one peer.
struct PumpTraffic {
  std::uint64_t bytes_sent = 0;  ///< Payload, without headers and announces.
  std::uint64_t bytes_received = 0;
  std::uint64_t messages = 0;  ///< Both ways, of every kind.
};

/// Carries out an engine's actions on an endpoint and feeds the completions back: the glue between a pure engine
/// and any transport, the simulated one included. Knows no clock and no thread: step() is told the time.
///
/// Engine is worker::Engine, server::Engine or point_to_point::Link. Actions are carried out strictly in order: what
/// the transport answers with kAgain waits, and so does all that comes after it, so no send overtakes a receive that
/// its answer needs. A withdrawn receive holds up what follows until the transport has given its memory back.
template <class Engine>
class Pump final {
 public:
  using ReduceFunction = std::function<void(const ReduceAction&)>;
  using CompleteFunction = std::function<void(const CompleteAction&)>;

  /// Everything is borrowed for the life of the pump. `reduce` and `complete` must not call the pump.
  /// Throws Error where the endpoint cannot register the pump's own buffers.
  Pump(Engine& engine, transport::Endpoint& endpoint, PumpOptions options, ReduceFunction reduce,
       CompleteFunction complete);
  /// Withdraws the pump's receives and waits, at most a second, until nothing uses its buffers; buffers that the
  /// transport still holds then live on. Engine memory that is in flight stays the caller's concern: close the
  /// endpoint.
  ~Pump();
  Pump(const Pump&) = delete;
  Pump& operator=(const Pump&) = delete;

  /// Posts what waits, polls once, delivers, carries out what follows. True where anything happened.
  bool step(Instant now);
  /// Carries out the engine's new actions (after a submit or a tick).
  void flush();
  /// True where something still waits for room in the transport.
  bool has_backlog() const;
  const PumpStats& stats() const;
  /// Zeros for a peer that nothing went to or came from.
  PumpTraffic traffic(PeerId peer) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::runtime
