#include "wire/crc32c.h"

#include <array>
#include <cstring>

#include "core/processor.h"
#include "wire/header.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HERRING_CRC32C_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#define HERRING_CRC32C_TARGET __attribute__((target("+crc")))
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

/// a * b modulo the polynomial, bits reversed as everywhere here: the highest bit is x^0.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if ((a & 0x8000'0000) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

/// x^(8 * bytes): what `bytes` zeros behind it make of a sum.
constexpr std::uint32_t zeros(std::uint64_t bytes) {
  std::uint32_t power = 0x8000'0000;   // x^0
  std::uint32_t square = 0x0080'0000;  // x^8
  for (; bytes != 0; bytes >>= 1) {
    if ((bytes & 1) != 0) power = multiply(power, square);
    square = multiply(square, square);
  }
  return power;
}

using ShiftTables = std::array<std::array<std::uint32_t, 256>, 4>;

/// tables[i][b]: byte i of a sum, b, multiplied by x^(8 * bytes).
constexpr ShiftTables make_shift(std::uint64_t bytes) {
  ShiftTables tables{};
  const std::uint32_t power = zeros(bytes);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (std::size_t bit = 0; bit < 8; ++bit) {
      const std::uint32_t shifted = multiply(std::uint32_t{1} << (8 * i + bit), power);
      for (std::size_t b = 0; b < std::size_t{1} << bit; ++b) {
        tables[i][b | std::size_t{1} << bit] = tables[i][b] ^ shifted;
      }
    }
  }
  return tables;
}

#if defined(HERRING_CRC32C_TARGET)

/// The instruction takes 8 bytes a cycle but answers after three: three streams side by side keep it busy.
constexpr std::size_t kStreamBytes = 2048;
constexpr ShiftTables kShift = make_shift(kStreamBytes);

std::uint32_t shift_stream(std::uint64_t crc) {
  return kShift[0][crc & 0xFF] ^ kShift[1][crc >> 8 & 0xFF] ^ kShift[2][crc >> 16 & 0xFF] ^ kShift[3][crc >> 24 & 0xFF];
}

#if defined(__x86_64__)
HERRING_CRC32C_TARGET std::uint64_t add_word(std::uint64_t crc, std::uint64_t word) { return _mm_crc32_u64(crc, word); }
HERRING_CRC32C_TARGET std::uint32_t add_byte(std::uint32_t crc, unsigned char byte) { return _mm_crc32_u8(crc, byte); }
#else
HERRING_CRC32C_TARGET std::uint64_t add_word(std::uint64_t crc, std::uint64_t word) {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
HERRING_CRC32C_TARGET std::uint32_t add_byte(std::uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }
#endif

#endif

}  // namespace

std::uint32_t crc32c_shift(std::uint64_t bytes) noexcept { return zeros(bytes); }

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint32_t shift) noexcept {
  return multiply(shift, first) ^ second;
}

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

#if defined(HERRING_CRC32C_TARGET)

bool has_crc32c_hardware() noexcept { return has_crc32c_instruction(); }

HERRING_CRC32C_TARGET std::uint32_t crc32c_hardware(std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  std::uint64_t crc = ~seed;
  while (bytes.size() >= 3 * kStreamBytes) {
    const std::byte* const data = bytes.data();
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kStreamBytes; i += 8) {
      std::uint64_t words[3];
      std::memcpy(&words[0], data + i, 8);
      std::memcpy(&words[1], data + kStreamBytes + i, 8);
      std::memcpy(&words[2], data + 2 * kStreamBytes + i, 8);
      crc = add_word(crc, words[0]);
      second = add_word(second, words[1]);
      third = add_word(third, words[2]);
    }
    crc = shift_stream(shift_stream(crc) ^ second) ^ third;
    bytes = bytes.subspan(3 * kStreamBytes);
  }
  while (bytes.size() >= 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data(), sizeof word);
    crc = add_word(crc, word);
    bytes = bytes.subspan(8);
  }
  auto rest = static_cast<std::uint32_t>(crc);
  for (const std::byte b : bytes) rest = add_byte(rest, std::to_integer<unsigned char>(b));
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
