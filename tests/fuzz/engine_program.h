#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// The language in which fuzz_server_engine reads its input, shared with the tool that writes the first corpus. An
/// input is one byte of Setup and then steps: an opcode and its operands, one byte each. A program that ends early
/// reads zeros.
namespace herring::fuzz {

enum class Step : std::uint8_t {
  kAnnounce,  ///< worker, key, kind, share, then a mutation
  kControl,   ///< worker, type, bytes of body, then a mutation
  kPush,      ///< which posted receive, then a mutation: the message that it was posted for
  kNoise,     ///< which posted receive: it fails in the transport
  kSent,      ///< which send: it is done
  kNotSent,   ///< which send: it fails
  kLost,      ///< worker
  kTick,      ///< milliseconds * 100
  kCancel,    ///< worker, which announce of it, pushes sent, has error
  kFlood,     ///< worker, times / 8: the last announce of it again, numbered on
  kSettle,    ///< all sends are done, all pushes arrive
  kReceipt,   ///< worker, how many announces back, so many of them, then a mutation
  kReady,     ///< worker, which grant, then a mutation
  kMoved,     ///< worker, loss, announces that are still to come, then a mutation
  kGiveBack,  ///< which withdrawn receive
  kCount,
};

/// Low two bits: workers - 1. Bit 2: the first two workers share contributor 0, and the first of them owns no chunk.
inline constexpr std::uint8_t kSetupShared = 4;
/// Failover. Then the upper bits of an announce's share are a bitmap of what it holds, and its shard: moved by a loss.
inline constexpr std::uint8_t kSetupFailover = 8;
/// One backup worker (without failover). Then the upper bits of an announce's share, where they are not 0, are a
/// roster, or with kKindNoShare make it a join.
inline constexpr std::uint8_t kSetupBackup = 16;
/// And a grace.
inline constexpr std::uint8_t kSetupGrace = 32;
/// The lane is in worker 0's process: announces may go in one hop.
inline constexpr std::uint8_t kSetupNear = 64;

/// kind of an announce: low two bits the collective, bit 2 eager, bit 3 no share in this lane, bits 4 to 6 the size,
/// bit 7 apart: the worker's memory is a device's. In fuzz_worker_engine bit 7 is of an operation's kind, too.
inline constexpr std::uint8_t kKindEager = 4;
inline constexpr std::uint8_t kKindNoShare = 8;
inline constexpr std::uint8_t kKindApart = 128;

/// A mutation is a count and then so many (position, value): byte `position` of header and body, XOR `value`.

/// Reads operands; zeros after the end.
class Program {
 public:
  explicit Program(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  bool at_end() const { return at_ >= bytes_.size(); }
  std::uint8_t next() { return at_end() ? 0 : bytes_[at_++]; }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
};

}  // namespace herring::fuzz
