#pragma once

#include <cstddef>

/// What one endpoint holds at the same moment. A post beyond it is kAgain, and room comes only when another post
/// completes; so whoever keeps a pool of receives posted leaves room for what brings messages into it
/// (runtime/budget.h).
namespace herring::transport {

inline constexpr std::size_t kMaxOperations = 32768;  ///< Receives posted and sends not completed, together.
inline constexpr std::size_t kMaxSends = 4096;        ///< Of those, sends.
inline constexpr std::size_t kMaxSendsToPeer = 1024;  ///< One unreachable peer must not use up an endpoint's sends,
inline constexpr std::size_t kFewSends = 32;  ///< nor some that do not read: half is for who has no more than these.

/// Whether an endpoint that has so many sends, `to_peer` of them to this peer, takes one more to it.
constexpr bool takes_send(std::size_t sends, std::size_t to_peer) {
  return to_peer < kMaxSendsToPeer && sends < (to_peer < kFewSends ? kMaxSends : kMaxSends / 2);
}

}  // namespace herring::transport
