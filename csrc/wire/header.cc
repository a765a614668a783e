#include "wire/header.h"

#include <algorithm>
#include <bit>
#include <concepts>
#include <limits>
#include <numeric>
#include <type_traits>

namespace herring::wire {
namespace {

constexpr std::size_t kHeaderCrcOffset = 76;
constexpr std::uint32_t kMaxChunkBytes = 64u << 20;
constexpr std::uint32_t kChunkAlignment = 64;

// docs/wire.md gives these offsets. The code below writes fields one by one and depends on no struct layout; the struct
// is held to the same layout so that what a debugger shows is what the wire has.
static_assert(std::is_standard_layout_v<Header> && sizeof(Header) == kHeaderBytes);
static_assert(offsetof(Header, magic) == 0 && offsetof(Header, version) == 4 && offsetof(Header, type) == 5);
static_assert(offsetof(Header, flags) == 6 && offsetof(Header, job_id) == 8 && offsetof(Header, epoch) == 16);
static_assert(offsetof(Header, sender) == 20 && offsetof(Header, op) == 24 && offsetof(Header, group) == 32);
static_assert(offsetof(Header, part) == 36 && offsetof(Header, tag) == 40 && offsetof(Header, offset) == 48);
static_assert(offsetof(Header, chunk) == 56 && offsetof(Header, count) == 60);
static_assert(offsetof(Header, payload_bytes) == 64 && offsetof(Header, reserved) == 68);
static_assert(offsetof(Header, shard) == 72 && offsetof(Header, header_crc32c) == kHeaderCrcOffset);
// Bytes of these are on the wire.
static_assert(sizeof(MessageType) == 1 && sizeof(DataType) == 1 && sizeof(ReduceOp) == 1 && sizeof(Collective) == 1);

/// Writes fields one after the other, little endian.
class Writer {
 public:
  explicit Writer(std::span<std::byte> out) noexcept : out_(out) {}

  template <std::unsigned_integral T>
  void put(T value) noexcept {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      out_[at_ + i] = static_cast<std::byte>(static_cast<std::uint64_t>(value) >> (8 * i));
    }
    at_ += sizeof(T);
  }
  template <class T>
  requires std::is_enum_v<T>
  void put(T value) noexcept { put(static_cast<std::underlying_type_t<T>>(value)); }
  std::size_t written() const noexcept { return at_; }

 private:
  std::span<std::byte> out_;
  std::size_t at_ = 0;
};

/// Reads what Writer wrote. The caller has checked the size.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) noexcept : in_(in) {}

  template <std::unsigned_integral T>
  void get(T& value) noexcept {
    std::uint64_t read = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) read |= std::to_integer<std::uint64_t>(in_[at_ + i]) << (8 * i);
    value = static_cast<T>(read);
    at_ += sizeof(T);
  }
  template <class T>
  requires std::is_enum_v<T>
  void get(T& value) noexcept {
    std::underlying_type_t<T> number{};
    get(number);
    value = static_cast<T>(number);
  }

 private:
  std::span<const std::byte> in_;
  std::size_t at_ = 0;
};

bool is_known(MessageType type) noexcept { return type >= MessageType::kAnnounce && type <= MessageType::kPong; }

/// Those that mean something on such a message.
std::uint16_t flags_of(MessageType type) noexcept {
  switch (type) {
    case MessageType::kAnnounce:
      return kFlagEager | kFlagReady | kFlagHeld | kFlagJoin | kFlagRoster | kFlagOneHop | kFlagApart;
    case MessageType::kGrant:
      return kFlagPull;
    case MessageType::kResult:
      return kFlagNoPayload | kFlagInPlace;
    case MessageType::kEnvelope:
      return kFlagEager;
    case MessageType::kClose:
    case MessageType::kWithdraw:
      return kFlagAnswer;
    case MessageType::kReceipt:
      return kFlagUrgent;
    default:
      return 0;
  }
}

bool has_shard(MessageType type) noexcept { return type <= MessageType::kCancel || type == MessageType::kReady; }

bool is_known(const OpDescriptor& descriptor) noexcept {
  return is_known(descriptor.collective) && descriptor.reduce >= ReduceOp::kSum &&
         descriptor.reduce <= ReduceOp::kBxor && element_bytes(descriptor.dtype) > 0 && descriptor.dims <= kMaxDims;
}

bool is_sane(const OpDescriptor& descriptor) noexcept {
  if (!is_known(descriptor)) return false;
  if (descriptor.part_bytes > descriptor.op_bytes) return false;
  if (descriptor.part_bytes % element_bytes(descriptor.dtype) != 0) return false;
  if (descriptor.op_bytes % element_bytes(descriptor.dtype) != 0) return false;
  const bool has_bytes = reduces(descriptor.collective) || has_one_pusher(descriptor.collective);
  if (!has_bytes && descriptor.op_bytes != 0) return false;
  // Descriptors are compared whole, so what is not used must look the same for everybody.
  return std::all_of(descriptor.shape.begin() + descriptor.dims, descriptor.shape.end(),
                     [](std::uint64_t size) { return size == 0; });
}

bool is_sane_shard(const Announce& announce) noexcept {
  const OpDescriptor& descriptor = announce.descriptor;
  if (announce.shard_offset > descriptor.part_bytes) return false;
  if (announce.shard_bytes > descriptor.part_bytes - announce.shard_offset) return false;
  const std::size_t element = element_bytes(descriptor.dtype);
  if (announce.shard_offset % element != 0 || announce.shard_bytes % element != 0) return false;

  if (announce.chunk_bytes % kChunkAlignment != 0 || announce.chunk_bytes > kMaxChunkBytes) return false;
  std::uint64_t chunks = 0;
  if (announce.shard_bytes > 0) {
    if (announce.chunk_bytes == 0) return false;
    chunks = (announce.shard_bytes - 1) / announce.chunk_bytes + 1;
    if (chunks > std::numeric_limits<std::uint32_t>::max()) return false;
  }
  return std::uint64_t{announce.owned_first} + announce.owned_count <= chunks;
}

bool is_sane(const RankSpan& span) noexcept {
  if (span.count == 0 || span.stride == 0) return false;
  // No overflow: both factors have 32 bits.
  if (std::uint64_t{span.count - 1} * span.stride >= std::numeric_limits<std::uint32_t>::max() - span.first)
    return false;
  return span.mask == 0 ||
         ((span.mask & 1) != 0 && static_cast<std::uint32_t>(std::bit_width(span.mask)) == span.count);
}

bool is_sane(const Announce& announce) noexcept {
  if (!is_sane(announce.descriptor)) return false;
  if (announce.contributor >= announce.contributor_count) return false;
  if (has_one_pusher(announce.descriptor.collective) && announce.pusher >= announce.contributor_count) return false;
  if (!is_sane(announce.ranks())) return false;
  if (announce.average_over == 0 || announce.timeout_ms == 0) return false;
  return is_sane_shard(announce);
}

}  // namespace

HeaderBytes encode(const Header& header) noexcept {
  HeaderBytes bytes{};
  Writer out(bytes);
  out.put(kMagic);
  out.put(kVersion);
  out.put(header.type);
  out.put(header.flags);
  out.put(header.job_id);
  out.put(header.epoch);
  out.put(header.sender);
  out.put(header.op);
  out.put(header.group);
  out.put(header.part);
  out.put(header.tag);
  out.put(header.offset);
  out.put(header.chunk);
  out.put(header.count);
  out.put(header.payload_bytes);
  out.put(std::uint32_t{0});
  out.put(has_shard(header.type) ? header.shard : 0);
  out.put(crc32c(std::span(bytes).first(kHeaderCrcOffset)));
  return bytes;
}

std::optional<Header> decode(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() < kHeaderBytes) return std::nullopt;
  Header header;
  Reader in(bytes);
  in.get(header.magic);
  in.get(header.version);
  in.get(header.type);
  in.get(header.flags);
  in.get(header.job_id);
  in.get(header.epoch);
  in.get(header.sender);
  in.get(header.op);
  in.get(header.group);
  in.get(header.part);
  in.get(header.tag);
  in.get(header.offset);
  in.get(header.chunk);
  in.get(header.count);
  in.get(header.payload_bytes);
  in.get(header.reserved);
  in.get(header.shard);
  in.get(header.header_crc32c);
  if (header.magic != kMagic || header.version != kVersion) return std::nullopt;
  if (!is_known(header.type) || (header.flags & ~flags_of(header.type)) != 0 || header.reserved != 0) {
    return std::nullopt;
  }
  if (header.shard != 0 && !has_shard(header.type)) return std::nullopt;
  if (header.header_crc32c != crc32c(bytes.first(kHeaderCrcOffset))) return std::nullopt;
  return header;
}

std::array<std::byte, kAnnounceBytes> encode(const Announce& announce) noexcept {
  std::array<std::byte, kAnnounceBytes> bytes{};  // The last 16 bytes stay zero: reserved.
  const OpDescriptor& descriptor = announce.descriptor;
  Writer out(bytes);
  out.put(descriptor.collective);
  out.put(descriptor.dtype);
  out.put(descriptor.reduce);
  out.put(descriptor.dims);
  out.put(descriptor.root);
  out.put(descriptor.op_bytes);
  out.put(descriptor.part_bytes);
  for (std::size_t i = 0; i < descriptor.shape.size(); ++i) {
    out.put(i < descriptor.dims ? descriptor.shape[i] : std::uint64_t{0});
  }
  out.put(announce.contributor);
  out.put(announce.contributor_count);
  out.put(announce.first_rank);
  out.put(announce.rank_count);
  out.put(announce.pusher);
  out.put(announce.average_over);
  out.put(announce.shard_offset);
  out.put(announce.shard_bytes);
  out.put(announce.chunk_bytes);
  out.put(announce.owned_first);
  out.put(announce.owned_count);
  out.put(announce.timeout_ms);
  out.put(announce.rank_stride - 1);
  out.put(std::uint32_t{0});
  out.put(announce.rank_mask);
  return bytes;
}

std::optional<Announce> decode_announce(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() < kAnnounceBytes) return std::nullopt;
  Announce announce;
  OpDescriptor& descriptor = announce.descriptor;
  Reader in(bytes);
  in.get(descriptor.collective);
  in.get(descriptor.dtype);
  in.get(descriptor.reduce);
  in.get(descriptor.dims);
  in.get(descriptor.root);
  in.get(descriptor.op_bytes);
  in.get(descriptor.part_bytes);
  for (std::uint64_t& size : descriptor.shape) in.get(size);
  in.get(announce.contributor);
  in.get(announce.contributor_count);
  in.get(announce.first_rank);
  in.get(announce.rank_count);
  in.get(announce.pusher);
  in.get(announce.average_over);
  in.get(announce.shard_offset);
  in.get(announce.shard_bytes);
  in.get(announce.chunk_bytes);
  in.get(announce.owned_first);
  in.get(announce.owned_count);
  in.get(announce.timeout_ms);
  std::uint32_t reserved = 0;
  in.get(announce.rank_stride);
  in.get(reserved);
  in.get(announce.rank_mask);
  ++announce.rank_stride;  // The largest number wraps, to one that is not sane.
  if (reserved != 0 || !is_sane(announce)) return std::nullopt;
  return announce;
}

std::optional<RankSpan> span_of(std::span<const std::uint32_t> ranks) {
  std::vector<std::uint32_t> sorted(ranks.begin(), ranks.end());
  std::sort(sorted.begin(), sorted.end());
  RankSpan span{sorted.front(), 1, 1, 0};
  std::uint32_t stride = 0;
  for (const std::uint32_t rank : sorted) stride = std::gcd(stride, rank - span.first);
  if (stride == 0) return span;
  span.stride = stride;
  span.count = (sorted.back() - span.first) / stride + 1;
  if (span.count == sorted.size()) return span;
  if (span.count > 64) return std::nullopt;
  for (const std::uint32_t rank : sorted) span.mask |= std::uint64_t{1} << ((rank - span.first) / stride);
  return span;
}

std::vector<std::uint32_t> ranks_of(const RankSpan& span) {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t i = 0; i < span.count; ++i) {
    if (span.mask == 0 || ((span.mask >> i) & 1) != 0) ranks.push_back(span.first + i * span.stride);
  }
  return ranks;
}

std::vector<std::byte> encode_list(std::span<const std::uint64_t> numbers) {
  std::vector<std::byte> body(numbers.size() * sizeof(std::uint64_t));
  Writer out(body);
  for (const std::uint64_t number : numbers) out.put(number);
  return body;
}

std::optional<std::vector<std::uint64_t>> decode_list(std::span<const std::byte> body, std::size_t most) {
  constexpr std::size_t kEach = sizeof(std::uint64_t);
  if (body.empty() || body.size() % kEach != 0 || body.size() / kEach > most) return std::nullopt;
  std::vector<std::uint64_t> numbers(body.size() / kEach);
  Reader in(body);
  for (std::uint64_t& number : numbers) in.get(number);
  return numbers;
}

}  // namespace herring::wire
