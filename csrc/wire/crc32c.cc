#include "wire/crc32c.h"

#include <array>
#include <cstring>

#include "wire/header.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace herring::wire {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // Castagnoli, bits reversed.
constexpr std::size_t kSlices = 8;

using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

/// tables[s][b]: what byte b does to the sum when s more bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (std::size_t s = 1; s < kSlices; ++s) {
    for (std::size_t b = 0; b < 256; ++b) {
      const std::uint32_t before = tables[s - 1][b];
      tables[s][b] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  std::uint32_t crc = ~seed;
  while (bytes.size() >= kSlices) {
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < kSlices; ++i) {
      const std::uint32_t mixed = i < 4 ? crc >> (8 * i) : 0;
      next ^= kTables[kSlices - 1 - i][(std::to_integer<std::uint32_t>(bytes[i]) ^ mixed) & 0xFF];
    }
    crc = next;
    bytes = bytes.subspan(kSlices);
  }
  for (const std::byte b : bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<std::uint32_t>(b)) & 0xFF];
  return ~crc;
}

#if defined(__x86_64__)

bool has_crc32c_hardware() noexcept {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_hardware(std::span<const std::byte> bytes,
                                                                std::uint32_t seed) noexcept {
  std::uint64_t crc = ~seed;
  while (bytes.size() >= 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data(), sizeof word);
    crc = _mm_crc32_u64(crc, word);
    bytes = bytes.subspan(8);
  }
  auto rest = static_cast<std::uint32_t>(crc);
  for (const std::byte b : bytes) rest = _mm_crc32_u8(rest, std::to_integer<unsigned char>(b));
  return ~rest;
}

#else

bool has_crc32c_hardware() noexcept { return false; }

std::uint32_t crc32c_hardware(std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  return crc32c_table(bytes, seed);
}

#endif

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  return has_crc32c_hardware() ? crc32c_hardware(bytes, seed) : crc32c_table(bytes, seed);
}

}  // namespace herring::wire
