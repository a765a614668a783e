#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"
#include "wire/header.h"

namespace herring::wire {

/// Tags of announces that are reported to one peer, many at once (Receipt, Settled). One such message is on its way at
/// a time: what comes meanwhile goes with the next.
class TagBatch final {
 public:
  /// What nobody waits for is reported after so long, or when there are kMany.
  static constexpr Duration kDelay = std::chrono::milliseconds(10);

  void add(std::uint64_t tag) { tags_.push_back(tag); }
  void clear() { tags_.clear(); }
  /// Somebody waits for what is there.
  void hurry() { is_urgent_ = !tags_.empty(); }
  bool is_urgent() const noexcept { return is_urgent_; }
  bool has_to_wait() const noexcept { return is_on_way_ || tags_.empty(); }
  /// `is_late`: its time is over.
  bool is_ready(bool is_late) const noexcept {
    return !has_to_wait() && (is_late || is_urgent_ || tags_.size() >= kMany);
  }

  /// The body of the next message, whose number of tags goes into the header. It is on its way from now on.
  std::vector<std::byte> take(Header& header) {
    const std::size_t count = std::min(tags_.size(), kMaxTagList);
    header.count = static_cast<std::uint32_t>(count);
    std::vector<std::byte> body = encode_list(std::span(tags_).first(count));
    tags_.erase(tags_.begin(), tags_.begin() + static_cast<std::ptrdiff_t>(count));
    if (tags_.empty()) is_urgent_ = false;
    is_on_way_ = true;
    return body;
  }
  void sent() noexcept { is_on_way_ = false; }

 private:
  static constexpr std::size_t kMany = 32;

  std::vector<std::uint64_t> tags_;
  bool is_urgent_ = false;
  bool is_on_way_ = false;
};

}  // namespace herring::wire
