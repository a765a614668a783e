#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// A byte ring of messages from one process to all others of the host, in memory that all map: written once, read by
/// each. One producer; consumers that each get every message.
///
/// Layout of a message, which begins at a multiple of 64 bytes: uint64 stamp, uint64 length, the bytes, padding to 64.
/// A length of ~0: the rest up to the ring's end is unused. The stamp is a secret function of how many bytes were
/// written before it, so that what an earlier round left there is no message: a message is published by its stamp, and
/// one cache line brings all of a small one. Consumers say now and then how far they have read. Neither side trusts
/// what the other wrote: what no correct peer writes marks the ring broken, for good, and nothing outside of it is ever
/// touched.
namespace herring::intra_node {

/// How far one consumer has read, in bytes; a line of its own.
struct alignas(64) MulticastTail {
  std::atomic<std::uint64_t> bytes;
};
static_assert(sizeof(MulticastTail) == 64);

/// Messages up to this always fit where all consumers have read everything, wherever the ring's end is.
constexpr std::size_t max_multicast_message(std::size_t ring_bytes) { return ring_bytes * 3 / 8 - 64 - 16; }

class MulticastProducer final {
 public:
  /// `data` begins at a multiple of 64 and has a power of two of bytes, at least 4096; zero at first, as the tails of
  /// the consumers are. All live as long as this.
  MulticastProducer(std::vector<MulticastTail*> consumers, std::span<std::byte> data, std::uint64_t secret);

  /// Writes and publishes a message of three pieces; false where some consumer has not read enough for that. `streams`:
  /// `second` past the caches (copy_bytes()).
  bool push(std::span<const std::byte> first, std::span<const std::byte> second, std::span<const std::byte> third,
            bool streams = false);
  bool is_broken() const { return broken_; }

 private:
  struct Consumer {
    MulticastTail* tail;
    std::uint64_t known = 0;
  };
  bool has_room(std::uint64_t bytes);
  void publish(std::uint64_t position, std::uint64_t length);

  std::vector<Consumer> consumers_;
  std::span<std::byte> data_;
  std::uint64_t secret_;
  std::uint64_t head_ = 0;
  std::uint64_t slowest_ = 0;  ///< Of the consumers, as far as known.
  bool broken_ = false;
};

class MulticastConsumer final {
 public:
  /// As the producer's.
  MulticastConsumer(MulticastTail& tail, std::span<std::byte> data, std::uint64_t secret);

  /// The next message, valid until release(). False: none.
  bool front(std::span<const std::byte>& message);
  /// Gives back the message of the last front().
  void release();
  bool has_message() const;
  bool is_broken() const { return broken_; }

 private:
  void move_to(std::uint64_t position);
  std::uint64_t stamp() const;

  MulticastTail* tail_line_;
  std::span<std::byte> data_;
  std::uint64_t secret_;
  std::uint64_t tail_ = 0;
  std::uint64_t expected_ = 0;  ///< The stamp of a message there.
  std::uint64_t published_ = 0;
  std::uint64_t current_ = 0;  ///< Bytes that the message in use takes.
  bool broken_ = false;
};

}  // namespace herring::intra_node
