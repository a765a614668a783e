#include "intra_node/neighborhood.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <deque>
#include <new>
#include <optional>

#include "core/process.h"
#include "intra_node/arena_allocator.h"
#include "intra_node/meeting.h"
#include "intra_node/multicast_ring.h"
#include "intra_node/ring.h"
#include "intra_node/shared_memory.h"

namespace herring::intra_node {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kWarmLimitBytes = 256 << 20;
constexpr std::uint64_t kLeastLeft = 4 << 20;  // Two operations have six parts of 512 KB.
constexpr std::uint32_t kMaxLocalSize = 4096;
constexpr std::uint32_t kMaxRingBytes = 1 << 30;
constexpr std::uint64_t kRingHeaderStride = 256;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

/// The start of a rank's control memory. Then a RingHeader for every sender and a MulticastTail for every reader, then
/// a ring for every sender; in the place of what the rank sends itself is what it sends to all.
struct ControlHeader {
  alignas(64) std::atomic<std::uint32_t> asleep;         ///< Whoever turns it from 1 to 0 rings the doorbell.
  alignas(64) std::atomic<std::uint32_t> core_plus_one;  ///< Where the rank is; 0: it has not said.
};

std::uint64_t tails_offset(std::uint32_t local_size) { return sizeof(ControlHeader) + local_size * kRingHeaderStride; }

std::uint64_t rings_offset(std::uint32_t local_size) {
  return round_up(tails_offset(local_size) + local_size * sizeof(MulticastTail), kPageBytes);
}

std::uint64_t control_bytes(const NeighborhoodOptions& options) {
  return rings_offset(options.local_size) + std::uint64_t{options.local_size} * options.ring_bytes;
}

/// Fresh shared memory is zero, which is what these start as on both sides, so nobody has to construct them first.
ControlHeader& control_header(const Mapping& control) {
  return *std::launder(reinterpret_cast<ControlHeader*>(control.bytes().data()));
}
RingHeader& ring_header(const Mapping& control, std::uint32_t sender) {
  return *std::launder(
      reinterpret_cast<RingHeader*>(control.bytes().data() + sizeof(ControlHeader) + sender * kRingHeaderStride));
}
MulticastTail& multicast_tail(const Mapping& control, std::uint32_t local_size, std::uint32_t reader) {
  std::byte* const tails = control.bytes().data() + tails_offset(local_size);
  return *std::launder(reinterpret_cast<MulticastTail*>(tails + reader * sizeof(MulticastTail)));
}
std::span<std::byte> ring_data(const Mapping& control, const NeighborhoodOptions& options, std::uint32_t sender) {
  return control.bytes().subspan(rings_offset(options.local_size) + std::uint64_t{sender} * options.ring_bytes,
                                 options.ring_bytes);
}

NeighborhoodOptions checked(NeighborhoodOptions options) {
  const auto refuse = [](const std::string& what) { throw Error(Code::kInvalidArgument, "neighborhood: " + what); };
  if (options.local_size == 0 || options.local_size > kMaxLocalSize || options.local_rank >= options.local_size) {
    refuse("local rank " + std::to_string(options.local_rank) + " of " + std::to_string(options.local_size));
  }
  if (options.ring_bytes < kPageBytes || options.ring_bytes > kMaxRingBytes ||
      !std::has_single_bit(options.ring_bytes)) {
    refuse("rings of " + std::to_string(options.ring_bytes) + " bytes; a power of two from 4096 is needed");
  }
  if (options.arena_bytes == 0 || options.arena_bytes > (std::uint64_t{1} << 46)) {
    refuse("an arena of " + std::to_string(options.arena_bytes) + " bytes (HERRING_ARENA_BYTES)");
  }
  options.arena_bytes = round_up(options.arena_bytes, kPageBytes);
  return options;
}

void ring(const FileDescriptor& doorbell) {
  const std::uint64_t one = 1;
  // Can only fail where the counter is full, and then the sleeper has been rung.
  [[maybe_unused]] const ssize_t written = write(doorbell.get(), &one, sizeof(one));
}

struct Peer {
  std::uint32_t rank = 0;
  Mapping arena;
  Mapping control;
  FileDescriptor doorbell;
  std::optional<RingProducer> out;  ///< In the peer's control memory.
  std::optional<RingConsumer> in;   ///< In ours.
  std::optional<MulticastConsumer> in_of_all;
  bool counted_broken = false;

  bool has_message() { return in->has_message() || in_of_all->has_message(); }
  bool is_broken() const { return in->is_broken() || in_of_all->is_broken(); }
};

}  // namespace

class Neighborhood::Impl {
  using Channel = Neighborhood::Channel;

 public:
  Impl(const NeighborhoodOptions& options, Instant deadline)
      : options_(checked(options)),
        allocator_(options_.arena_bytes, kWarmLimitBytes,
                   [this](std::uint64_t offset, std::uint64_t bytes) { discard(offset, bytes); }) {
    SharedDescriptors own{make_shared_memory("herring-arena", options_.arena_bytes),
                          make_shared_memory("herring-control", control_bytes(options_)), make_doorbell()};
    arena_ = Mapping(own.arena, options_.arena_bytes, "this rank's arena (HERRING_ARENA_BYTES)");
    control_ = Mapping(own.control, control_bytes(options_), "this rank's message rings");
    MeetingOptions meeting{options_.local_rank,  options_.local_size, options_.token,
                           options_.arena_bytes, options_.ring_bytes, options_.while_waiting};
    std::vector<SharedDescriptors> theirs = meet(meeting, own, deadline);
    doorbell_ = std::move(own.doorbell);
    peers_.resize(options_.local_size);
    for (std::uint32_t rank = 0; rank < options_.local_size; ++rank) {
      if (rank != options_.local_rank) join(rank, std::move(theirs[rank]));
    }
    std::vector<MulticastTail*> readers;
    for (std::uint32_t rank = 0; rank < options_.local_size; ++rank) {
      if (rank != options_.local_rank) readers.push_back(&multicast_tail(control_, options_.local_size, rank));
    }
    to_all_.emplace(std::move(readers), ring_data(control_, options_, options_.local_rank),
                    multicast_secret(options_.local_rank));
  }

  ~Impl() {
    if (options_.on_discard && guard_.in_owner()) options_.on_discard(arena_.bytes());
  }

  std::span<std::byte> arena(std::uint32_t rank) const {
    return rank == options_.local_rank ? arena_.bytes() : peers_.at(rank).arena.bytes();
  }

  std::span<std::byte> allocate(std::size_t bytes, std::uint64_t leave_bytes = 0) {
    if (!guard_.in_owner()) return {};
    const std::optional<std::uint64_t> offset = allocator_.allocate(bytes, leave_bytes);
    return offset ? arena_.bytes().subspan(*offset, bytes) : std::span<std::byte>();
  }

  std::span<std::byte> allocate_to_keep(std::size_t bytes) {
    return allocate(bytes, std::max(options_.arena_bytes / 4, kLeastLeft));
  }

  void deallocate(std::span<std::byte> memory) {
    if (guard_.in_owner() && contains(memory)) (void)allocator_.deallocate(offset_of(memory));
  }

  bool contains(std::span<const std::byte> memory) const {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    const auto base = reinterpret_cast<std::uintptr_t>(arena_.bytes().data());
    return address >= base && address - base < options_.arena_bytes &&
           memory.size() <= options_.arena_bytes - (address - base);
  }

  std::uint64_t offset_of(std::span<const std::byte> memory) const {
    return static_cast<std::uint64_t>(memory.data() - arena_.bytes().data());
  }

  Status send(std::uint32_t to, std::span<const std::byte> first, std::span<const std::byte> second,
              std::span<const std::byte> third, bool streams) {
    if (!guard_.in_owner()) return Status(Code::kUnavailable, "shared memory belongs to the parent of this process");
    if (to >= options_.local_size || to == options_.local_rank) {
      return Status(Code::kInvalidArgument, "no message ring to local rank " + std::to_string(to));
    }
    const Status status = peers_[to].out->push(first, second, third, streams);
    if (status.is_ok()) ++stats_.messages_sent;
    if (status.code() == Code::kProtocol) count_broken(peers_[to]);
    return status;
  }

  void flush() {
    if (!guard_.in_owner()) return;
    for (Peer& peer : peers_) {
      if (peer.out && peer.out->publish()) wake_peer(peer);
    }
  }

  bool send_to_all(std::span<const std::byte> first, std::span<const std::byte> second,
                   std::span<const std::byte> third, bool streams) {
    if (!guard_.in_owner() || !to_all_->push(first, second, third, streams)) return false;
    for (const Peer& peer : peers_) {
      if (peer.in) wake_peer(peer);
    }
    stats_.messages_sent += peers_.size() - 1;
    return true;
  }

  void end_reading() {
    if (reading_ == nullptr) return;
    release(*reading_, reading_channel_);
    reading_ = nullptr;
  }

  bool peek(std::uint32_t from, Channel channel, std::span<const std::byte>& message) {
    if (!guard_.in_owner() || from >= options_.local_size || !peers_[from].in) return false;
    end_reading();
    return front(peers_[from], channel, message);
  }

  void pop(std::uint32_t from, Channel channel) {
    release(peers_[from], channel);
    ++stats_.messages_received;
  }

  bool receive(Message& message) {
    if (!guard_.in_owner()) return false;
    end_reading();
    const std::uint32_t size = options_.local_size;
    for (std::uint32_t i = 0; i < size; ++i) {
      const std::uint32_t rank = next_ + i < size ? next_ + i : next_ + i - size;
      Peer& peer = peers_[rank];
      if (!peer.in) continue;
      if (front(peer, Channel::kPair, message.bytes)) {
        reading_channel_ = Channel::kPair;
      } else if (front(peer, Channel::kAll, message.bytes)) {
        reading_channel_ = Channel::kAll;
      } else {
        continue;
      }
      message.from = rank;
      reading_ = &peer;
      next_ = rank + 1 < size ? rank + 1 : 0;
      ++stats_.messages_received;
      return true;
    }
    return false;
  }

  int doorbell_fd() const { return doorbell_.get(); }

  bool prepare_sleep() {
    std::atomic<std::uint32_t>& asleep = control_header(control_).asleep;
    asleep.store(1, std::memory_order_seq_cst);
    bool must_stay = wanted_.exchange(false, std::memory_order_seq_cst);
    for (Peer& peer : peers_) {
      if (!peer.in) continue;
      must_stay |= peer.has_message();
      must_stay |= peer.out->got_room();
    }
    // Who found us asleep meanwhile rings for nothing: the next sleep ends at once, once.
    if (must_stay) {
      asleep.store(0, std::memory_order_seq_cst);
      return false;
    }
    ++stats_.times_asleep;
    return true;
  }

  void end_sleep() {
    control_header(control_).asleep.store(0, std::memory_order_seq_cst);
    wanted_.store(false, std::memory_order_seq_cst);
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t drained = read(doorbell_.get(), &count, sizeof(count));
  }

  void wake() {
    if (!guard_.in_owner()) return;
    wanted_.store(true, std::memory_order_seq_cst);
    if (take_sleeper(control_)) ring(doorbell_);
  }

  void set_core(std::uint32_t core) {
    if (guard_.in_owner()) control_header(control_).core_plus_one.store(core + 1, std::memory_order_relaxed);
  }
  std::uint32_t core_of(std::uint32_t rank) const {
    const Mapping& control = rank == options_.local_rank ? control_ : peers_.at(rank).control;
    return control_header(control).core_plus_one.load(std::memory_order_relaxed) - 1;
  }

  std::uint32_t size() const { return options_.local_size; }
  std::size_t max_message_bytes() const { return max_ring_message(options_.ring_bytes); }
  const NeighborhoodStats& stats() const { return stats_; }

 private:
  void join(std::uint32_t rank, SharedDescriptors theirs) {
    const std::string whose = " of local rank " + std::to_string(rank);
    Peer& peer = peers_[rank];
    peer.rank = rank;
    check_shared_memory(theirs.arena, options_.arena_bytes, "the arena" + whose);
    check_shared_memory(theirs.control, control_bytes(options_), "the control memory" + whose);
    check_doorbell(theirs.doorbell, "the doorbell" + whose);
    peer.arena = Mapping(theirs.arena, options_.arena_bytes, "the arena" + whose + " (HERRING_ARENA_BYTES)");
    peer.control = Mapping(theirs.control, control_bytes(options_), "the message rings" + whose);
    peer.doorbell = std::move(theirs.doorbell);
    peer.out.emplace(ring_header(peer.control, options_.local_rank),
                     ring_data(peer.control, options_, options_.local_rank));
    peer.in.emplace(ring_header(control_, rank), ring_data(control_, options_, rank));
    peer.in_of_all.emplace(multicast_tail(peer.control, options_.local_size, options_.local_rank),
                           ring_data(peer.control, options_, rank), multicast_secret(rank));
  }

  /// A rank's own; none is a small distance from another's.
  std::uint64_t multicast_secret(std::uint32_t rank) const { return options_.token ^ (std::uint64_t{rank} << 48); }

  bool front(Peer& peer, Channel channel, std::span<const std::byte>& message) {
    if (channel == Channel::kPair ? peer.in->front(message) : peer.in_of_all->front(message)) return true;
    if (peer.is_broken()) count_broken(peer);
    return false;
  }

  void release(Peer& peer, Channel channel) {
    if (channel == Channel::kAll) return peer.in_of_all->release();
    if (peer.in->release()) wake_peer(peer);
  }

  static bool take_sleeper(const Mapping& control) {
    std::atomic<std::uint32_t>& asleep = control_header(control).asleep;
    return asleep.load(std::memory_order_seq_cst) != 0 && asleep.exchange(0, std::memory_order_seq_cst) != 0;
  }

  void wake_peer(const Peer& peer) {
    if (!take_sleeper(peer.control)) return;
    ring(peer.doorbell);
    ++stats_.doorbells_rung;
  }

  void count_broken(Peer& peer) {
    if (!peer.counted_broken) ++stats_.rings_broken;
    peer.counted_broken = true;
  }

  void discard(std::uint64_t offset, std::uint64_t bytes) {
    if (options_.on_discard) options_.on_discard(arena_.bytes().subspan(offset, bytes));
    // Advice: where the kernel cannot, the pages are merely kept.
    (void)madvise(arena_.bytes().data() + offset, bytes, MADV_REMOVE);
  }

  const NeighborhoodOptions options_;
  const ForkGuard guard_;
  Mapping arena_;
  Mapping control_;
  FileDescriptor doorbell_;
  ArenaAllocator allocator_;
  std::vector<Peer> peers_;  // By rank; ours is empty.
  std::optional<MulticastProducer> to_all_;
  Peer* reading_ = nullptr;  // Whose message the last receive() returned.
  Channel reading_channel_ = Channel::kPair;
  std::uint32_t next_ = 0;
  std::atomic<bool> wanted_{false};
  NeighborhoodStats stats_;
};

Neighborhood::Neighborhood(const NeighborhoodOptions& options, Instant deadline)
    : impl_(std::make_unique<Impl>(options, deadline)) {}
Neighborhood::~Neighborhood() = default;

std::uint32_t Neighborhood::size() const { return impl_->size(); }
void Neighborhood::set_core(std::uint32_t core) { impl_->set_core(core); }
std::uint32_t Neighborhood::core_of(std::uint32_t local_rank) const { return impl_->core_of(local_rank); }
std::span<std::byte> Neighborhood::arena(std::uint32_t local_rank) const { return impl_->arena(local_rank); }
std::span<std::byte> Neighborhood::allocate(std::size_t bytes) { return impl_->allocate(bytes); }
std::span<std::byte> Neighborhood::allocate_to_keep(std::size_t bytes) { return impl_->allocate_to_keep(bytes); }
void Neighborhood::deallocate(std::span<std::byte> memory) { impl_->deallocate(memory); }
bool Neighborhood::contains(std::span<const std::byte> memory) const { return impl_->contains(memory); }
std::uint64_t Neighborhood::offset_of(std::span<const std::byte> memory) const { return impl_->offset_of(memory); }
Status Neighborhood::send(std::uint32_t to, std::span<const std::byte> first, std::span<const std::byte> second,
                          std::span<const std::byte> third, bool streams) {
  return impl_->send(to, first, second, third, streams);
}
std::size_t Neighborhood::max_message_bytes() const { return impl_->max_message_bytes(); }
void Neighborhood::flush() { impl_->flush(); }
bool Neighborhood::receive(Message& message) { return impl_->receive(message); }
bool Neighborhood::peek(std::uint32_t from, Channel channel, std::span<const std::byte>& message) {
  return impl_->peek(from, channel, message);
}
void Neighborhood::pop(std::uint32_t from, Channel channel) { impl_->pop(from, channel); }
bool Neighborhood::send_to_all(std::span<const std::byte> first, std::span<const std::byte> second,
                               std::span<const std::byte> third, bool streams) {
  return impl_->send_to_all(first, second, third, streams);
}
int Neighborhood::doorbell_fd() const { return impl_->doorbell_fd(); }
bool Neighborhood::prepare_sleep() { return impl_->prepare_sleep(); }
void Neighborhood::end_sleep() { impl_->end_sleep(); }
void Neighborhood::wake() { impl_->wake(); }
const NeighborhoodStats& Neighborhood::stats() const { return impl_->stats(); }

}  // namespace herring::intra_node
