#include "point_to_point/message.h"

namespace herring::point_to_point {

std::array<std::byte, kEnvelopeBytes> encode_envelope(std::uint64_t message_bytes) {
  std::array<std::byte, kEnvelopeBytes> body;
  for (std::size_t i = 0; i < body.size(); ++i) body[i] = static_cast<std::byte>(message_bytes >> (8 * i));
  return body;
}

std::optional<std::uint64_t> decode_envelope(std::span<const std::byte> body) {
  if (body.size() < kEnvelopeBytes) return std::nullopt;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < kEnvelopeBytes; ++i) bytes |= std::to_integer<std::uint64_t>(body[i]) << (8 * i);
  return bytes;
}

}  // namespace herring::point_to_point
