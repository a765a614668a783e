#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/status.h"

/// The body of Error and Cancel: one byte of code, then text for people. Twin of docs/wire.md.
namespace herring::wire {

inline constexpr std::size_t kMaxReasonText = 1024;
/// Error's count: every Result of this announce was sent.
inline constexpr std::uint32_t kAllResults = 0xFFFF'FFFF;

/// Text beyond kMaxReasonText is cut. An Ok status reads as kCancelled.
std::vector<std::byte> encode_reason(const Status& why);
/// Never Ok. What is no reason becomes kProtocol; control characters become spaces.
Status decode_reason(std::span<const std::byte> body);

}  // namespace herring::wire
