#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine_program.h"
#include "wire/header.h"

/// What a hostile process makes of a message, for all targets that feed engines.
namespace herring::fuzz {

/// XORs bytes of header and body as the program says (`most` of them, a power of two less one), and seals the header
/// again. Nothing where it is no header any more.
inline std::optional<wire::Header> mutate(Program& program, const wire::Header& header, std::span<std::byte> body,
                                          int most) {
  wire::HeaderBytes bytes = wire::encode(header);
  for (int count = program.next() & most; count > 0; --count) {
    const std::size_t at = program.next();
    const auto with = static_cast<std::byte>(program.next());
    if (at < bytes.size()) {
      bytes[at] ^= with;
    } else if (at - bytes.size() < body.size()) {
      body[at - bytes.size()] ^= with;
    }
  }
  const std::uint32_t crc = wire::crc32c(std::span(bytes).first(76));
  for (std::size_t i = 0; i < 4; ++i) bytes[76 + i] = static_cast<std::byte>(crc >> (8 * i));
  return wire::decode(bytes);
}

/// Makes the sanitizer look at every byte.
inline void touch(std::span<const std::byte> bytes) {
  volatile unsigned sum = 0;
  for (const std::byte b : bytes) sum = sum + std::to_integer<unsigned>(b);
}

inline bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  return !a.empty() && !b.empty() && a.data() < b.data() + b.size() && b.data() < a.data() + a.size();
}

}  // namespace herring::fuzz
