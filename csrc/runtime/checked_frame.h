#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

/// What stands in front of every message of an endpoint with checksums, and the reports about them; docs/wire.md,
/// "Checksums", is the specification. Nothing here trusts its input.
namespace herring::runtime {

enum class FrameKind : std::uint8_t { kMessage = 1, kReport = 2 };

struct Frame {
  FrameKind kind = FrameKind::kMessage;
  std::uint64_t job_id = 0;
  std::uint32_t sender = 0;  ///< PeerId
  std::uint32_t bytes = 0;   ///< That follow.
  std::uint64_t number = 0;  ///< Of the message among those from this sender to this receiver, from 1; a report has 0.
  std::uint64_t oldest = 1;  ///< Below it the sender repeats nothing any more.
  std::uint64_t below = 1;   ///< The sender has received all messages of the receiver below this number ...
  std::uint64_t seen = 0;    ///< ... and, bit i, below + 1 + i.
  std::uint32_t data_crc32c = 0;   ///< Of the bytes that follow.
  std::uint32_t frame_crc32c = 0;  ///< Of all bytes of the frame before it.
};

inline constexpr std::size_t kFrameBytes = 64;

std::array<std::byte, kFrameBytes> encode(const Frame& frame) noexcept;
/// Nothing unless the bytes begin with a whole frame of this version with the right checksum.
std::optional<Frame> decode_frame(std::span<const std::byte> bytes) noexcept;

/// Numbers first .. last have arrived.
struct ArrivedRange {
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  friend bool operator==(const ArrivedRange&, const ArrivedRange&) = default;
};

/// A message that arrived damaged `count` times and not yet whole.
struct DamagedMessage {
  std::uint64_t tag = 0;
  std::uint64_t number = 0;  ///< 0: not known, its frame was damaged.
  std::uint32_t count = 0;
  friend bool operator==(const DamagedMessage&, const DamagedMessage&) = default;
};

struct Report {
  bool asks = false;  ///< The receiver is to report too.
  std::vector<ArrivedRange> arrived;
  std::vector<DamagedMessage> damaged;
  friend bool operator==(const Report&, const Report&) = default;
};

inline constexpr std::size_t kMaxReportEntries = 32;  ///< Of each list.
inline constexpr std::size_t kMaxReportBytes = 8 + kMaxReportEntries * (16 + 24);

/// At most kMaxReportEntries of each list.
std::vector<std::byte> encode(const Report& report);
std::optional<Report> decode_report(std::span<const std::byte> bytes);

}  // namespace herring::runtime
