#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace herring::tcp {

/// "0x2a"
inline std::string hex(std::uint64_t value) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(value >> shift) & 15];
  const auto first = text.find_first_not_of('0');
  return "0x" + (first == std::string::npos ? "0" : text.substr(first));
}

/// "Connection reset by peer"
inline std::string error_text(int error) { return std::strerror(error); }

}  // namespace herring::tcp
