#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/operation.h"
#include "core/status.h"
#include "core/types.h"

/// What a worker process can ask of a job: the face of Runtime (a job as it was started) and of elastic::Runtime (a job
/// that may lose and gain processes).
namespace herring::runtime {

/// Tells operations that go by their names from those that go by the order of calls.
inline constexpr std::uint64_t kNamedKey = std::uint64_t{1} << 63;
/// FNV-1a of the name, and kNamedKey: the same on every rank.
std::uint64_t name_key(std::string_view name);
/// The key of a name's use after `use` others.
std::uint64_t use_key(std::uint64_t name, std::uint64_t use);

/// A pending operation. Safe from any thread.
class Work {
 public:
  virtual ~Work() = default;
  virtual bool is_done() const = 0;
  /// Blocks until done or the deadline; false on the deadline (the operation goes on).
  virtual bool wait(Instant deadline) = 0;
  /// The calling thread waits for this, and does nothing else before it is done, while the result lives. Where all that
  /// wait for each other have said so, the job ends with kMismatch (HERRING_DEADLOCK_AFTER_S). `from_pool`: the thread
  /// does now what other threads ask for, and they wait as well.
  [[nodiscard]] virtual std::shared_ptr<void> block([[maybe_unused]] bool from_pool = false) { return nullptr; }
  /// Ok or why it failed; meaningful when done.
  virtual Status status() const = 0;
  /// Runs when done (at once where it is already), on a thread of the runtime that may block without holding up
  /// communication. Not more than once a call.
  virtual void on_done(std::function<void(const Status&)> callback) = 0;
  /// Of a reduction with backup workers that ended well: the ranks of the group whose data is in it. Else empty, which
  /// means all.
  virtual std::vector<std::uint32_t> contributors() const { return {}; }
};

/// The operation that somebody waits for, and its name for people where the operation says less.
struct Awaited {
  const Work* work = nullptr;        ///< Null: it is not known now.
  std::string text;                  ///< Empty: as the operation says.
  std::shared_ptr<const Work> kept;  ///< Keeps it, where nobody else does for sure.
};

/// What makes a group's calls by itself, on no thread of the program: the rounds of small tensors.
class BackgroundCaller {
 public:
  /// What it will call, in this group or another, while the program calls nothing.
  struct Outlook {
    bool is_quiet = true;           ///< Nothing.
    bool is_about_to_call = false;  ///< Something, whatever other ranks do.
    Awaited awaited;  ///< Where that is false: something, when this has ended. None: nothing that matters.
  };
  virtual ~BackgroundCaller() = default;
  /// Safe from any thread.
  virtual Outlook outlook() const = 0;
};

/// Memory of an all-reduce that is filled while the operation is under way, and read where a part of it is over: copies
/// from a device and back (device_parts.h).
class LateMemory {
 public:
  virtual ~LateMemory() = default;
  // On the thread that moves data, which none of these may hold up:
  /// How many bytes, from the start on, are this rank's argument by now. All that no result has come for stay so.
  virtual std::uint64_t bytes_there() const = 0;
  /// Not ok: no more of them come, and the operation ends with this.
  virtual Status status() const = 0;
  /// These bytes are the result.
  virtual void on_result(std::uint64_t offset, std::uint64_t bytes) = 0;
};

/// One collective call, framework-free. Spans are borrowed until the Work is done.
struct Request {
  GroupId group;
  OpDescriptor descriptor;          ///< op_bytes and shape of this rank's argument; part_bytes is ignored.
  std::optional<std::string> name;  ///< Matched by name (any order on each rank), else by the group's call order.
  /// Instead of both: the operation's own number, the same on all ranks, used once. With kNamedKey it may come in any
  /// order beside those of others.
  std::optional<std::uint64_t> key = {};
  std::span<const std::byte> input;  ///< All-gather: this rank's block. Else: the same memory as output, or the source.
  std::span<std::byte> output;       ///< All-gather: group size x block. Barrier: empty.
  std::optional<Duration> timeout;   ///< Else Config::timeout_s.
  bool is_patient = false;           ///< Instead: others may come when they like. No time limit, and no stall.
  bool is_waited_for = false;        ///< The caller waits at once: its own thread may move the data.
  bool from_pool = false;            ///< As Work::block()'s, for run().
  /// Sum and average: need not wait for the last HERRING_BACKUP_WORKERS of the group; an average is over those who are
  /// in. Where the setting is 0, nothing.
  bool has_backup = false;
  bool is_lent = false;  ///< The memory is what the caller has lent itself by lend(), for tensors.
  /// Of an all-reduce in place, where the communicator takes it (late_part_bytes()): what its memory is.
  std::shared_ptr<LateMemory> late = {};
  /// Of an all-reduce, where the communicator takes it (device_memory()): input and output lie in a device. What keeps
  /// them, registered, until the network touches them no more, which may be after the end where a server was lost.
  std::shared_ptr<const void> device_memory = {};

  bool is_special() const { return late != nullptr || device_memory != nullptr; }
};

/// Whether, and how, all-reduces of a group take memory of a device.
struct DeviceMemoryUse {
  Status status;  ///< kUnavailable: they do not, and why.
  /// Input and output are different memory, else the same: what a lost server had is summed again from the input.
  bool is_apart = false;
};

/// A collective that is made of messages, as this rank calls it. A rank that has waited in one for long tells the
/// others what it is doing: who has called something else instead hears of it, and so does this rank.
struct Composed {
  std::uint64_t number = 0;    ///< By Communicator::take_number().
  std::uint32_t messages = 0;  ///< How many of them this rank sends and receives.
  OpDescriptor descriptor;     ///< Without bytes; is_made_of_messages().
};

/// A message to one rank of a group; done when that rank has received it. Met by a receive of the same group, tag and
/// size; messages to the same rank with the same tag are received in the order in which they were sent.
struct Send {
  GroupId group;
  std::uint32_t to = 0;                             ///< Rank in the group; may be this one.
  std::uint64_t tag = 0;                            ///< With the top bit: not met by receives of any tag.
  std::span<const std::byte> data;                  ///< Borrowed until the Work is done.
  std::optional<Duration> timeout = {};             ///< Else Config::timeout_s.
  std::optional<DataType> dtype = {};               ///< Where both sides say one, it must be the same.
  std::shared_ptr<const Composed> collective = {};  ///< That it belongs to: all of its messages have one tag.
};

struct Receive {
  GroupId group;
  std::optional<std::uint32_t> from;     ///< Rank in the group; none: any.
  std::optional<std::uint64_t> tag;      ///< None: any whose top bit is clear.
  std::span<std::byte> memory;           ///< As large as the message. Borrowed until the Work is done.
  std::optional<Duration> timeout = {};  ///< Else Config::timeout_s.
  std::optional<DataType> dtype = {};
  std::shared_ptr<const Composed> collective = {};
};

struct Received {
  std::uint32_t source = 0;  ///< Rank in the group.
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
};

class ReceiveWork : public Work {
 public:
  /// What came; meaningful when done and status() is Ok.
  virtual Received received() const = 0;
};

struct ServerCounters {  ///< What one server has moved so far, and what it may take.
  std::uint32_t server = 0;
  std::string place;  ///< "process 1 on node-b", "embedded in worker 0"
  std::uint64_t bytes_received = 0;
  std::uint64_t bytes_sent = 0;
  std::optional<std::uint64_t> messages;  ///< To and from it. Workers count them,
  std::optional<std::uint64_t> ops;       ///< and the server itself the operations that it took part in.
  std::uint64_t memory_bound_bytes = 0;   ///< For chunks and announces of all its lanes, at most.
  std::uint64_t record_bound_bytes = 0;   ///< For records of operations, unfinished and failed, at most.
};

/// All of 64 bits: one that is new is added up as well.
struct RuntimeCounters {
  std::uint64_t ops_completed = 0;
  std::uint64_t ops_failed = 0;
  std::uint64_t bytes_to_servers = 0;
  std::uint64_t bytes_from_servers = 0;
  std::uint64_t zero_copy_ops = 0;  ///< Whose memory was in the arena: no copy on this side.
  std::uint64_t staged_ops = 0;
  std::uint64_t messages_sent = 0;  ///< Point to point.
  std::uint64_t messages_received = 0;
  std::uint64_t message_bytes_sent = 0;
  std::uint64_t message_bytes_received = 0;
  std::uint64_t announces = 0;         ///< To servers: one for each part of an operation at each lane.
  std::uint64_t came_last = 0;         ///< Those that all others had been waiting for.
  std::uint64_t late_us = 0;           ///< How much later than the first they came, over all.
  std::uint64_t damaged_messages = 0;  ///< HERRING_CHECKSUM: arrived here with a wrong sum.
  std::uint64_t resent_messages = 0;   ///< Sent again from here because of that.
  std::uint64_t strangers = 0;         ///< Connections to this process's endpoints that were none of the job's.

  RuntimeCounters& operator+=(const RuntimeCounters& other) {
    using Counters = std::array<std::uint64_t, sizeof(RuntimeCounters) / sizeof(std::uint64_t)>;
    Counters sums = std::bit_cast<Counters>(*this);
    const Counters added = std::bit_cast<Counters>(other);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += added[i];
    return *this = std::bit_cast<RuntimeCounters>(sums);
  }
};

struct RuntimeStats : RuntimeCounters {
  /// By rank: contributions that operations of this rank went on without (backup workers). Empty: none.
  std::vector<std::uint64_t> dropped_contributions;
};

/// How late one worker is when it comes to the servers.
struct Straggler {
  std::uint32_t rank = 0;
  std::uint64_t announces = 0;
  double mean_late_s = 0;  ///< After the first one of the same operation.
  double last_share = 0;   ///< Of its announces those that came last, 0 to 1.
};

/// A worker's place in a job, and what it does there with the others. Safe from any thread.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t size() const = 0;
  virtual std::uint32_t local_rank() const = 0;  ///< Among the workers of this host, by rank.
  virtual std::uint32_t local_size() const = 0;
  /// Each worker's host, as hosts are numbered from 0 on; empty where the job may change.
  virtual std::vector<std::uint32_t> worker_hosts() const { return {}; }
  virtual std::uint32_t servers() const = 0;  ///< Servers in the shard plan; 0: everything goes through shared memory.
  /// "shared memory", "tcp (libfabric 2.5, eth0) via 4 embedded servers": for logs, doctor and benchmarks.
  virtual std::string description() const = 0;

  /// Makes a group of workers known (world ranks in group order); the id is chosen by the caller, the same on all of
  /// them. Group 0 exists. Throws kInvalidArgument where this rank is not in it or the id is taken.
  virtual void add_group(GroupId id, std::span<const std::uint32_t> ranks) = 0;
  /// This rank calls nothing more in the group: what others call there beyond that ends for them at once (kPeerLost).
  /// What is pending here goes on, but for receives that no message has met (kCancelled).
  virtual void leave_group([[maybe_unused]] GroupId id) {}
  /// Messages of the group that are pending here fail with kCancelled.
  virtual void remove_group(GroupId id) = 0;

  /// While the result lives this process may call something, whoever waits: see Work::block().
  virtual std::shared_ptr<void> will_call() { return nullptr; }
  /// As Work::block(), where what the thread waits for is one operation after the other: `ask` says which it is now.
  virtual std::shared_ptr<void> block([[maybe_unused]] std::function<Awaited()> ask, [[maybe_unused]] bool from_pool) {
    return nullptr;
  }
  /// All calls of the group are this one's, while it lives.
  virtual void set_background_caller([[maybe_unused]] GroupId id,
                                     [[maybe_unused]] std::weak_ptr<const BackgroundCaller> caller) {}
  /// Starts an operation; never blocks on other ranks. Bad arguments come back in the Work.
  virtual std::shared_ptr<Work> submit(const Request& request) = 0;
  /// submit() for a caller that waits at once: may move the data itself, for about as long as a waiting caller polls.
  /// Null where the operation is over, with how in `status`.
  virtual std::shared_ptr<Work> run(const Request& request, [[maybe_unused]] Status& status) { return submit(request); }

  /// Late memory is waited for in parts of so many bytes, as the group's operations are cut on all ranks. 0: this
  /// communicator, or this group, takes no late memory.
  virtual std::uint64_t late_part_bytes([[maybe_unused]] GroupId group) const { return 0; }
  /// Late memory has something new to say. From any thread.
  virtual void look_at_late_memory() {}

  /// Whether the network card can read and write a device's memory in all-reduces of this group.
  virtual DeviceMemoryUse device_memory([[maybe_unused]] GroupId group) const {
    return {Status(Code::kUnavailable, "the job is elastic: its ranks keep operations in host memory"), false};
  }
  /// Makes a device's memory known to the network cards until the result goes, and keeps `owner` as long. Slow. Throws
  /// Error where a card does not take it.
  virtual std::shared_ptr<void> register_device_memory([[maybe_unused]] std::span<std::byte> memory,
                                                       [[maybe_unused]] std::uint32_t device,
                                                       [[maybe_unused]] std::shared_ptr<void> owner) {
    throw Error(Code::kUnavailable, "this job takes no memory of devices");
  }

  /// The number in its group of a collective that is made of messages, counted with the operations that have no name.
  /// None where they are not counted together (elastic jobs).
  virtual std::optional<std::uint64_t> take_number([[maybe_unused]] GroupId group) { return std::nullopt; }
  /// Messages between two ranks; never block on the other. Bad arguments come back in the Work. A mismatch of sizes, a
  /// time-out and a lost rank are errors that name the rank, the bytes and the tag.
  virtual std::shared_ptr<Work> send(const Send& message) = 0;
  virtual std::shared_ptr<ReceiveWork> receive(const Receive& message) = 0;

  /// Memory of a tensor of this name that somebody above reduces, which is not an operation here yet: until the last
  /// copy of `lease` goes, calls that share bytes with it (but both only read) are refused. Not Ok: it shares some with
  /// a pending call.
  virtual Status lend([[maybe_unused]] std::string_view name, [[maybe_unused]] std::span<const std::byte> reads,
                      [[maybe_unused]] std::span<const std::byte> writes,
                      [[maybe_unused]] std::shared_ptr<void>& lease) {
    return Status::ok();
  }

  /// Memory that operations use without a copy (shared with the host's other ranks, registered with the network). Null
  /// where the arena is full or there is none. Freed when the last reference goes, also after shutdown.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;

  /// Fails everything pending with kCancelled and `reason`; later submits fail the same way.
  virtual void abort(const std::string& reason) = 0;
  /// The same for one group, whose other ranks get an error (kCancelled) that names this one; other groups go on. The
  /// id stays taken. Does not wait for what is pending to end. Group 0: abort().
  virtual void abort_group(GroupId id, const std::string& reason) = 0;
  /// Only what is pending here in the group, for this rank and for others that wait for it there. What others have
  /// pending beyond that goes on, and so does what is called later.
  virtual void give_up_pending(GroupId id, const std::string& reason) = 0;
  /// Finishes what is pending, but for receives that no message has met (kShutdown); says goodbye, stops all threads.
  /// Idempotent.
  virtual void shutdown() = 0;

  virtual RuntimeStats stats() const = 0;
  /// How late every worker is, the latest first: a collective over all workers. Counts since the start, of what went
  /// through servers. Throws Error.
  virtual std::vector<Straggler> stragglers() = 0;
  /// Of every server, asked over the hub... collective: every worker calls it.
  virtual std::vector<ServerCounters> server_counters() = 0;
};

}  // namespace herring::runtime
