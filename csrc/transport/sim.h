#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "core/types.h"
#include "transport/limits.h"
#include "transport/transport.h"

/// A network inside one process, under a virtual clock: every delay, reordering and refusal comes from one seed, so
/// that a schedule that fails once fails again. Not thread-safe.
namespace herring::transport {

struct SimOptions {
  Duration min_delay = std::chrono::microseconds(5);  ///< One way, uniform in [min_delay, max_delay].
  Duration max_delay = std::chrono::microseconds(50);
  double straggler_chance = 0;  ///< A message with this chance takes straggler_factor times as long.
  double straggler_factor = 20;
  double again_chance = 0;                      ///< A post is refused with kAgain by this chance, though there is room.
  std::size_t max_sends = 1024;                 ///< Sends of one endpoint in flight; one more is kAgain.
  std::size_t max_operations = kMaxOperations;  ///< Sends and receives of one endpoint together; one more is kAgain.
  double uplink_bytes_per_second = 0;           ///< Of each endpoint; 0: no limit.
  double downlink_bytes_per_second = 0;
  double buffered_chance = 0.5;  ///< A send with this chance completes before its message is delivered.
  /// A message with this chance arrives with some of its bits turned over; half of those have one among the first
  /// damage_head_bytes, where headers are.
  double damage_chance = 0;
  std::size_t damage_head_bytes = 64;
  /// A receive with this chance is taken back late, up to slow_cancel_delay: as where a message is landing in it.
  double slow_cancel_chance = 0;
  Duration slow_cancel_delay = std::chrono::milliseconds(20);
  /// Of messages with this tag more may come than receives are posted: while a link is cut several may be held back.
  std::optional<Tag> surplus_tag = {};
  double duplicate_chance = 0;  ///< A message to kControlTag, whose receives are a pool, with this chance comes again.
};

struct SimStats {
  std::uint64_t messages = 0;  ///< Delivered.
  std::uint64_t bytes = 0;
  std::uint64_t unexpected = 0;  ///< Arrived where no receive was posted for their tag, but for surplus_tag.
  std::uint64_t truncated = 0;   ///< Longer than the receive they met.
  std::uint64_t refused = 0;     ///< Posts answered with kAgain.
  std::uint64_t damaged = 0;     ///< Delivered with bits turned over.
  std::uint64_t duplicated = 0;  ///< Came again.
};

/// Opens endpoints that reach each other. Endpoints share the network's state and may outlive the SimNetwork object.
class SimNetwork final {
 public:
  explicit SimNetwork(std::uint64_t seed, const SimOptions& options = {});
  ~SimNetwork();
  SimNetwork(const SimNetwork&) = delete;
  SimNetwork& operator=(const SimNetwork&) = delete;

  /// Endpoints are numbered 0, 1, ... in the order in which they are opened.
  std::unique_ptr<Endpoint> open_endpoint();

  Instant now() const;
  /// When the next thing happens; Instant::max() where nothing is in flight.
  Instant next_event() const;
  /// Moves the clock to the next event and lets it, and everything due at the same instant, happen. False where nothing
  /// is in flight.
  bool advance();
  /// Moves the clock to `when`, with all events on the way. An earlier time is ignored.
  void advance_to(Instant when);
  /// True where poll() of that endpoint has something.
  bool has_completions(std::size_t endpoint) const;
  /// All endpoints of which that is true.
  const std::set<std::size_t>& busy() const;
  /// True where a post of that endpoint that has not completed may still read or write this memory.
  bool is_borrowed(std::size_t endpoint, std::span<const std::byte> memory) const;

  /// Of SimStats::unexpected, those of this endpoint; and how many of them have met no receive to this day.
  std::uint64_t unexpected(std::size_t endpoint) const;
  std::size_t unmatched(std::size_t endpoint) const;
  /// The posted receives of an endpoint, by tag: what somebody who sees all of the traffic could guess.
  struct Posted {
    Tag tag;
    std::size_t bytes = 0;
  };
  std::vector<Posted> posted(std::size_t endpoint) const;

  /// All messages to and from this endpoint take `factor` times as long from now on.
  void set_slowness(std::size_t endpoint, double factor);
  /// The endpoint's process is gone: it neither sends nor receives any more. As with libfabric, nobody is told.
  void kill(std::size_t endpoint);
  /// Messages between the two are held back until heal().
  void partition(std::size_t a, std::size_t b);
  void heal(std::size_t a, std::size_t b);
  /// Messages from one to the other vanish from now on, and those on their way too. As with a filter on the way, nobody
  /// is told: their sends complete or do not (buffered_chance), until the peer is removed.
  void block(std::size_t from, std::size_t to);

  const SimStats& stats() const;

  class State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace herring::transport
