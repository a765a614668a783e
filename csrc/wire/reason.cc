#include "wire/reason.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace herring::wire {

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
  const bool known = number > static_cast<std::uint8_t>(Code::kAgain) && number <= static_cast<std::uint8_t>(kLastCode);
  std::string text;
  for (const std::byte b : body.subspan(1, std::min(body.size() - 1, kMaxReasonText))) {
    const auto byte = std::to_integer<std::uint8_t>(b);
    text += byte < 0x20 || byte == 0x7F ? ' ' : static_cast<char>(byte);
  }
  return Status(known ? static_cast<Code>(number) : Code::kProtocol, std::move(text));
}

}  // namespace herring::wire
