#include "control/handshake.h"

#include <utility>

namespace herring::control {
namespace {

HostAnswer refuse(RefuseCode code, std::string text) {
  return {FrameType::kRefuse, make_body(encode(Refuse{code, std::move(text)})), std::nullopt};
}

}  // namespace

std::optional<HostAnswer> answer_hello(const Frame& frame, const HostFacts& host, const Nonce& nonce) {
  const auto hello = frame.type == FrameType::kHello ? decode_hello(frame.body) : std::nullopt;
  if (!hello) return std::nullopt;
  const std::string name(host.name);
  if (hello->version != kProtocolVersion) {
    return refuse(RefuseCode::kVersion, "it speaks version " + std::to_string(hello->version) +
                                            " of the control protocol, " + name + " " +
                                            std::to_string(kProtocolVersion) + "; install the same Herring everywhere");
  }
  if (hello->features != kProtocolFeatures) {
    return refuse(RefuseCode::kFeatures, "it has the control features " + std::to_string(hello->features) + ", " +
                                             name + " " + std::to_string(kProtocolFeatures) +
                                             "; install the same Herring everywhere");
  }
  Challenge challenge;
  challenge.nonce = nonce;
  challenge.master_port = host.master_port;
  challenge.started = host.started;
  const Digest said = transcript(*hello, challenge);
  challenge.proof = hub_proof(host.secret, said);
  return HostAnswer{FrameType::kChallenge, make_body(encode(challenge)), session_keys(host.secret, said)};
}

Guest::Verdict Guest::judge(const Frame& answer) {
  if (answer.type == FrameType::kRefuse) {
    const auto refuse = decode_refuse(answer.body);
    // Only what is said before there are keys is believed.
    if (!refuse || (refuse->code != RefuseCode::kVersion && refuse->code != RefuseCode::kFeatures)) {
      return Verdict::kNoHost;
    }
    refusal_ = *refuse;
    return Verdict::kRefused;
  }
  const auto challenge = answer.type == FrameType::kChallenge ? decode_challenge(answer.body) : std::nullopt;
  if (!challenge) return Verdict::kNoHost;
  challenge_ = *challenge;
  const Digest said = transcript(hello_, challenge_);
  if (!equal_constant_time(hub_proof(secret_, said), challenge_.proof)) return Verdict::kOtherSecret;
  keys_ = session_keys(secret_, said);
  return Verdict::kProven;
}

}  // namespace herring::control
