#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/hmac.h"

/// Frames of the control plane, without a socket: docs/wire-control.md, "Frames".
namespace herring::control {

/// Names one connection of a hub or a rendezvous; never used again for another. 0 names none.
using ConnectionId = std::uint64_t;

inline constexpr std::size_t kFrameHeaderBytes = 32;
inline constexpr std::size_t kFrameHeadBytes = 16;  ///< The part of the header that the mac covers.
inline constexpr std::size_t kMacBytes = 16;
inline constexpr std::size_t kMaxHandshakeBody = 2 << 10;
inline constexpr std::size_t kMaxBody = (1 << 20) + (64 << 10);
static_assert(kFrameHeadBytes + kMacBytes == kFrameHeaderBytes);

using FrameHead = std::array<std::byte, kFrameHeadBytes>;
using Mac = std::array<std::byte, kMacBytes>;

/// Numbers are part of the wire format and are never reused.
enum class FrameType : std::uint8_t {
  kHello = 1,
  kChallenge = 2,
  kRefuse = 3,
  kJoin = 4,
  kWelcome = 5,
  kRoster = 6,
  kPing = 7,
  kPong = 8,
  kEvent = 9,
  kExchange = 10,
  kGathered = 11,
  kExchangeFailed = 12,
  kQuery = 13,
  kMissing = 14,
  kFail = 15,
  kLeave = 16,
  kClosing = 17,
  kRendezvous = 18,  ///< Between workers, servers and the rendezvous of a job (elastic/message.h).
  kUnreachable = 19,
  kAbortGroup = 20,
  kLeaveGroup = 21,
};
inline constexpr std::uint8_t kLastFrameType = 21;

struct Frame {
  FrameType type = FrameType::kHello;
  FrameHead head{};
  Mac mac{};
  std::vector<std::byte> body;
};

/// A body to be sent, hashed once however many members get it.
class Body final {
 public:
  explicit Body(std::vector<std::byte> bytes) : bytes_(std::move(bytes)), digest_(sha256(bytes_)) {}
  std::span<const std::byte> bytes() const { return bytes_; }
  const Digest& digest() const { return digest_; }

 private:
  std::vector<std::byte> bytes_;
  Digest digest_;
};
using SharedBody = std::shared_ptr<const Body>;
SharedBody make_body(std::vector<std::byte> bytes);

/// Throws Error(kInternal) where the body is larger than kMaxBody.
FrameHead frame_head(FrameType type, std::size_t body_bytes);

/// One direction's key and sequence. The sender seals each frame; the receiver opens them in the same order.
class FrameSeal final {
 public:
  explicit FrameSeal(const Digest& key) : key_(key) {}
  /// The mac of the next frame.
  Mac seal(const FrameHead& head, const Digest& body_digest);
  /// True where the frame is the next one of its sender, unaltered.
  bool open(const Frame& frame);

 private:
  Mac mac_of(const FrameHead& head, const Digest& body_digest) const;
  Digest key_;
  std::uint64_t sequence_ = 0;
};

/// Cuts a stream of bytes into frames. Holds at most one read and one frame; never allocates by an announced length.
class FrameReader final {
 public:
  enum class Result : std::uint8_t { kFrame, kNeedMore, kBad };

  explicit FrameReader(std::size_t max_body) : max_body_(max_body) {}
  /// Applies to headers that have not been looked at yet.
  void set_max_body(std::size_t max_body) { max_body_ = max_body; }
  void feed(std::span<const std::byte> bytes);
  /// kBad is final: why() says what was wrong.
  Result next(Frame& frame);
  const std::string& why() const { return why_; }

 private:
  Result fail(std::string why);

  std::size_t max_body_;
  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0;  // First byte not consumed.
  bool bad_ = false;
  std::string why_;
};

/// Writes the fields of a body.
class BodyWriter final {
 public:
  BodyWriter& u8(std::uint8_t value);
  BodyWriter& u16(std::uint16_t value);
  BodyWriter& u32(std::uint32_t value);
  BodyWriter& u64(std::uint64_t value);
  /// In as few bytes as it takes: 7 bits in each, the lowest first; the top bit says that more follow.
  BodyWriter& count(std::uint64_t value);
  BodyWriter& raw(std::span<const std::byte> bytes);
  /// Cut to `max` bytes (at most 65535).
  BodyWriter& text(std::string_view value, std::size_t max);
  std::size_t size() const { return bytes_.size(); }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void put(std::uint64_t value, int bytes);
  std::vector<std::byte> bytes_;
};

/// Reads the fields of a body. After a field that does not fit everything reads as zero and ok() is false.
class BodyReader final {
 public:
  explicit BodyReader(std::span<const std::byte> bytes) : rest_(bytes) {}
  std::uint8_t u8() { return static_cast<std::uint8_t>(get(1)); }
  std::uint16_t u16() { return static_cast<std::uint16_t>(get(2)); }
  std::uint32_t u32() { return static_cast<std::uint32_t>(get(4)); }
  std::uint64_t u64() { return get(8); }
  /// At most 5 bytes, the shortest form.
  std::uint64_t count() {
    // Nearly all have one byte, and a large job's lists have hundreds of thousands.
    if (!ok_ || rest_.empty() || rest_.front() > std::byte{0x7f}) return long_count();
    const auto value = std::to_integer<std::uint64_t>(rest_.front());
    rest_ = rest_.subspan(1);
    return value;
  }
  std::span<const std::byte> raw(std::size_t bytes) {
    if (!ok_ || bytes > rest_.size()) {
      ok_ = false;
      return {};
    }
    const auto field = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return field;
  }
  std::string text(std::size_t max);
  /// A text for people: printable().
  std::string words(std::size_t max);
  std::span<const std::byte> rest() { return raw(rest_.size()); }
  std::size_t left() const { return rest_.size(); }
  bool ok() const { return ok_; }
  /// Everything was there and nothing is left.
  bool done() const { return ok_ && rest_.empty(); }

 private:
  std::uint64_t get(std::size_t bytes);
  std::uint64_t long_count();
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

}  // namespace herring::control
