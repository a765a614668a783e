#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "control/hub.h"
#include "control/meet.h"
#include "control/protocol.h"
#include "control/socket.h"
#include "core/types.h"

/// How a member finds the hub of its job among the candidate ports, and authenticates.
namespace herring::control {

/// A connection whose both ends have authenticated; the hub has given this member its place.
struct Session {
  FrameSocket socket;
  Welcome welcome;
};

class HubSearch final {
 public:
  /// `options` is borrowed for the life of the search.
  explicit HubSearch(const HubClientOptions& options);

  /// One round over the ports. Throws Error where trying again cannot help: a refusal (kMismatch), for 2 s another
  /// secret where the hub is surely ours (kInvalidArgument) or another job in our place (kMismatch).
  std::optional<Session> try_ports(Instant deadline);
  /// After a round: the refusal of a hub with our secret in whose job our place is another process's.
  std::optional<std::string> other_job() const;
  /// After a round: something took the connection and said nothing.
  bool is_silent() const;
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
    std::string text;     // "connection refused"
    bool is_hub = false;  // One with our secret, which cannot take us now.
    bool other_secret = false;
    bool is_ours = false;  // Other secret: it can only be the hub of our job.
    bool is_silent = false;
    bool other_job = false;  // Our secret, and our place there is another process's.
    static Answer of(const Meeting& meeting) { return {meeting.why, false, false, false, meeting.is_silent, false}; }
  };
  std::optional<Session> try_port(std::uint16_t port, Instant deadline);
  std::optional<Session> shake_hands(std::uint16_t port, FrameSocket socket, Instant deadline);
  std::optional<Session> ask_in(std::uint16_t port, FrameSocket socket, Instant deadline);
  void refused(std::uint16_t port, const Refuse& refuse);
  void check_patience();
  Error other_secret(std::uint16_t port) const;
  Error refusal(std::uint16_t port, const std::string& text) const;
  std::string place(std::uint16_t port) const;

  const HubClientOptions& options_;
  std::map<std::uint16_t, Answer> answers_;  // The latest of each port.
  std::uint32_t rounds_ = 0;
  std::uint16_t last_hub_port_ = 0;
  std::string lost_reason_;
  Instant hopeless_since_ = Instant::max();
};

}  // namespace herring::control
