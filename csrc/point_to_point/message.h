#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/status.h"

/// Bodies of the messages between workers (docs/wire.md, "Point to point"). Decoding never trusts.
namespace herring::point_to_point {

inline constexpr std::size_t kEnvelopeBytes = 8;
inline constexpr std::size_t kMaxReasonText = 1024;

/// Body of an Envelope: how large the message is. Its bytes follow where it is small.
std::array<std::byte, kEnvelopeBytes> encode_envelope(std::uint64_t message_bytes);
/// Nothing where there are too few bytes. What follows them is not looked at.
std::optional<std::uint64_t> decode_envelope(std::span<const std::byte> body);

/// Body of Close and Withdraw: a code and a text for people.
std::vector<std::byte> encode_reason(const Status& why);
/// Never Ok: unknown codes, ok and again read as kProtocol; the text is cut, control characters become spaces.
Status decode_reason(std::span<const std::byte> body);

}  // namespace herring::point_to_point
