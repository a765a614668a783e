#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

/// The body of an Envelope (docs/wire.md, "Point to point"); that of Close and Withdraw is wire/reason.h's.
namespace herring::point_to_point {

inline constexpr std::size_t kEnvelopeBytes = 8;

/// Body of an Envelope: how large the message is. Its bytes follow where it is small.
std::array<std::byte, kEnvelopeBytes> encode_envelope(std::uint64_t message_bytes);
/// Nothing where there are too few bytes. What follows them is not looked at.
std::optional<std::uint64_t> decode_envelope(std::span<const std::byte> body);

}  // namespace herring::point_to_point
