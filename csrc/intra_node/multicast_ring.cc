#include "intra_node/multicast_ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "intra_node/pieces.h"

namespace herring::intra_node {
namespace {

constexpr std::uint64_t kEndOfLap = ~std::uint64_t{0};
constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kHeadBytes = 2 * sizeof(std::uint64_t);

constexpr std::uint64_t padded_to_lines(std::uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

/// What SplitMix64 makes of it: every bit of the result depends on every bit given.
std::uint64_t stamp_of(std::uint64_t position, std::uint64_t secret) {
  std::uint64_t x = position + secret;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

std::atomic_ref<std::uint64_t> stamp_at(std::span<std::byte> data, std::uint64_t offset) {
  return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(data.data() + offset));
}

}  // namespace

MulticastProducer::MulticastProducer(std::vector<MulticastTail*> consumers, std::span<std::byte> data,
                                     std::uint64_t secret)
    : data_(data), secret_(secret) {
  for (MulticastTail* const tail : consumers) consumers_.push_back({tail});
}

bool MulticastProducer::has_room(std::uint64_t bytes) {
  if (data_.size() - (head_ - slowest_) >= bytes) return true;
  std::uint64_t slowest = head_;
  for (Consumer& consumer : consumers_) {
    const std::uint64_t tail = consumer.tail->bytes.load(std::memory_order_acquire);
    // Between what was known and what was written: anything else would let us overwrite or run in circles.
    if (tail - consumer.known > head_ - consumer.known || tail % kLine != 0) {
      broken_ = true;
      return false;
    }
    consumer.known = tail;
    slowest = std::min(slowest, tail);
  }
  slowest_ = slowest;
  return data_.size() - (head_ - slowest_) >= bytes;
}

bool MulticastProducer::push(std::span<const std::byte> first, std::span<const std::byte> second,
                             std::span<const std::byte> third, bool streams) {
  const std::uint64_t length = first.size() + second.size() + third.size();
  if (broken_ || length > max_multicast_message(data_.size())) return false;
  const std::uint64_t need = padded_to_lines(kHeadBytes + length);
  const std::uint64_t to_end = data_.size() - (head_ & (data_.size() - 1));
  const std::uint64_t skip = need > to_end ? to_end : 0;
  if (!has_room(skip + need)) return false;
  if (skip > 0) {
    publish(head_, kEndOfLap);
    head_ += skip;
  }
  std::byte* const to = data_.data() + (head_ & (data_.size() - 1)) + kHeadBytes;
  write_pieces(to, first, second, third, streams);
  publish(head_, length);
  head_ += need;
  return true;
}

/// Sequentially consistent, as are the flags of consumers that go to sleep: either they see it, or we see them.
void MulticastProducer::publish(std::uint64_t position, std::uint64_t length) {
  const std::uint64_t offset = position & (data_.size() - 1);
  std::memcpy(data_.data() + offset + sizeof(std::uint64_t), &length, sizeof(length));
  stamp_at(data_, offset).store(stamp_of(position, secret_), std::memory_order_seq_cst);
}

MulticastConsumer::MulticastConsumer(MulticastTail& tail, std::span<std::byte> data, std::uint64_t secret)
    : tail_line_(&tail), data_(data), secret_(secret) {
  move_to(0);
}

void MulticastConsumer::move_to(std::uint64_t position) {
  tail_ = position;
  expected_ = stamp_of(position, secret_);
}

std::uint64_t MulticastConsumer::stamp() const {
  return stamp_at(data_, tail_ & (data_.size() - 1)).load(std::memory_order_seq_cst);
}

bool MulticastConsumer::has_message() const { return !broken_ && stamp() == expected_; }

bool MulticastConsumer::front(std::span<const std::byte>& message) {
  for (bool skipped = false; has_message(); skipped = true) {
    const std::uint64_t offset = tail_ & (data_.size() - 1);
    const std::uint64_t room = data_.size() - offset;
    // Read once into private memory; what the peer does to the ring from here on cannot move the bounds.
    std::uint64_t length = 0;
    std::memcpy(&length, data_.data() + offset + sizeof(length), sizeof(length));
    if (length != kEndOfLap && length <= max_multicast_message(data_.size()) && kHeadBytes + length <= room) {
      current_ = padded_to_lines(kHeadBytes + length);
      message = {data_.data() + offset + kHeadBytes, length};
      return true;
    }
    // To the beginning, where nothing is skipped again.
    if (length != kEndOfLap || skipped || offset == 0) {
      broken_ = true;
      return false;
    }
    move_to(tail_ + room);
  }
  return false;
}

void MulticastConsumer::release() {
  move_to(tail_ + std::exchange(current_, 0));
  // Room is given back in batches: each time takes a line that the producer looks at.
  if (tail_ - published_ < data_.size() / 4) return;
  tail_line_->bytes.store(tail_, std::memory_order_release);
  published_ = tail_;
}

}  // namespace herring::intra_node
