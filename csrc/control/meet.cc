#include "control/meet.h"

#include <poll.h>

#include "core/hmac.h"

namespace herring::control {

std::optional<Frame> await_frame(FrameSocket& socket, Instant deadline, Meeting& meeting) {
  Frame frame;
  bool open = socket.flush();
  for (;;) {
    switch (socket.next(frame)) {
      case FrameReader::Result::kFrame:
        return frame;
      case FrameReader::Result::kBad:
        meeting.why = "another program answered (" + socket.ending() + ")";
        return std::nullopt;
      case FrameReader::Result::kNeedMore:
        break;
    }
    if (!open) {
      meeting.why = "something closed the connection during the handshake (" + socket.ending() + ")";
      return std::nullopt;
    }
    // Handshake frames fit any socket's buffer, so waiting to write is not needed.
    if (!wait_for(socket.fd(), POLLIN, deadline)) {
      meeting.why = "something accepted the connection but did not answer as a hub does";
      meeting.is_silent = true;
      return std::nullopt;
    }
    open = socket.receive();
  }
}

Meeting meet(FrameSocket& socket, std::string_view secret, Instant deadline) {
  Meeting meeting;
  Nonce nonce;
  random_bytes(nonce);
  Guest guest(secret, nonce);
  socket.send(FrameType::kHello, guest.hello());
  const auto answer = await_frame(socket, deadline, meeting);
  if (!answer) return meeting;
  meeting.verdict = guest.judge(*answer);
  meeting.challenge = guest.challenge();
  meeting.refusal = guest.refusal();
  if (meeting.verdict == Guest::Verdict::kNoHost) meeting.why = "another program answered";
  if (meeting.verdict == Guest::Verdict::kProven) {
    socket.seal_with(guest.keys().to_hub, guest.keys().to_member);
    socket.trust();
  }
  return meeting;
}

}  // namespace herring::control
