#include "point_to_point/message.h"

#include <algorithm>
#include <cstring>
#include <string>

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

std::vector<std::byte> encode_reason(const Status& why) {
  const std::size_t length = std::min(why.message().size(), kMaxReasonText);
  std::vector<std::byte> body(1 + length);
  body[0] = static_cast<std::byte>(why.is_ok() ? Code::kCancelled : why.code());
  if (length > 0) std::memcpy(body.data() + 1, why.message().data(), length);
  return body;
}

Status decode_reason(std::span<const std::byte> body) {
  if (body.empty()) return Status(Code::kProtocol, "the other side gave up without a reason");
  const auto number = std::to_integer<std::uint8_t>(body.front());
  const bool known =
      number > static_cast<std::uint8_t>(Code::kAgain) && number <= static_cast<std::uint8_t>(Code::kInternal);
  std::string text;
  for (const std::byte b : body.subspan(1, std::min(body.size() - 1, kMaxReasonText))) {
    const char c = static_cast<char>(b);
    text += static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? ' ' : c;
  }
  return Status(known ? static_cast<Code>(number) : Code::kProtocol, std::move(text));
}

}  // namespace herring::point_to_point
