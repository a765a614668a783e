#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/status.h"

/// A byte ring of messages from one process to another, in memory that both map. One producer, one consumer.
///
/// Layout of a message: uint64 length, the bytes, padding to 8. A length of ~0: the rest up to the ring's end is
/// unused. Each side keeps its own index in private memory and only reads the other's, which it never trusts: an index
/// or a length that no correct peer writes marks the ring broken, for good, and nothing outside of it is ever touched.
namespace herring::intra_node {

struct RingHeader {
  alignas(64) std::atomic<std::uint64_t> head;     ///< Bytes published; written by the producer.
  alignas(64) std::atomic<std::uint64_t> tail;     ///< Bytes consumed; written by the consumer.
  alignas(64) std::atomic<std::uint32_t> starved;  ///< The producer found no room and wants to be woken when there is.
};
static_assert(sizeof(RingHeader) == 192);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

/// Ranges up to this always fit into an empty ring, wherever its indices stand.
constexpr std::size_t max_ring_message(std::size_t ring_bytes) { return ring_bytes / 2 - 16; }

class RingProducer final {
 public:
  /// `data` has a power of two of bytes, at least 4096; both live as long as this.
  RingProducer(RingHeader& header, std::span<std::byte> data);

  /// Writes a message; the consumer sees it after publish(). kAgain: full (the consumer will be asked to wake us).
  /// `streams`: `second` past the caches (copy_bytes()).
  Status push(std::span<const std::byte> first, std::span<const std::byte> second,
              std::span<const std::byte> third = {}, bool streams = false);
  /// True where there was something to publish.
  bool publish();
  /// Wants room and there is some by now. Clears the wish.
  bool got_room();
  bool is_broken() const { return broken_; }

 private:
  bool has_room(std::uint64_t bytes);

  RingHeader* header_;
  std::span<std::byte> data_;
  std::uint64_t head_ = 0;  ///< Written, maybe not published.
  std::uint64_t published_ = 0;
  std::uint64_t known_tail_ = 0;
  bool starved_ = false;
  bool broken_ = false;
};

class RingConsumer final {
 public:
  RingConsumer(RingHeader& header, std::span<std::byte> data);

  /// The next message, valid until release(). False: none.
  bool front(std::span<const std::byte>& message);
  /// Gives back the message of the last front(). True where the producer waits for room and must be woken.
  [[nodiscard]] bool release();
  bool has_message();
  bool is_broken() const { return broken_; }

 private:
  bool see_head();
  bool return_room();

  RingHeader* header_;
  std::span<std::byte> data_;
  std::uint64_t tail_ = 0;  ///< Consumed; published lazily.
  std::uint64_t published_ = 0;
  std::uint64_t known_head_ = 0;
  std::uint64_t current_ = 0;  ///< Bytes that the message in use takes.
  bool broken_ = false;
};

}  // namespace herring::intra_node
