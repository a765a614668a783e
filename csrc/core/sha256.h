#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

/// The inside of SHA-256: what a block does to the state.
namespace herring::internal {

inline constexpr std::size_t kBlockBytes = 64;
using Sha256State = std::array<std::uint32_t, 8>;
using Compress = void (*)(Sha256State& state, std::span<const std::byte, kBlockBytes> block);

void sha256_compress_scalar(Sha256State& state, std::span<const std::byte, kBlockBytes> block);
/// With the processor's own instructions where it has them: about five times as quick, the same state.
Compress best_sha256_compress();

}  // namespace herring::internal
