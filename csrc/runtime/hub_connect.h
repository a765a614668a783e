#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "core/types.h"
#include "runtime/hub.h"
#include "runtime/hub_protocol.h"
#include "runtime/hub_socket.h"

/// How a member finds the hub of its job among the candidate ports, and authenticates.
namespace herring::runtime::control {

/// A connection whose both ends have authenticated; the hub has given this member its place.
struct Session {
  FrameSocket socket;
  Welcome welcome;
};

class HubSearch final {
 public:
  /// `options` is borrowed for the life of the search.
  explicit HubSearch(const HubClientOptions& options);

  /// One round over the ports. Throws Error where trying again cannot help: a refusal (kMismatch), another secret at
  /// the only port for 2 s (kInvalidArgument).
  std::optional<Session> try_ports(Instant deadline);
  /// The session that a round gave has ended before the job started.
  void note_lost(const std::string& reason);
  /// How long to wait before the next round.
  Duration pause() const;
  /// What to throw at the deadline: where it looked and what it found.
  Error failure(Duration tried) const;
  /// What to throw where the hub of note_lost() did not come back.
  Error hub_lost() const;

 private:
  struct Answer {
    std::string text;  // "connection refused"
    bool other_secret = false;
    bool is_hub = false;  // One with our secret, which cannot take us now.
  };
  std::optional<Session> try_port(std::uint16_t port, Instant deadline);
  std::optional<Session> shake_hands(std::uint16_t port, FrameSocket socket, Instant deadline);
  std::optional<Frame> await_frame(FrameSocket& socket, Instant deadline, Answer& answer) const;
  void refused(std::uint16_t port, const Refuse& refuse);
  void check_secret_patience();
  Error other_secret(std::uint16_t port) const;
  std::string place(std::uint16_t port) const;

  const HubClientOptions& options_;
  std::map<std::uint16_t, Answer> answers_;  // The latest of each port.
  std::uint32_t rounds_ = 0;
  std::uint16_t last_hub_port_ = 0;
  std::string lost_reason_;
  Instant other_secret_since_ = Instant::max();
};

}  // namespace herring::runtime::control
