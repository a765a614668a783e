#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// The two ways of computing wire::crc32c(), apart so that a test can hold them to each other.
namespace herring::wire {

/// Tables, any processor.
std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t seed) noexcept;

/// True where crc32c_hardware() may be called.
bool has_crc32c_hardware() noexcept;
std::uint32_t crc32c_hardware(std::span<const std::byte> bytes, std::uint32_t seed) noexcept;

}  // namespace herring::wire
