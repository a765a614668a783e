#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "runtime/link_watch.h"
#include "transport/transport.h"
#include "wire/action.h"
#include "wire/header.h"

namespace herring::runtime {

/// Questions whether a link works, and their answers (docs/wire.md, "Half-open links").
struct PumpLinks {
  PeerId self;
  std::uint64_t job_id = 0;
  std::vector<PeerId> peers;                                    ///< Who may ask, and is asked. Empty: nobody.
  LinkWatch::Options watch = {};                                ///< Without a patience: only answers.
  std::function<void(const Unreachable&)> on_unreachable = {};  ///< Must not call the pump.
};

/// A peer in this process, whose control messages come another way than everybody's
/// (transport::Endpoint::post_receive_from).
struct NearPeer {
  PeerId peer;
  std::size_t control_receives = 0;  ///< Pool of receives kept posted for it alone.
};

struct PumpOptions {
  std::size_t control_receives = 0;  ///< Pool of receives kept posted on kControlTag.
  std::size_t max_body_bytes = 0;    ///< Largest control body: an Announce and its eager payload, an error text.
  PumpLinks links = {};
  std::vector<NearPeer> near = {};
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

/// For engines that never ask for a reduction.
inline std::vector<NotFiniteInput> no_reduction(const ReduceAction&) { return {}; }

/// Carries out an engine's actions on an endpoint and feeds the completions back: the glue between a pure engine
/// and any transport, the simulated one included. Knows no clock and no thread: step() is told the time.
///
/// Engine is worker::Engine, server::Engine or point_to_point::Link; those that wait for peers say for whom
/// (is_waiting(), add_awaited()). Actions are carried out in order, with one
/// exception: a send that the transport answers with kAgain waits in its peer's line, with what goes to that peer after
/// it, and holds up nobody else. A receive that finds no room holds up all that follows, so no send overtakes a receive
/// that its answer needs. A withdrawn receive holds up nothing: the engine is told when its memory is free.
template <class Engine>
class Pump final {
 public:
  using ReduceFunction = std::function<std::vector<NotFiniteInput>(const ReduceAction&)>;
  using CompleteFunction = std::function<void(const CompleteAction&)>;

  /// Everything is borrowed for the life of the pump. `reduce` and `complete` must not call the pump.
  /// Throws Error where the endpoint cannot register the pump's own buffers.
  Pump(Engine& engine, transport::Endpoint& endpoint, PumpOptions options, ReduceFunction reduce,
       CompleteFunction complete);
  /// Withdraws the pump's receives and waits, at most a second, until nothing uses its buffers, nor the engine's
  /// memory; where something still does, shuts the endpoint down.
  ~Pump();
  Pump(const Pump&) = delete;
  Pump& operator=(const Pump&) = delete;

  /// Posts what waits, polls once, delivers, carries out what follows. True where anything happened.
  bool step(Instant now);
  /// Carries out the engine's new actions (after a submit or a tick).
  void flush(Instant now);
  /// When step() is to be called at the latest, though nothing happens; Instant::max() where nothing is waited for.
  Instant next_deadline() const;
  /// This peer is known as gone: it is asked nothing more.
  void forget_peer(PeerId peer);
  /// True where something still waits for room in the transport.
  bool has_backlog() const;
  /// True where a message of the engine's waits to be sent, or has not left yet.
  bool has_unsent() const;
  /// True where the transport has a send that reads this memory, or a receive into it. Looks at all posts.
  bool uses(std::span<const std::byte> memory) const;
  const PumpStats& stats() const;
  /// Zeros for a peer that nothing went to or came from.
  PumpTraffic traffic(PeerId peer) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::runtime
