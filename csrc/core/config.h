#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace herring {

enum class Switch : std::uint8_t { kAuto, kOn, kOff };
enum class Toggle : std::uint8_t { kOff, kOn };
enum class LogLevel : std::uint8_t { kError, kWarning, kInfo, kDebug };

/// Everything that can be set, typed, with its default. Read once by read_config(); passed to what needs it; never
/// changed afterwards. csrc/core/config.cc is the only reader of HERRING_*; docs/configuration.md is generated from it.
struct Config {
  std::uint32_t servers = 0;  ///< HERRING_SERVERS: server processes to wait for; 0: servers embedded in workers.
  std::uint32_t lanes = 1;    ///< HERRING_LANES: lanes (threads) of each server.
  std::uint64_t part_bytes = 25 << 20;    ///< HERRING_PART_BYTES: larger operations cross the network in parts of this.
  std::uint32_t chunk_bytes = 128 << 10;  ///< HERRING_CHUNK_BYTES: largest unit on the wire.
  std::uint32_t window = 4;               ///< HERRING_WINDOW: chunks of one worker in flight to all lanes.
  std::uint32_t eager_bytes = 64 << 10;   ///< HERRING_EAGER_BYTES: shards up to this travel inside the announce.
  /// The same where three hosts and more have all servers inside their workers; differs only where nobody set it.
  std::uint32_t embedded_eager_bytes = 128 << 10;
  std::uint32_t one_hop_hosts = 2;  ///< HERRING_ONE_HOP_HOSTS: so many hosts send small data to each other directly.
  std::uint64_t one_hop_bytes = 1 << 20;       ///< HERRING_ONE_HOP_BYTES: up to which size two hosts do.
  std::uint64_t local_part_bytes = 512 << 10;  ///< HERRING_LOCAL_PART_BYTES: unit of the shared-memory path.
  std::uint64_t fusion_bytes = 16 << 20;       ///< HERRING_FUSION_BYTES: buckets of small tensors by name; 0: none.
  std::uint32_t fusion_cycle_ms = 1;           ///< HERRING_FUSION_CYCLE_MS: how long a small tensor waits for others.
  std::uint64_t arena_bytes = 0;      ///< HERRING_ARENA_BYTES: address space for shared buckets; 0: half of the memory.
  Switch intra_node = Switch::kAuto;  ///< HERRING_INTRA_NODE: reduce through shared memory inside a host.
  Switch failover = Switch::kAuto;    ///< HERRING_FAILOVER: a lost server's work moves to the others.
  Toggle checksum = Toggle::kOff;     ///< HERRING_CHECKSUM: what crosses the network carries CRC32C and is sent again.
  Toggle check_finite = Toggle::kOff;      ///< HERRING_CHECK_FINITE: NaN and infinity fail the operation.
  std::uint32_t backup_workers = 0;        ///< HERRING_BACKUP_WORKERS: contributions that need not be waited for.
  double backup_grace_s = 0.005;           ///< HERRING_BACKUP_GRACE_S: how long they are, once the others are there.
  std::uint64_t backup_bytes = 256 << 20;  ///< HERRING_BACKUP_BYTES: results that a lane keeps for who is late.
  double timeout_s = 600;                  ///< HERRING_TIMEOUT_S: default deadline of an operation.
  double join_timeout_s = 120;             ///< HERRING_JOIN_TIMEOUT_S: how long to wait for all processes at start.
  double heartbeat_s = 1;                  ///< HERRING_HEARTBEAT_S
  double dead_after_s = 5;                 ///< HERRING_DEAD_AFTER_S: silence after which a process counts as lost.
  Switch lane_threads = Switch::kAuto;     ///< HERRING_LANE_THREADS: a thread for each lane inside a worker.
  double deadlock_after_s = 5;             ///< HERRING_DEADLOCK_AFTER_S: ranks that wait for each other; 0: never.
  double stall_warning_s = 60;             ///< HERRING_STALL_WARNING_S: ranks that have not called it; 0: no warning.
  Switch cuda = Switch::kAuto;             ///< HERRING_CUDA: tensors on GPUs.
  std::string on_host = "host";            ///< HERRING_ON_HOST: where ranks of a host sum tensors of GPUs.
  std::string nccl;                        ///< HERRING_NCCL: path of its library; empty: search for it.
  std::uint64_t device_memory_bytes = 64 << 20;  ///< HERRING_DEVICE_MEMORY_BYTES: of a GPU, for the others to read.
  std::uint32_t device_blocks = 8;               ///< HERRING_DEVICE_BLOCKS: of threads, for a sum on a GPU.
  Switch gpudirect = Switch::kOff;               ///< HERRING_GPUDIRECT: the network card reads and writes GPU memory.
  Switch tensorflow_stream = Switch::kOff;  ///< HERRING_TENSORFLOW_STREAM: Herring copies TensorFlow's GPU tensors.
  std::uint32_t spin_us = 20;               ///< HERRING_SPIN_US: polling before blocking.
  std::string tcp_congestion = "auto";      ///< HERRING_TCP_CONGESTION: of the builtin transport's connections.
  std::uint32_t slice_us = 100;             ///< HERRING_SLICE_US: ShortTurns of threads that move data.
  std::string libfabric;                    ///< HERRING_LIBFABRIC: path of libfabric.so; empty: search.
  std::string provider = "auto";            ///< HERRING_PROVIDER: auto, efa, verbs, tcp, builtin.
  std::string interface;          ///< HERRING_INTERFACE: network interfaces or addresses, with commas; empty: choose.
  std::string simd = "auto";      ///< HERRING_SIMD: auto, avx512, avx2, neon, scalar.
  std::string secret;             ///< HERRING_SECRET: authenticates the job's processes to each other.
  std::string hub;                ///< HERRING_HUB: host:port where worker 0's hub listens; empty: through the launcher.
  Toggle elastic = Toggle::kOff;  ///< HERRING_ELASTIC: a worker's death does not end the job.
  std::string rendezvous;         ///< HERRING_RENDEZVOUS: host:port of the launcher's rendezvous.
  std::uint64_t journal_bytes = 256 << 20;  ///< HERRING_JOURNAL_BYTES: results kept for others in elastic jobs.
  LogLevel log_level = LogLevel::kWarning;  ///< HERRING_LOG: error, warning, info, debug.
};

/// One row of the table that reads, checks, logs and documents the settings.
struct ConfigRow {
  std::string_view name;     ///< "HERRING_CHUNK_BYTES"
  std::string_view type;     ///< "bytes", "count", "seconds", "choice", "text"
  std::string default_text;  ///< As it could be written: "128KB". Empty: nothing set.
  std::string range;         ///< What is accepted, for people: "64 to 64MB, a multiple of 64".
  std::string_view help;
};

/// A value and where it came from: "default", "environment", "argument", or "adjusted" (it followed from another
/// value).
struct ConfigOrigin {
  std::string_view name;
  std::string value;  ///< A secret is shown as "(set)".
  std::string_view source;
};

struct ConfigResult {
  Config config;
  std::vector<ConfigOrigin> origins;  ///< In table order.
  std::vector<std::string>
      ignored;  ///< Names of variables that Kubernetes sets (core/service_link.h): worth a warning.
};

/// "HERRING_LANES=2 (environment)": one line for the log.
std::string to_string(const ConfigOrigin& origin);

/// Environment as name=value pairs; entries that do not start with HERRING_ are skipped, and so are those that start
/// with HERRING_TEST_, which belong to the test programs. Overrides (API arguments, same names) win over it. Byte sizes
/// take suffixes: 64KB = 64KiB = 65536, MB, GB. Throws Error(kInvalidArgument) with a line for everything that is
/// wrong, each naming the variable, its value, and what is accepted; also for an unknown HERRING_* (suggesting the
/// nearest name), except those that Kubernetes sets by itself for a service of that name.
ConfigResult read_config(std::span<const std::pair<std::string, std::string>> environment,
                         std::span<const std::pair<std::string, std::string>> overrides = {});
/// This process's environment.
std::vector<std::pair<std::string, std::string>> process_environment();

std::vector<ConfigRow> config_table();

/// Config::arena_bytes, or where that is 0 half of the memory that this process may use (core/memory.h).
std::uint64_t resolve_arena_bytes(const Config& config);

}  // namespace herring
