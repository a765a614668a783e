#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "transport/transport.h"
#include "wire/action.h"
#include "wire/header.h"

namespace herring::runtime {

struct PumpOptions {
  std::size_t control_receives = 0;   ///< Pool of receives kept posted on kControlTag.
  std::size_t max_body_bytes = 0;     ///< Largest control body: an Announce and its eager payload, an error text.
};

struct PumpStats {
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t malformed = 0;        ///< Dropped: not a message of ours (bad magic, checksum, size).
};

/// Carries out an engine's actions on an endpoint and feeds the completions back: the glue between csrc/worker or
/// csrc/server and any transport, the simulated one included. Knows no clock and no thread: step() is told the time.
///
/// Engine is worker::Engine or server::Engine. Sends and receives that the transport answers with kAgain wait in order.
template <class Engine>
class Pump final {
 public:
  using ReduceFunction = std::function<void(const ReduceAction&)>;
  using CompleteFunction = std::function<void(const CompleteAction&)>;

  /// Everything is borrowed for the life of the pump.
  Pump(Engine& engine, transport::Endpoint& endpoint, PumpOptions options, ReduceFunction reduce,
       CompleteFunction complete);

  /// Posts what waits, polls once, delivers, carries out what follows. True where anything happened.
  bool step(Instant now);
  /// Carries out the engine's new actions (after a submit or a tick).
  void flush();
  /// True where something still waits for room in the transport.
  bool has_backlog() const;
  const PumpStats& stats() const;
};

}  // namespace herring::runtime
