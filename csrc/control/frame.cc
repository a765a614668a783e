#include "control/frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/status.h"
#include "core/text.h"

namespace herring::control {
namespace {

constexpr std::array<std::byte, 4> kMagic = {std::byte{'H'}, std::byte{'R'}, std::byte{'R'}, std::byte{'C'}};

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

std::uint32_t load_u32(std::span<const std::byte> bytes) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i) value |= std::to_integer<std::uint32_t>(bytes[i]) << (8 * i);
  return value;
}

}  // namespace

SharedBody make_body(std::vector<std::byte> bytes) { return std::make_shared<const Body>(std::move(bytes)); }

FrameHead frame_head(FrameType type, std::size_t body_bytes) {
  if (body_bytes > kMaxBody) {
    throw Error(Code::kInternal, "a control frame of type " + std::to_string(static_cast<int>(type)) + " has " +
                                     std::to_string(body_bytes) + " bytes; at most " + std::to_string(kMaxBody));
  }
  FrameHead head{};
  std::copy(kMagic.begin(), kMagic.end(), head.begin());
  head[4] = static_cast<std::byte>(type);
  for (std::size_t i = 0; i < 4; ++i) head[8 + i] = static_cast<std::byte>((body_bytes >> (8 * i)) & 0xff);
  return head;
}

Mac FrameSeal::mac_of(const FrameHead& head, const Digest& body_digest) const {
  std::array<std::byte, 8 + kFrameHeadBytes + std::tuple_size_v<Digest>> input{};
  for (std::size_t i = 0; i < 8; ++i) input[i] = static_cast<std::byte>((sequence_ >> (8 * i)) & 0xff);
  std::copy(head.begin(), head.end(), input.begin() + 8);
  std::copy(body_digest.begin(), body_digest.end(), input.begin() + 8 + kFrameHeadBytes);
  const Digest full = hmac_sha256(key_, input);
  Mac mac;
  std::copy_n(full.begin(), mac.size(), mac.begin());
  return mac;
}

Mac FrameSeal::seal(const FrameHead& head, const Digest& body_digest) {
  const Mac mac = mac_of(head, body_digest);
  ++sequence_;
  return mac;
}

bool FrameSeal::open(const Frame& frame) {
  if (!equal_constant_time(mac_of(frame.head, sha256(frame.body)), frame.mac)) return false;
  ++sequence_;
  return true;
}

void FrameReader::feed(std::span<const std::byte> bytes) {
  if (bad_) return;
  constexpr std::size_t kKept = 64 << 10;  // More than that is for what comes at the start of a job.
  if (begin_ == buffer_.size() && buffer_.capacity() > kKept) {
    buffer_ = {};
    begin_ = 0;
  } else if (begin_ > 0 && (begin_ == buffer_.size() || begin_ >= kMaxBody)) {
    buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(begin_));
    begin_ = 0;
  }
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
}

FrameReader::Result FrameReader::fail(std::string why) {
  bad_ = true;
  why_ = std::move(why);
  buffer_ = {};
  begin_ = 0;
  return Result::kBad;
}

FrameReader::Result FrameReader::next(Frame& frame) {
  if (bad_) return Result::kBad;
  const auto here = std::span(std::as_const(buffer_)).subspan(begin_);
  // Another protocol's first bytes are told apart before a whole header has come.
  const std::size_t magic_bytes = std::min(here.size(), kMagic.size());
  if (!std::equal(here.begin(), here.begin() + static_cast<std::ptrdiff_t>(magic_bytes), kMagic.begin())) {
    return fail("bytes that are not a Herring control frame");
  }
  if (here.size() < kFrameHeaderBytes) return Result::kNeedMore;
  const auto type = std::to_integer<std::uint8_t>(here[4]);
  if (type == 0 || type > kLastFrameType) return fail("a frame of the unknown type " + std::to_string(type));
  if (!all_zero(here.subspan(5, 3)) || !all_zero(here.subspan(12, 4)))
    return fail("a frame whose reserved bytes are not zero");
  const std::size_t body_bytes = load_u32(here.subspan(8, 4));
  if (body_bytes > max_body_) {
    return fail("a frame of " + std::to_string(body_bytes) + " bytes where " + std::to_string(max_body_) +
                " are allowed");
  }
  if (here.size() < kFrameHeaderBytes + body_bytes) return Result::kNeedMore;
  frame.type = static_cast<FrameType>(type);
  std::copy_n(here.begin(), frame.head.size(), frame.head.begin());
  std::copy_n(here.begin() + kFrameHeadBytes, frame.mac.size(), frame.mac.begin());
  const auto body = here.subspan(kFrameHeaderBytes, body_bytes);
  frame.body.assign(body.begin(), body.end());
  begin_ += kFrameHeaderBytes + body_bytes;
  return Result::kFrame;
}

void BodyWriter::put(std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) bytes_.push_back(static_cast<std::byte>((value >> (8 * i)) & 0xff));
}

BodyWriter& BodyWriter::u8(std::uint8_t value) { return put(value, 1), *this; }
BodyWriter& BodyWriter::u16(std::uint16_t value) { return put(value, 2), *this; }
BodyWriter& BodyWriter::u32(std::uint32_t value) { return put(value, 4), *this; }
BodyWriter& BodyWriter::u64(std::uint64_t value) { return put(value, 8), *this; }

BodyWriter& BodyWriter::count(std::uint64_t value) {
  for (; value > 0x7f; value >>= 7) put(value | 0x80, 1);
  return put(value, 1), *this;
}

BodyWriter& BodyWriter::raw(std::span<const std::byte> bytes) {
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  return *this;
}

BodyWriter& BodyWriter::text(std::string_view value, std::size_t max) {
  value = value.substr(0, std::min<std::size_t>(max, 0xffff));
  u16(static_cast<std::uint16_t>(value.size()));
  return raw(std::as_bytes(std::span(value)));
}

std::uint64_t BodyReader::get(std::size_t bytes) {
  std::uint64_t value = 0;
  const auto field = raw(bytes);
  for (std::size_t i = 0; i < field.size(); ++i) value |= std::to_integer<std::uint64_t>(field[i]) << (8 * i);
  return value;
}

std::uint64_t BodyReader::long_count() {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 35; shift += 7) {
    const std::uint64_t byte = get(1);
    value |= (byte & 0x7f) << shift;
    if (byte > 0x7f) continue;
    if (byte == 0 && shift > 0) ok_ = false;
    return ok_ ? value : 0;
  }
  ok_ = false;
  return 0;
}

std::string BodyReader::text(std::size_t max) {
  const std::size_t bytes = u16();
  if (bytes > max) ok_ = false;
  const auto field = raw(bytes);
  std::string value(field.size(), '\0');
  if (!field.empty()) std::memcpy(value.data(), field.data(), field.size());
  return value;
}

std::string BodyReader::words(std::size_t max) { return printable(text(max)); }

}  // namespace herring::control
