#include "core/copy.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace herring {

#if defined(__SSE2__)
namespace {

constexpr std::size_t kSmall = 2048;  // memcpy's own loops are good up to here.
constexpr std::size_t kBlock = 64;
constexpr std::size_t kAhead = 1024;  // Prefetched, in bytes.

/// Asks for the line at `memory` to write it: where another core has it, that is what writing waits for, and an Intel
/// Xeon writes a quarter to a third faster for it. A processor that does not know it does nothing.
inline void prefetch_to_write([[maybe_unused]] std::byte* memory) {
#if defined(__x86_64__)
  asm volatile("prefetchw (%0)" ::"r"(memory));
#endif
}

/// `to` is aligned to kBlock, `bytes` a multiple of it.
template <bool kBypass>
void copy_blocks(const std::byte* from, std::byte* to, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kBlock) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    _mm_prefetch(reinterpret_cast<const char*>(from + at) + kAhead, _MM_HINT_T0);
    // Not beyond the end: what lies there may be another rank's to write.
    if (!kBypass && at + kAhead < bytes) prefetch_to_write(to + at + kAhead);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    if constexpr (kBypass) {
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    } else {
      _mm_store_si128(target, a);
      _mm_store_si128(target + 1, b);
      _mm_store_si128(target + 2, c);
      _mm_store_si128(target + 3, d);
    }
  }
}

}  // namespace
#endif

void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to, bool bypass_cache) {
  if (from.size() != to.size()) throw std::invalid_argument("copy_bytes: sizes differ");
  if (from.empty() || from.data() == to.data()) return;
#if defined(__SSE2__)
  if (from.size() > kSmall) {
    const std::size_t lead = (kBlock - reinterpret_cast<std::uintptr_t>(to.data()) % kBlock) % kBlock;
    const std::size_t body = (from.size() - lead) / kBlock * kBlock;
    std::memcpy(to.data(), from.data(), lead);
    if (bypass_cache) {
      copy_blocks<true>(from.data() + lead, to.data() + lead, body);
      // Streaming stores are not ordered with others: who is told of this copy must see it.
      _mm_sfence();
    } else {
      copy_blocks<false>(from.data() + lead, to.data() + lead, body);
    }
    const std::size_t done = lead + body;
    std::memcpy(to.data() + done, from.data() + done, from.size() - done);
    return;
  }
#endif
  (void)bypass_cache;
  std::memcpy(to.data(), from.data(), from.size());
}

}  // namespace herring
