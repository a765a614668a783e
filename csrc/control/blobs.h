#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

namespace herring::control {

/// Byte strings, in one piece of memory: a large job's lists have one for each member.
class Blobs final {
 public:
  std::size_t size() const { return ends_.size(); }
  bool empty() const { return ends_.empty(); }
  /// Until the next add().
  std::span<const std::byte> operator[](std::size_t index) const {
    const std::size_t begin = index == 0 ? 0 : ends_[index - 1];
    return std::span(bytes_).subspan(begin, ends_[index] - begin);
  }
  void add(std::span<const std::byte> blob) {
    bytes_.insert(bytes_.end(), blob.begin(), blob.end());
    ends_.push_back(bytes_.size());
  }
  void reserve(std::size_t blobs, std::size_t bytes) {
    ends_.reserve(blobs);
    bytes_.reserve(bytes);
  }
  void add(const Blobs& more) {
    ends_.reserve(ends_.size() + more.size());
    for (const std::size_t end : more.ends_) ends_.push_back(bytes_.size() + end);
    bytes_.insert(bytes_.end(), more.bytes_.begin(), more.bytes_.end());
  }
  std::vector<std::vector<std::byte>> apart() const {
    std::vector<std::vector<std::byte>> result;
    result.reserve(size());
    for (std::size_t i = 0; i < size(); ++i) result.emplace_back((*this)[i].begin(), (*this)[i].end());
    return result;
  }
  friend bool operator==(const Blobs&, const Blobs&) = default;

 private:
  friend class BlobBuilder;
  std::vector<std::byte> bytes_;
  std::vector<std::size_t> ends_;
};

/// The next blob, of a known size, piece by piece; a piece may be what the blob before it has at the same place.
class BlobBuilder final {
 public:
  BlobBuilder(Blobs& blobs, std::size_t bytes) : bytes_(bytes) {
    const std::size_t begin = blobs.bytes_.size();
    before_bytes_ = blobs.empty() ? 0 : blobs[blobs.size() - 1].size();
    blobs.bytes_.resize(begin + bytes);
    blobs.ends_.push_back(begin + bytes);
    blob_ = blobs.bytes_.data() + begin;
    before_ = blob_ - before_bytes_;
  }
  /// Bytes that are missing.
  std::size_t left() const { return bytes_ - done_; }
  /// At most left(). False where the blob before it has not so many.
  bool copy(std::size_t bytes) {
    if (bytes > before_bytes_ - std::min(before_bytes_, done_)) return false;
    if (bytes > 0) std::memcpy(blob_ + done_, before_ + done_, bytes);
    done_ += bytes;
    return true;
  }
  /// At most left().
  void add(std::span<const std::byte> piece) {
    if (!piece.empty()) std::memcpy(blob_ + done_, piece.data(), piece.size());
    done_ += piece.size();
  }

 private:
  std::byte* blob_ = nullptr;
  const std::byte* before_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t before_bytes_ = 0;
  std::size_t done_ = 0;
};

}  // namespace herring::control
