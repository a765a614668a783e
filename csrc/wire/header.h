#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/operation.h"
#include "core/types.h"

/// The data-plane message format; docs/wire.md is its specification and says what each message means.
/// Nothing here trusts its input: decode() accepts any bytes and returns nothing for what is not a message.
namespace herring::wire {

inline constexpr std::uint32_t kMagic = 0x474E5248;  // "HRNG" in memory order.
inline constexpr std::uint8_t kVersion = 1;

enum class MessageType : std::uint8_t {
  kAnnounce = 1,  ///< Worker to lane: my part of this operation is ready (body: Announce, then eager payload if any).
  kGrant = 2,     ///< Lane to worker: push these chunks; receives are posted.
  kPush = 3,      ///< Worker to lane: one chunk of data.
  kResult = 4,    ///< Lane to worker: one chunk of the result.
  kError = 5,     ///< Lane to worker: the operation failed (body: code and text).
  kCancel = 6,    ///< Worker to lane: I gave this operation up (body: code and text).
  kCredit = 7,    ///< Lane to worker: `count` more announces may be sent.
  // Between workers (docs/wire.md, "Point to point"); a "sender" and a "receiver" are those of one message.
  kEnvelope = 8,   ///< Sender: here is a message (body: its size, then its bytes if small).
  kAccept = 9,     ///< Receiver: I have the whole message.
  kInvite = 10,    ///< Receiver: send these chunks; receives are posted.
  kData = 11,      ///< Sender: one chunk.
  kClose = 12,     ///< Receiver: not this one, or no more of it (body: code and text).
  kWithdraw = 13,  ///< Sender: I gave this message up (body: code and text).
  kReturn = 14,    ///< Either: `part` more control messages may be sent.
  // Failover (docs/wire.md, "When a lane dies").
  kReady = 15,    ///< Worker to lane: receives are posted for these chunks, which I do not push.
  kReceipt = 16,  ///< Worker to lane: I have all that these announces of mine wait for (body: their tags).
  kSettled = 17,  ///< Lane to worker: everybody has what these announces were for (body: their tags).
  kMoved = 18,    ///< Worker to lane: all that a lost lane had of mine and you inherit is announced.
  // Backup workers (docs/wire.md).
  kRoster = 19,  ///< Lane to worker: who is in the operation, 64 contributors a message (offset).
  // Whether a link works (docs/wire.md, "Half-open links").
  kPing = 20,  ///< Answer with Pong.
  kPong = 21,
};

/// Message flags.
inline constexpr std::uint16_t kFlagEager = 1;  ///< Announce, Envelope: all the data follows the body. (2 is reserved.)
inline constexpr std::uint16_t kFlagNoPayload = 4;  ///< Result: an acknowledgement; the receiver has the data already.
inline constexpr std::uint16_t kFlagAnswer = 8;     ///< Close, Withdraw: the answer to the other; is not answered.
inline constexpr std::uint16_t kFlagReady = 16;  ///< Announce: receives are posted for all Results; nothing to invite.
inline constexpr std::uint16_t kFlagHeld = 32;   ///< Announce: moved from a lost lane; a bitmap of what I have follows.
inline constexpr std::uint16_t kFlagPull = 64;   ///< Grant: somebody has the result; answer Ready, do not push.
inline constexpr std::uint16_t kFlagUrgent = 128;  ///< Receipt: an operation waits for Settled.
inline constexpr std::uint16_t kFlagJoin = 256;    ///< Announce: nothing to sum; answer with the roster.
inline constexpr std::uint16_t kFlagRoster = 512;  ///< Announce: who is in follows the body.
inline constexpr std::uint16_t kFlagInPlace =
    1024;  ///< Result without payload: it lies where the push lay, which was lent.
inline constexpr std::uint16_t kFlagOneHop =
    2048;  ///< Announce: the lane in each host has all of it, and answers there.
inline constexpr std::uint16_t kFlagApart =
    4096;  ///< Announce: my payloads lie in a device: each Push and Result is two messages.
/// Tag of the payload's message of those two, beside that of the header's. Tags of messages in one are below it.
inline constexpr std::uint64_t kApartTag = std::uint64_t{1} << 62;

/// Fixed header, little endian, in front of every message. Sizes and offsets are asserted in header.cc.
struct Header {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion;
  MessageType type = MessageType::kAnnounce;
  std::uint16_t flags = 0;
  std::uint64_t job_id = 0;
  std::uint32_t epoch = 0;
  std::uint32_t sender = 0;  ///< PeerId of the sender.
  std::uint64_t op = 0;      ///< OpKey::op
  std::uint32_t group = 0;   ///< OpKey::group
  std::uint32_t part = 0;    ///< OpKey::part
  std::uint64_t tag = 0;     ///< Announce: tag of the result of chunk 0 of the shard. Grant: tag of `chunk`. Push,
                             ///< Result: the tag it is sent to. Error, Cancel: the announce's.
  std::uint64_t offset = 0;  ///< Push, Result: byte offset of the payload in the part. Grant: the announce's tag.
                             ///< Announce, Cancel: the announce's number. Moved: the number of the next announce.
                             ///< Credit: one-hop announces that are over.
  std::uint32_t chunk = 0;   ///< Index of the (first) chunk in the shard. Cancel: docs/wire.md.
  std::uint32_t count = 0;   ///< Result: kWasLast. Grant: chunks. Credit: announces. Announce: processes of this
                             ///< contributor. Error, Cancel: Results, Pushes sent. Roster: as Result.
  std::uint32_t payload_bytes = 0;  ///< Bytes that follow the header.
  std::uint32_t reserved = 0;       ///< 0.
  std::uint32_t shard = 0;          ///< Which item of the part (docs/wire.md, "Items"), or kRosterShard; else 0.
  std::uint32_t header_crc32c = 0;  ///< Over all bytes before it.

  OpKey key() const noexcept { return {GroupId{group}, op, part}; }
};

inline constexpr std::size_t kHeaderBytes = 80;
using HeaderBytes = std::array<std::byte, kHeaderBytes>;

/// Some ranks, few or regular: first + i * stride for i below count; where mask is not 0, those alone whose bit i is
/// set.
struct RankSpan {
  std::uint32_t first = 0;
  std::uint32_t count = 1;
  std::uint32_t stride = 1;
  std::uint64_t mask = 0;
  friend bool operator==(const RankSpan&, const RankSpan&) = default;
};
/// Nothing where they are neither regular nor within 64 steps. `ranks`: at least one, in any order, none twice.
std::optional<RankSpan> span_of(std::span<const std::uint32_t> ranks);
/// In ascending order.
std::vector<std::uint32_t> ranks_of(const RankSpan& span);

/// Body of kAnnounce.
struct Announce {
  OpDescriptor descriptor;
  std::uint32_t contributor = 0;        ///< Whose data: position in the fixed order of summation.
  std::uint32_t contributor_count = 0;  ///< How many contributors every chunk waits for.
  std::uint32_t first_rank = 0;         ///< For messages to people: the worker ranks that this contributor stands for,
  std::uint32_t rank_count = 0;         ///< as a RankSpan with rank_stride and rank_mask.
  std::uint32_t pusher = 0;             ///< kBroadcast, kAllGather: the one contributor that pushes. Else unused.
  std::uint32_t average_over = 1;       ///< ReduceSpec::average_over of the final sum.
  std::uint64_t shard_offset = 0;       ///< This lane's bytes of the part.
  std::uint64_t shard_bytes = 0;
  std::uint32_t chunk_bytes = 0;  ///< Size of every chunk of the shard but the last.
  std::uint32_t owned_first = 0;  ///< Chunks that this process pushes and pulls for its contributor:
  std::uint32_t owned_count = 0;  ///< owned_first .. owned_first + owned_count - 1 (all of them, one rank a host).
  std::uint32_t timeout_ms = 0;   ///< After this the lane fails the operation and names who is missing.
  std::uint32_t rank_stride = 1;
  std::uint64_t rank_mask = 0;

  RankSpan ranks() const noexcept { return {first_rank, rank_count, rank_stride, rank_mask}; }
  friend bool operator==(const Announce&, const Announce&) = default;
};

/// Result: count says how late the announce came, in microseconds, with this bit where it was the last one.
inline constexpr std::uint32_t kWasLast = 0x8000'0000;

inline constexpr std::size_t kAnnounceBytes = 160;
inline constexpr std::size_t kMaxHeldChunks = 8192;  ///< Chunks of an item that moves; bounds the bitmap of kFlagHeld.
inline constexpr std::size_t kMaxTagList = 64;       ///< Tags in one Receipt or Settled.
inline constexpr std::uint32_t kRosterShard = 1;     ///< Header::shard of what has a roster.
inline constexpr std::size_t kGrantNumberBytes = 8;  ///< Body of a Grant with failover: its number.
inline constexpr std::uint32_t kMaxRun = 8;          ///< Chunks in one Push and one Result, at most.

/// Encodes with magic, version, reserved bytes and header checksum filled in.
HeaderBytes encode(const Header& header) noexcept;
/// Nothing unless the bytes begin with a whole, checksummed header of this version, of a known type, with no flag that
/// the type has not, with a shard only where the type has one, and with nothing in what is reserved.
std::optional<Header> decode(std::span<const std::byte> bytes) noexcept;

std::array<std::byte, kAnnounceBytes> encode(const Announce& announce) noexcept;
/// Nothing unless every field is in range and the fields agree with each other (docs/wire.md lists the checks). What
/// follows the first kAnnounceBytes (eager data) is not looked at.
std::optional<Announce> decode_announce(std::span<const std::byte> bytes) noexcept;

/// A list of 64-bit numbers: the body of Grant (one), Receipt and Settled.
std::vector<std::byte> encode_list(std::span<const std::uint64_t> numbers);
/// Nothing unless it is 1 to `most` whole numbers.
std::optional<std::vector<std::uint64_t>> decode_list(std::span<const std::byte> body, std::size_t most);

/// CRC32C (Castagnoli), hardware where present. `seed` continues an earlier sum.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0) noexcept;
/// The sum of two pieces, one behind the other, from their sums; `shift` is crc32c_shift() of the second's bytes.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint32_t shift) noexcept;
std::uint32_t crc32c_shift(std::uint64_t bytes) noexcept;

}  // namespace herring::wire
