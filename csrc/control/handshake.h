#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "control/protocol.h"

/// Both sides of the one handshake, without a socket: docs/wire-control.md, "Handshake". Who listens is the host (a
/// hub, a rendezvous), who comes the guest.
namespace herring::control {

/// What a host says of itself before it is proven who the guest is.
struct HostFacts {
  std::string_view name = "the hub";
  std::string_view secret;
  std::uint16_t master_port = 0;
  bool started = false;
};

/// What a host answers to a guest's first frame.
struct HostAnswer {
  FrameType type = FrameType::kChallenge;
  SharedBody body;
  std::optional<SessionKeys> keys;  ///< None: the guest is refused.
};
/// Nothing where the frame is no Hello. `nonce` is random, and used once.
std::optional<HostAnswer> answer_hello(const Frame& frame, const HostFacts& host, const Nonce& nonce);

/// One attempt of a guest.
class Guest final {
 public:
  enum class Verdict : std::uint8_t {
    kProven,       ///< The host has the secret: keys().
    kOtherSecret,  ///< It is a host, with another one: challenge() says whose it is.
    kRefused,      ///< It has another version or other features: refusal(). Not proven who says so.
    kNoHost,       ///< It is something else.
  };
  /// `nonce` is random, and used once. `secret` is borrowed for the life of the Guest.
  Guest(std::string_view secret, const Nonce& nonce)
      : secret_(secret), hello_{kProtocolVersion, kProtocolFeatures, nonce} {}
  SharedBody hello() const { return make_body(encode(hello_)); }
  /// The host's first frame.
  Verdict judge(const Frame& answer);
  const Challenge& challenge() const { return challenge_; }
  const Refuse& refusal() const { return refusal_; }
  const SessionKeys& keys() const { return keys_; }

 private:
  std::string_view secret_;
  Hello hello_;
  Challenge challenge_;
  Refuse refusal_;
  SessionKeys keys_{};
};

}  // namespace herring::control
