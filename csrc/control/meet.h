#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "control/handshake.h"
#include "control/socket.h"

/// The guest's half of the handshake, on a socket: for members, for the processes of an elastic job, and for who asks
/// what has a port.
namespace herring::control {

struct Meeting {
  Guest::Verdict verdict = Guest::Verdict::kNoHost;
  Challenge challenge;     ///< kProven, kOtherSecret.
  Refuse refusal;          ///< kRefused.
  std::string why;         ///< kNoHost: "something accepted the connection but did not answer as a hub does".
  bool is_silent = false;  ///< kNoHost: it said nothing.
};
/// Where proven, the socket is sealed and trusted; the guest's first words are the caller's to send.
Meeting meet(FrameSocket& socket, std::string_view secret, Instant deadline);

/// Writes what is queued and waits for the next frame; nothing on failure, which `meeting` then tells.
std::optional<Frame> await_frame(FrameSocket& socket, Instant deadline, Meeting& meeting);

}  // namespace herring::control
