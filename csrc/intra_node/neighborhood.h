#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "core/types.h"

namespace herring::intra_node {

struct NeighborhoodOptions {
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;
  std::uint64_t token = 0;        ///< Random, the same on all ranks of this host in this job, secret to others.
  std::uint64_t arena_bytes = 0;  ///< Address space of each rank's arena; memory is taken only when touched.
  std::uint32_t ring_bytes = 0;   ///< Capacity of the message ring between two ranks; a power of two.
  /// May be empty; called while ranks are awaited. What it throws ends the wait.
  std::function<void()> while_waiting = {};
  /// May be empty; called before pages of this rank's arena go back to the system, with what they are mapped at. Any
  /// thread.
  std::function<void(std::span<const std::byte>)> on_discard = {};
};

inline constexpr std::uint32_t kNoCore = ~0u;

/// Counters; read by the thread that owns the neighborhood.
struct NeighborhoodStats {
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t doorbells_rung = 0;  ///< System calls to wake a peer.
  std::uint64_t times_asleep = 0;    ///< prepare_sleep() said yes.
  std::uint64_t rings_broken = 0;    ///< Peers that wrote what no correct peer writes; their rings are dead.
};

/// The ranks of one host, joined by shared memory: each has an arena (memfd, passed over an abstract UNIX socket;
/// nothing in /dev/shm or the file system) that all map, a message ring to every other and one to all, and a doorbell.
/// Everything except wake() belongs to one thread; allocate/deallocate may be called from any. In a fork()ed child all
/// calls do nothing (allocate: empty, send: kUnavailable); the memory stays readable there.
class Neighborhood final {
 public:
  /// Blocks until all local ranks are connected; throws Error(kTimeout) naming the local ranks that did not come.
  Neighborhood(const NeighborhoodOptions& options, Instant deadline);
  ~Neighborhood();
  Neighborhood(const Neighborhood&) = delete;
  Neighborhood& operator=(const Neighborhood&) = delete;

  std::uint32_t size() const;

  /// A rank's arena as mapped here. Offsets into it mean the same on every rank.
  std::span<std::byte> arena(std::uint32_t local_rank) const;
  /// Memory of this rank's arena, 4096-byte aligned, on huge pages where the kernel allows; empty span where it is
  /// full. Recently freed memory is reused first (it is warm); large freed ranges go back to the system.
  std::span<std::byte> allocate(std::size_t bytes);
  /// The same, for memory that somebody may keep for long: a quarter of the arena, at least 4 MB, is left for
  /// allocate(), without which operations on memory elsewhere fail.
  std::span<std::byte> allocate_to_keep(std::size_t bytes);
  void deallocate(std::span<std::byte> memory);
  /// Offset of memory inside this rank's arena, or nothing where it lies elsewhere.
  bool contains(std::span<const std::byte> memory) const;
  std::uint64_t offset_of(std::span<const std::byte> memory) const;

  /// Appends a message to the ring to a rank. kAgain where the ring is full: flush(), and prepare_sleep() will not
  /// sleep through the peer's making room. Visible to the peer after flush(). kProtocol: the peer corrupted its ring.
  /// `streams`: writes `second` past the caches (copy_bytes()).
  Status send(std::uint32_t to, std::span<const std::byte> first, std::span<const std::byte> second = {},
              std::span<const std::byte> third = {}, bool streams = false);
  std::size_t max_message_bytes() const;
  /// A message to all others at once, written once and visible at once; among what came by send() it has no place in
  /// the order. False where some rank has not read enough of the ones before: then send() it to each.
  bool send_to_all(std::span<const std::byte> first, std::span<const std::byte> second = {},
                   std::span<const std::byte> third = {}, bool streams = false);
  /// Publishes and rings the doorbell of each rank that was sent to and is asleep (no system call where it is awake).
  void flush();
  /// The next message from any rank, round robin; the span lies in the ring until the next receive(). Empty: none.
  struct Message {
    std::uint32_t from = 0;
    std::span<const std::byte> bytes;
  };
  bool receive(Message& message);
  /// The next message that one rank sent to this one, or to all: it stays the next one until pop(), and is valid until
  /// then. False: none. Ends what the last receive() gave.
  enum class Channel : std::uint8_t { kPair, kAll };
  bool peek(std::uint32_t from, Channel channel, std::span<const std::byte>& message);
  void pop(std::uint32_t from, Channel channel);

  /// Sleep protocol: prepare_sleep() returns false where a message is waiting; else block in poll(2) on doorbell_fd()
  /// (and whatever else), then call end_sleep().
  int doorbell_fd() const;
  bool prepare_sleep();
  void end_sleep();
  /// Ends this rank's sleep, or the next one before it begins: check what other threads queued after end_sleep() or a
  /// false prepare_sleep(). No system call where the rank is awake. Any thread.
  void wake();

  /// On which core this rank is, for the others to see; and what one has said last, where it may be no longer. kNoCore:
  /// it has said nothing.
  void set_core(std::uint32_t core);
  std::uint32_t core_of(std::uint32_t local_rank) const;

  const NeighborhoodStats& stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Identifies the machine as seen by this process: ranks with equal strings can share memory. Includes the boot id and
/// the network and IPC namespaces, so that emulated hosts on one machine count as different.
std::string host_identity();

}  // namespace herring::intra_node
