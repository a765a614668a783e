#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/types.h"
#include "intra_node/shared_memory.h"

/// How the ranks of one host find each other and pass each other the descriptors of their shared memory.
///
/// Every rank but the last listens on an abstract UNIX socket (SOCK_SEQPACKET) named after an HMAC of the token and its
/// rank; rank i calls every rank below it and both send one Hello with three descriptors. Taken seriously is only who
/// has our user id (SO_PEERCRED) and an HMAC under the token; everybody else is dropped and the waiting goes on. The
/// sockets are closed at the end.
namespace herring::intra_node {

/// What one rank shares with the others.
struct SharedDescriptors {
  FileDescriptor arena;
  FileDescriptor control;
  FileDescriptor doorbell;
};

struct MeetingOptions {
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;
  std::uint64_t token = 0;
  std::uint64_t arena_bytes = 0;  ///< The same on all ranks, else Error(kMismatch) says who has what.
  std::uint32_t ring_bytes = 0;   ///< Likewise.
  /// May be empty; called every few milliseconds. What it throws ends the wait.
  std::function<void()> while_waiting = {};
  bool has_arena_alone = false;  ///< Of SharedDescriptors; the same on all ranks.
};

/// Blocks until all ranks have been met; returns what they share, by rank (our own entry is empty). The descriptors are
/// not checked yet. Throws Error(kTimeout) naming the local ranks that did not come.
std::vector<SharedDescriptors> meet(const MeetingOptions& options, const SharedDescriptors& own, Instant deadline);

/// The abstract name (without the leading zero byte) on which a rank listens; for tests.
std::string meeting_name(std::uint64_t token, std::uint32_t local_rank);

}  // namespace herring::intra_node
