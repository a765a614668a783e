#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "core/types.h"

/// What stands in front of each message on a connection: tag (8 bytes), bytes that follow (4), check (4), little
/// endian. The check shows a stream that is out of step, not damage: payloads have checksums where those are on.
namespace herring::tcp {

inline constexpr std::size_t kFrameBytes = 16;
inline constexpr std::size_t kMaxMessageBytes = 0xFFFF'FFFF;
using FrameBytes = std::array<std::byte, kFrameBytes>;

struct Frame {
  Tag tag;
  std::uint32_t bytes = 0;
};

inline std::uint32_t frame_check(const Frame& frame) {
  const std::uint64_t mixed = (frame.tag.value ^ 0x4854'4631'0000'0000ull) * 0x9E37'79B9'7F4A'7C15ull + frame.bytes;
  return static_cast<std::uint32_t>((mixed * 0xBF58'476D'1CE4'E5B9ull) >> 32);
}

template <class Integer>
void put(std::span<std::byte> out, std::size_t at, Integer value) {
  for (std::size_t i = 0; i < sizeof(value); ++i) out[at + i] = static_cast<std::byte>(value >> (8 * i) & 0xFF);
}
template <class Integer>
Integer get(std::span<const std::byte> in, std::size_t at) {
  Integer value = 0;
  for (std::size_t i = 0; i < sizeof(value); ++i) value |= static_cast<Integer>(in[at + i]) << (8 * i);
  return value;
}

inline FrameBytes encode_frame(const Frame& frame) {
  FrameBytes bytes;
  put(bytes, 0, frame.tag.value);
  put(bytes, 8, frame.bytes);
  put(bytes, 12, frame_check(frame));
  return bytes;
}

/// Nothing where it is no frame.
inline std::optional<Frame> decode_frame(const FrameBytes& bytes) {
  const Frame frame{Tag{get<std::uint64_t>(bytes, 0)}, get<std::uint32_t>(bytes, 8)};
  if (get<std::uint32_t>(bytes, 12) != frame_check(frame)) return std::nullopt;
  return frame;
}

}  // namespace herring::tcp
