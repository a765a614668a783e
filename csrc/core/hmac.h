#pragma once

#include <array>
#include <cstddef>
#include <span>

/// What authenticates the processes of a job to each other: SHA-256 (FIPS 180-4), HMAC (RFC 2104), random bytes. For
/// handshakes, not for bulk data. All functions are safe from any thread and keep no state.
namespace herring {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> data) noexcept;
/// A key of any length, also empty.
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data) noexcept;

/// True where both have the same length and bytes. Takes the same time wherever they differ, so that a guess cannot be
/// improved byte by byte by measuring; only the lengths are not hidden.
bool equal_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) noexcept;

/// Fills the span from the system's secure generator. Throws Error(kUnavailable) where there is none.
void random_bytes(std::span<std::byte> out);

}  // namespace herring
