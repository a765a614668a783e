#include "runtime/checked_frame.h"

#include <algorithm>

#include "wire/header.h"

namespace herring::runtime {
namespace {

constexpr std::uint32_t kMagic = 0x434E5248;  // "HRNC" in memory order.
constexpr std::uint8_t kVersion = 1;
constexpr std::uint8_t kAsks = 1;
constexpr std::size_t kReportHead = 8;
constexpr std::size_t kRangeBytes = 16;
constexpr std::size_t kDamagedBytes = 24;

template <class Integer>
void put(std::byte* out, Integer value) {
  for (std::size_t i = 0; i < sizeof(Integer); ++i) out[i] = static_cast<std::byte>(value >> (8 * i));
}

template <class Integer>
Integer get(const std::byte* in) {
  Integer value = 0;
  for (std::size_t i = 0; i < sizeof(Integer); ++i) {
    value = static_cast<Integer>(value | static_cast<Integer>(std::to_integer<Integer>(in[i]) << (8 * i)));
  }
  return value;
}

}  // namespace

std::array<std::byte, kFrameBytes> encode(const Frame& frame) noexcept {
  std::array<std::byte, kFrameBytes> bytes{};
  std::byte* const out = bytes.data();
  put(out, kMagic);
  out[4] = std::byte{kVersion};
  out[5] = static_cast<std::byte>(frame.kind);
  put(out + 8, frame.job_id);
  put(out + 16, frame.sender);
  put(out + 20, frame.bytes);
  put(out + 24, frame.number);
  put(out + 32, frame.oldest);
  put(out + 40, frame.below);
  put(out + 48, frame.seen);
  put(out + 56, frame.data_crc32c);
  put(out + 60, wire::crc32c(std::span<const std::byte>(bytes).first(60)));
  return bytes;
}

std::optional<Frame> decode_frame(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() < kFrameBytes) return std::nullopt;
  const std::byte* const in = bytes.data();
  Frame frame;
  frame.frame_crc32c = get<std::uint32_t>(in + 60);
  if (frame.frame_crc32c != wire::crc32c(bytes.first(60))) return std::nullopt;
  const auto kind = std::to_integer<std::uint8_t>(in[5]);
  if (get<std::uint32_t>(in) != kMagic || in[4] != std::byte{kVersion} || get<std::uint16_t>(in + 6) != 0) {
    return std::nullopt;
  }
  if (kind != static_cast<std::uint8_t>(FrameKind::kMessage) && kind != static_cast<std::uint8_t>(FrameKind::kReport)) {
    return std::nullopt;
  }
  frame.kind = FrameKind{kind};
  frame.job_id = get<std::uint64_t>(in + 8);
  frame.sender = get<std::uint32_t>(in + 16);
  frame.bytes = get<std::uint32_t>(in + 20);
  frame.number = get<std::uint64_t>(in + 24);
  frame.oldest = get<std::uint64_t>(in + 32);
  frame.below = get<std::uint64_t>(in + 40);
  frame.seen = get<std::uint64_t>(in + 48);
  frame.data_crc32c = get<std::uint32_t>(in + 56);
  if ((frame.kind == FrameKind::kMessage) != (frame.number != 0)) return std::nullopt;
  return frame;
}

std::vector<std::byte> encode(const Report& report) {
  const std::size_t ranges = std::min(report.arrived.size(), kMaxReportEntries);
  const std::size_t damaged = std::min(report.damaged.size(), kMaxReportEntries);
  std::vector<std::byte> bytes(kReportHead + ranges * kRangeBytes + damaged * kDamagedBytes);
  std::byte* out = bytes.data();
  out[0] = std::byte{report.asks ? kAsks : std::uint8_t{0}};
  put(out + 2, static_cast<std::uint16_t>(ranges));
  put(out + 4, static_cast<std::uint16_t>(damaged));
  out += kReportHead;
  for (std::size_t i = 0; i < ranges; ++i, out += kRangeBytes) {
    put(out, report.arrived[i].first);
    put(out + 8, report.arrived[i].last);
  }
  for (std::size_t i = 0; i < damaged; ++i, out += kDamagedBytes) {
    put(out, report.damaged[i].tag);
    put(out + 8, report.damaged[i].number);
    put(out + 16, report.damaged[i].count);
  }
  return bytes;
}

std::optional<Report> decode_report(std::span<const std::byte> bytes) {
  if (bytes.size() < kReportHead) return std::nullopt;
  const std::byte* in = bytes.data();
  const std::size_t ranges = get<std::uint16_t>(in + 2);
  const std::size_t damaged = get<std::uint16_t>(in + 4);
  const auto flags = std::to_integer<std::uint8_t>(in[0]);
  if (flags > kAsks || in[1] != std::byte{0} || get<std::uint16_t>(in + 6) != 0 || ranges > kMaxReportEntries ||
      damaged > kMaxReportEntries || bytes.size() != kReportHead + ranges * kRangeBytes + damaged * kDamagedBytes) {
    return std::nullopt;
  }
  Report report;
  report.asks = flags == kAsks;
  in += kReportHead;
  for (std::size_t i = 0; i < ranges; ++i, in += kRangeBytes) {
    report.arrived.push_back({get<std::uint64_t>(in), get<std::uint64_t>(in + 8)});
  }
  for (std::size_t i = 0; i < damaged; ++i, in += kDamagedBytes) {
    report.damaged.push_back({get<std::uint64_t>(in), get<std::uint64_t>(in + 8), get<std::uint32_t>(in + 16)});
  }
  return report;
}

}  // namespace herring::runtime
