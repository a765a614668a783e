#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "core/types.h"

namespace herring::server {

/// How many chunks of one worker a lane lets be in flight, by how long they take from the grant to the last worker's
/// data. Too few, and the link is idle while grants travel; too many, and they only wait in the network's queues, where
/// one lane's run ahead of another's. So it aims at a time. Starts at `least`.
class AdaptiveWindow final {
 public:
  AdaptiveWindow(std::uint32_t least, std::uint32_t most) : least_(least), most_(std::max(least, most)), size_(least) {}

  std::uint32_t size() const { return size_; }

  /// Chunks that were granted together are complete. Moves by one at most, once for each window's worth of chunks.
  void on_complete(Duration since_grant, std::uint32_t chunks) {
    total_ += since_grant * chunks;
    chunks_ += chunks;
    if (chunks_ < size_) return;
    const Duration mean = total_ / chunks_;
    total_ = {};
    chunks_ = 0;
    if (mean < kShort && size_ < most_) {
      ++size_;
    } else if (mean > kLong && size_ > least_) {
      --size_;
    }
  }

 private:
  // Long beside what a busy machine takes to schedule everybody once, short beside a bucket on a link that needs this.
  static constexpr Duration kShort = std::chrono::milliseconds(20);
  static constexpr Duration kLong = std::chrono::milliseconds(30);

  const std::uint32_t least_;
  const std::uint32_t most_;
  std::uint32_t size_;
  std::uint32_t chunks_ = 0;
  Duration total_{};
};

}  // namespace herring::server
