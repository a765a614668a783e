#include "intra_node/ring.h"

#include <cstring>

#include "intra_node/pieces.h"

namespace herring::intra_node {
namespace {

constexpr std::uint64_t kRestIsUnused = ~std::uint64_t{0};
constexpr std::uint64_t kLengthBytes = sizeof(std::uint64_t);

constexpr std::uint64_t padded_to_words(std::uint64_t bytes) { return (bytes + 7) & ~std::uint64_t{7}; }

}  // namespace

RingProducer::RingProducer(RingHeader& header, std::span<std::byte> data) : header_(&header), data_(data) {}

bool RingProducer::has_room(std::uint64_t bytes) {
  if (data_.size() - (head_ - known_tail_) >= bytes) return true;
  const std::uint64_t tail = header_->tail.load(std::memory_order_seq_cst);
  // Between what was known and what was written: anything else would let us overwrite or run in circles.
  if (tail - known_tail_ > head_ - known_tail_ || tail % 8 != 0) {
    broken_ = true;
    return false;
  }
  known_tail_ = tail;
  return data_.size() - (head_ - known_tail_) >= bytes;
}

Status RingProducer::push(std::span<const std::byte> first, std::span<const std::byte> second,
                          std::span<const std::byte> third, bool streams) {
  const std::uint64_t length = first.size() + second.size() + third.size();
  if (length > max_ring_message(data_.size())) {
    return Status(Code::kInvalidArgument, "a message of " + std::to_string(length) +
                                              " bytes is larger than the limit of " +
                                              std::to_string(max_ring_message(data_.size())));
  }
  if (broken_) return Status(Code::kProtocol, "the ring's reader wrote an impossible position into shared memory");
  const std::uint64_t need = kLengthBytes + padded_to_words(length);
  const std::uint64_t position = head_ & (data_.size() - 1);
  const std::uint64_t to_end = data_.size() - position;
  const std::uint64_t skip = need > to_end ? to_end : 0;
  if (!has_room(skip + need)) {
    if (broken_) return push(first, second, third, streams);
    starved_ = true;
    // The consumer stores its tail and then looks at `starved`; we the other way round: one of us sees the other. (Both
    // pairs sequentially consistent; so are head and the reader's sleeping flag.)
    header_->starved.store(1, std::memory_order_seq_cst);
    if (!has_room(skip + need)) return Status::again();
  }
  starved_ = false;
  if (skip > 0) std::memcpy(data_.data() + position, &kRestIsUnused, sizeof(kRestIsUnused));
  std::byte* to = data_.data() + ((head_ + skip) & (data_.size() - 1));
  std::memcpy(to, &length, sizeof(length));
  write_pieces(to + kLengthBytes, first, second, third, streams);
  head_ += skip + need;
  return Status::ok();
}

bool RingProducer::publish() {
  if (published_ == head_) return false;
  header_->head.store(head_, std::memory_order_seq_cst);
  published_ = head_;
  return true;
}

bool RingProducer::got_room() {
  if (!starved_ || header_->starved.load(std::memory_order_seq_cst) != 0) return false;
  starved_ = false;
  return true;
}

RingConsumer::RingConsumer(RingHeader& header, std::span<std::byte> data) : header_(&header), data_(data) {}

bool RingConsumer::see_head() {
  if (known_head_ != tail_) return true;
  if (broken_) return false;
  const std::uint64_t head = header_->head.load(std::memory_order_seq_cst);
  if (head - tail_ > data_.size() || head % 8 != 0) {
    broken_ = true;
    return false;
  }
  known_head_ = head;
  return known_head_ != tail_;
}

bool RingConsumer::has_message() { return see_head(); }

bool RingConsumer::front(std::span<const std::byte>& message) {
  if (!see_head()) return false;
  std::uint64_t position = tail_ & (data_.size() - 1);
  std::uint64_t length = 0;
  std::uint64_t skip = 0;
  std::memcpy(&length, data_.data() + position, sizeof(length));
  if (length == kRestIsUnused) {
    skip = data_.size() - position;
    position = 0;
    // A skip alone is never published.
    if (known_head_ - tail_ <= skip) {
      broken_ = true;
      known_head_ = tail_;
      return false;
    }
    std::memcpy(&length, data_.data(), sizeof(length));
  }
  // `length` was read once into private memory; what the peer does to the ring from here on cannot move the bounds.
  if (length > max_ring_message(data_.size()) || skip + kLengthBytes + padded_to_words(length) > known_head_ - tail_ ||
      position + kLengthBytes + length > data_.size()) {
    broken_ = true;
    known_head_ = tail_;
    return false;
  }
  current_ = skip + kLengthBytes + padded_to_words(length);
  message = {data_.data() + position + kLengthBytes, length};
  return true;
}

bool RingConsumer::release() {
  tail_ += current_;
  current_ = 0;
  // Room is given back in batches: each time costs a full barrier. Nothing is kept back when the ring is drained.
  if (tail_ - published_ < data_.size() / 4 && see_head()) return false;
  return return_room();
}

bool RingConsumer::return_room() {
  if (published_ == tail_) return false;
  header_->tail.store(tail_, std::memory_order_seq_cst);
  published_ = tail_;
  return header_->starved.load(std::memory_order_seq_cst) != 0 &&
         header_->starved.exchange(0, std::memory_order_seq_cst) != 0;
}

}  // namespace herring::intra_node
