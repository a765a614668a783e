#pragma once

#include <cstddef>

/// What one endpoint holds at the same moment. A post beyond it is kAgain, and room comes only when another post
/// completes; so whoever keeps a pool of receives posted leaves room for what brings messages into it
/// (runtime/budget.h).
namespace herring::transport {

inline constexpr std::size_t kMaxOperations = 32768;  ///< Receives posted and sends not completed, together.
inline constexpr std::size_t kMaxSends = 4096;        ///< Of those, sends.

}  // namespace herring::transport
