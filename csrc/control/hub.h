#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "control/blobs.h"
#include "core/log.h"
#include "core/numa.h"
#include "core/status.h"
#include "core/types.h"

/// The control plane: worker 0's process runs the hub, every process keeps one TCP connection to it. It brings the job
/// together (authenticated), exchanges small blobs, and tells everybody at once when a process is lost. The data plane
/// does not go through it. docs/wire-control.md specifies the bytes.
namespace herring::control {

enum class Role : std::uint8_t { kWorker = 1, kServer = 2 };

struct Member {
  Role role = Role::kWorker;
  std::uint32_t rank = 0;  ///< Among the members of its role.
  std::uint32_t pid = 0;
  std::string host_identity;  ///< intra_node::host_identity(): equal means shared memory works.
  std::string host_name;      ///< For messages to people.
  /// What launched it calls its job, by variable: "SLURM_JOB_ID=12\n..." . Told where it joins, and not in rosters; may
  /// be empty.
  std::string launch = {};
  NumaNodes nodes = 0;  ///< Where it may run on its host.
  friend bool operator==(const Member&, const Member&) = default;
};
/// "worker 3 (pid 812 on node-b)"
std::string to_string(const Member& member);

struct HubOptions {
  std::string listen_host;           ///< Address to bind; empty: all.
  std::vector<std::uint16_t> ports;  ///< Candidates in order; the first free one is taken. Empty or {0}: any.
  std::uint32_t workers = 1;
  std::uint32_t servers = 0;
  std::string secret;        ///< HMAC key of the handshake; may be empty (documented: unauthenticated).
  std::uint64_t job_id = 0;  ///< Random; given to members when they join.
  Duration heartbeat = std::chrono::seconds(1);   ///< Between pings of a member; positive.
  Duration dead_after = std::chrono::seconds(5);  ///< Silence after which a member is lost; more than heartbeat.
  std::shared_ptr<Logger> logger;                 ///< Told of strangers, at a bounded rate. May be empty.

  /// Worker 0, where the hub is in its process: another process that comes as worker 0 is of another job, and so is a
  /// hub with the same secret at one of `ports`.
  std::optional<Member> lead;
  std::string meet_host;          ///< Where others look for `ports`, an address of this host; empty: listen_host.
  std::uint16_t master_port = 0;  ///< What `ports` were derived from; 0: from nothing. Told to everybody who asks.
  /// Where two processes come for one place, one of them is of another job, and it cannot be told whose the other
  /// members are. Within so long of the first join the job ends then; later the newcomer alone is refused. 0: always
  /// the newcomer alone.
  Duration doubt_for{};
  /// The job starts so long after the hub at the earliest: who looked for a hub before there was one has found it then,
  /// be it of this job or not.
  Duration start_delay{};
};

/// What a hub has seen so far. "Strangers" are connections that did not authenticate.
struct HubCounters {
  std::uint64_t accepted = 0;           ///< Connections.
  std::uint64_t bad_strangers = 0;      ///< Dropped for bytes that are not the handshake.
  std::uint64_t slow_strangers = 0;     ///< Dropped because the handshake took too long, or to make room.
  std::uint64_t failed_handshakes = 0;  ///< Ended after the challenge: most likely another secret.
  std::uint64_t joined = 0;
  std::uint64_t refused = 0;          ///< Another version, size or rank, or the job had started.
  std::uint64_t lost = 0;             ///< Members whose connection ended without a goodbye.
  std::uint64_t protocol_errors = 0;  ///< Members dropped for what they sent.
  std::uint64_t exchanges = 0;        ///< Completed.
  std::uint64_t bytes_sent = 0;       ///< To all, with headers.
};

/// Runs on its own thread from construction to destruction. Raises the process's soft limit of open files where the job
/// needs more. Destroyed in a forked child, it only closes the child's copies of its descriptors.
class Hub final {
 public:
  /// Throws Error where no port can be bound, naming them; kMismatch, naming the other job, where its hub is at one of
  /// the ports and has the same secret.
  explicit Hub(const HubOptions& options);
  /// Where the job has started: waits up to a second for the members to leave. Then tells those who remain (they see
  /// kHubLost: "worker 0 has finished") and stops.
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;
  std::uint16_t port() const;
  /// Any thread: this process, which has not joined, is lost. Who waits for it fails with that; after the start,
  /// nothing.
  void never_comes(Role role, std::uint32_t rank, const std::string& why);
  HubCounters counters() const;  ///< Any thread.

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

struct HubClientOptions {
  std::string host;
  std::vector<std::uint16_t> ports;  ///< Tried in turn until one answers as the hub of this job.
  std::string secret;
  Member self;
  std::uint32_t workers = 1;  ///< What this process believes; the hub refuses who disagrees, saying both numbers.
                              ///< 0, for servers only: it is told.
  std::uint32_t servers = 0;
  std::uint16_t master_port = 0;    ///< What `ports` were derived from; 0: from nothing.
  std::string holder = "worker 0";  ///< In whose process the hub is, for errors.
  std::function<bool()> is_over;    ///< Asked while joining: true where nobody waits for it any more. May be empty.
};

/// A group, and how many others had its id before: an id that is free again may be used again.
struct UsedGroup {
  GroupId id;
  std::uint32_t use = 0;
  friend bool operator==(const UsedGroup&, const UsedGroup&) = default;
};

/// What a member wants of an exchange.
enum class Wants : std::uint8_t {
  kNothing,  ///< To know that all have brought theirs.
  kBlobs,
};

/// Something that happened to the job, in the order in which the hub saw it.
struct HubEvent {
  enum class Kind : std::uint8_t {
    kLost,          ///< A member's connection broke, or it was silent for dead_after.
    kLeft,          ///< A member said goodbye.
    kFailed,        ///< A member reported a fatal error of its own: `reason`.
    kGroupAborted,  ///< A worker has given up `group`, and is still there.
    kFinished,      ///< A worker has done all that it will do, and waits for the others to say goodbye.
    kGroupLeft,     ///< A worker has called all that it will in `group`: so many calls without a name.
    kHubLost,       ///< The hub itself is gone (worker 0 died, or the network to it); nothing more will come.
  };
  Kind kind = Kind::kLost;
  Member member;
  std::string reason;               ///< For people: "connection closed", "silent for 5.0 s".
  std::string holder = "worker 0";  ///< kHubLost: in whose process the hub was.
  UsedGroup group = {};             ///< kGroupAborted, kGroupLeft.
  std::uint64_t calls = 0;          ///< kGroupLeft.
};
/// "worker 3 (pid 812 on node-b) is lost: silent for 5.0 s"
std::string to_string(const HubEvent& event);

/// One member's connection. Has a thread that answers heartbeats, so a busy (GIL-bound, computing) process counts as
/// alive and a stopped or cut-off one does not. Calls are safe from any thread.
class HubClient final {
 public:
  /// Connects, authenticates both ways, and waits until all workers and servers have joined. Keeps trying until the
  /// deadline; then throws Error(kTimeout) naming who is missing (by role and rank) or, where no hub answered, where it
  /// looked. Throws kMismatch for a refused join (another size, a rank taken, another job, version or features),
  /// kInvalidArgument for a wrong secret: after 2 s where the hub can only be that of this job (the only port, or one
  /// derived from the same MASTER_PORT that still waits for members), else at the deadline.
  HubClient(const HubClientOptions& options, Instant deadline);
  /// Says goodbye where leave() was not called. In a forked child it only closes the child's copies.
  ~HubClient();
  HubClient(const HubClient&) = delete;
  HubClient& operator=(const HubClient&) = delete;

  std::uint64_t job_id() const;
  std::uint32_t worker_count() const;
  std::uint32_t server_count() const;
  /// Workers by rank, then servers.
  Member member(std::size_t index) const;
  std::vector<Member> workers() const;  ///< By rank; put together for each call.
  std::vector<Member> servers() const;  ///< The same.

  /// All-gather of one blob (at most 1 MiB) per member under a name; returns workers' blobs by rank, then servers'
  /// (none where it wants nothing: worker 0's process then sends none). Blocks; throws Error(kTimeout) naming who has
  /// not brought theirs (half a second after the deadline at most), kPeerLost where one of them is gone, kShutdown
  /// after leave(). Any number of names at once, from any threads. A name that all have gathered may be used again, as
  /// a new round; one that is under way or has timed out in this process may not (kInvalidArgument).
  std::vector<std::vector<std::byte>> exchange(const std::string& name, std::span<const std::byte> blob,
                                               Instant deadline, Wants wants = Wants::kBlobs) {
    return gather(name, blob, deadline, wants).apart();
  }
  /// The same, for many members.
  Blobs gather(const std::string& name, std::span<const std::byte> blob, Instant deadline, Wants wants = Wants::kBlobs);

  /// Becomes readable when next_event() has something.
  int event_fd() const;
  bool next_event(HubEvent& event);

  /// Tells everybody that this member cannot go on: they see kFailed, and so does this process, whose other threads may
  /// not know.
  void report_failure(const std::string& reason);
  /// Tells everybody that this worker has given up a group (they see kGroupAborted). Not group 0.
  void report_group_abort(const UsedGroup& group, const std::string& reason);
  /// Tells everybody that this worker calls nothing more in a group (they see kGroupLeft). Not group 0.
  void report_group_left(const UsedGroup& group, std::uint64_t calls);
  /// These members (index: workers by rank, then servers) did not answer on the data plane for `silent`; of `of` that
  /// were looked at, `answering` are heard. The hub decides who is lost: docs/wire-control.md, "Links".
  void report_unreachable(std::span<const std::uint32_t> indices, std::uint32_t of, std::uint32_t answering,
                          Duration silent);
  /// Orderly goodbye: others see kLeft. The connection ends, within a second. Idempotent. No events come after it.
  void leave();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::control
