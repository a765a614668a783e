#include "core/hmac.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "core/sha256.h"
#include "core/status.h"

namespace herring {
namespace {

using internal::kBlockBytes;
using Block = std::array<std::byte, kBlockBytes>;

/// SHA-256 in pieces: update() any number of times, then finish() once.
class Sha256 {
 public:
  void update(std::span<const std::byte> data) noexcept {
    total_bytes_ += data.size();
    while (!data.empty()) {
      const std::size_t taken = std::min(data.size(), kBlockBytes - filled_);
      std::copy_n(data.begin(), taken, block_.begin() + static_cast<std::ptrdiff_t>(filled_));
      filled_ += taken;
      data = data.subspan(taken);
      if (filled_ == kBlockBytes) compress();
    }
  }

  Digest finish() noexcept {
    const std::uint64_t bits = total_bytes_ * 8;
    block_[filled_++] = std::byte{0x80};
    if (filled_ > kBlockBytes - 8) {
      std::fill(block_.begin() + static_cast<std::ptrdiff_t>(filled_), block_.end(), std::byte{0});
      compress();
    }
    std::fill(block_.begin() + static_cast<std::ptrdiff_t>(filled_), block_.end(), std::byte{0});
    for (std::size_t i = 0; i < 8; ++i) block_[kBlockBytes - 1 - i] = static_cast<std::byte>(bits >> (8 * i));
    compress();

    Digest digest{};
    for (std::size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  void compress() noexcept {
    static const internal::Compress best = internal::best_sha256_compress();
    best(state_, block_);
    filled_ = 0;
  }

  internal::Sha256State state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  Block block_{};
  std::size_t filled_ = 0;
  std::uint64_t total_bytes_ = 0;
};

Block xored(const Block& key, std::byte with) noexcept {
  Block out;
  std::transform(key.begin(), key.end(), out.begin(), [with](std::byte b) { return b ^ with; });
  return out;
}

}  // namespace

Digest sha256(std::span<const std::byte> data) noexcept {
  Sha256 hash;
  hash.update(data);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data) noexcept {
  Block padded{};
  if (key.size() > kBlockBytes) {
    const Digest shortened = sha256(key);
    std::copy(shortened.begin(), shortened.end(), padded.begin());
  } else {
    std::copy(key.begin(), key.end(), padded.begin());
  }
  Sha256 inner;
  inner.update(xored(padded, std::byte{0x36}));
  inner.update(data);
  const Digest inner_digest = inner.finish();
  Sha256 outer;
  outer.update(xored(padded, std::byte{0x5c}));
  outer.update(inner_digest);
  return outer.finish();
}

bool equal_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) noexcept {
  if (a.size() != b.size()) return false;
  // volatile: the compiler must not leave the loop at the first difference.
  volatile unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference = difference | std::to_integer<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

void random_bytes(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw Error(Code::kUnavailable, "getrandom of " + std::to_string(out.size()) +
                                          " bytes failed: " + std::generic_category().message(errno));
    }
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

}  // namespace herring
