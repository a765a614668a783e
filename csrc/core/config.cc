#include "core/config.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <variant>

#include "core/config_value.h"
#include "core/memory.h"
#include "core/service_link.h"
#include "core/status.h"

namespace herring {
namespace {

constexpr std::string_view kPrefix = "HERRING_";
constexpr std::string_view kTestPrefix = "HERRING_TEST_";

constexpr std::string_view kFromDefault = "default";
constexpr std::string_view kFromEnvironment = "environment";
constexpr std::string_view kFromArgument = "argument";
constexpr std::string_view kFromAdjustment = "adjusted";

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;
constexpr std::uint64_t kTiB = 1024 * 1024 * kMiB;
constexpr std::uint64_t kWireAlignment = 64;

constexpr std::array<std::string_view, 3> kSwitchChoices = {"auto", "on", "off"};
constexpr std::array<std::string_view, 2> kToggleChoices = {"off", "on"};
constexpr std::array<std::string_view, 4> kLogChoices = {"error", "warning", "info", "debug"};
constexpr std::array<std::string_view, 4> kOnHostChoices = {"host", "device", "auto", "nccl"};
constexpr std::array<std::string_view, 5> kProviderChoices = {"auto", "efa", "verbs", "tcp", "builtin"};
constexpr std::array<std::string_view, 5> kSimdChoices = {"auto", "avx512", "avx2", "neon", "scalar"};

enum class Type : std::uint8_t { kBytes, kCount, kMicroseconds, kSeconds, kChoice, kText, kHostPort, kSecret };

using Field = std::variant<std::uint32_t Config::*, std::uint64_t Config::*, double Config::*, std::string Config::*,
                           Switch Config::*, Toggle Config::*, LogLevel Config::*>;

/// One setting: all that reading, checking, logging and documenting it need. Limits are inclusive and in the field's
/// unit; `zero` says what 0 means where it is taken though it lies below `low`.
struct Setting {
  std::string_view name;
  Type type;
  Field field;
  std::string_view help;
  double low = 0;
  double high = 0;
  std::uint64_t multiple = 1;
  std::string_view zero = {};
  std::span<const std::string_view> choices = {};
};

constexpr Setting choice(std::string_view name, Field field, std::span<const std::string_view> choices,
                         std::string_view help) {
  return {name, Type::kChoice, field, help, 0, 0, 1, {}, choices};
}

constexpr double kMaxSeconds = 4'000'000;  // Milliseconds of it fit the 32 bits that they have on the wire.

constexpr auto kSettings = std::to_array<Setting>({
    {"HERRING_SERVERS", Type::kCount, &Config::servers,
     "Server processes that the job waits for. 0: servers are embedded in the workers.", 0, 4096},
    {"HERRING_LANES", Type::kCount, &Config::lanes, "Lanes (threads) of each server.", 1, 64},
    {"HERRING_PART_BYTES", Type::kBytes, &Config::part_bytes,
     "Operations larger than this cross the network in parts of this size.", kWireAlignment, kTiB, kWireAlignment},
    {"HERRING_CHUNK_BYTES", Type::kBytes, &Config::chunk_bytes,
     "Data is sent, summed and returned in chunks of this size, several at the same time. With many lanes chunks are "
     "smaller, down to 32KB; on fast links one message carries up to 8 of them. At most HERRING_PART_BYTES. With "
     "HERRING_PROVIDER=efa the default is 1MB.",
     kWireAlignment, 64 * kMiB, kWireAlignment},
    {"HERRING_WINDOW", Type::kCount, &Config::window,
     "How much data of one worker is on its way to all lanes together at first, in units of HERRING_CHUNK_BYTES. On "
     "fast links it grows to six times as much, with more than two lanes to twelve times. It becomes less where data "
     "only waits in the network's queues: if operations come one by one.",
     1, 1024},
    {"HERRING_EAGER_BYTES", Type::kBytes, &Config::eager_bytes,
     "Shards up to this size are sent together with the first message; with many workers only smaller ones, down to "
     "16KB. At most HERRING_CHUNK_BYTES. On three hosts and more without server processes the default is 128KB.",
     0, 1 * kMiB},
    {"HERRING_ONE_HOP_HOSTS", Type::kCount, &Config::one_hop_hosts,
     "In a job of up to so many hosts, without server processes, each host sends small data to all others: one hop "
     "instead of two. Small is at most HERRING_ONE_HOP_BYTES with 2 hosts, 6KB with 3, 2.6KB with 4, less with more. "
     "0: never.",
     0, 64},
    {"HERRING_ONE_HOP_BYTES", Type::kBytes, &Config::one_hop_bytes,
     "Up to this size operations of two hosts go in one hop (HERRING_ONE_HOP_HOSTS). Both hosts then compute the whole "
     "sum. Less than HERRING_EAGER_BYTES counts as that.",
     0, 64 * kMiB},
    {"HERRING_LOCAL_PART_BYTES", Type::kBytes, &Config::local_part_bytes,
     "Ranks of one host exchange data in parts of this size. At most half of HERRING_ARENA_BYTES.", 4 * kKiB,
     1024 * kMiB, kWireAlignment},
    {"HERRING_FUSION_BYTES", Type::kBytes, &Config::fusion_bytes,
     "Small tensors that are reduced by name are sent together, in buckets of at most this size; so are the gradients "
     "of Horovod's DistributedOptimizer. Rank 0's value counts. 0: each tensor is sent alone.",
     0, 1024 * kMiB},
    {"HERRING_FUSION_CYCLE_MS", Type::kCount, &Config::fusion_cycle_ms,
     "How many milliseconds a small tensor waits for others to be sent with it, unless the caller waits for it.", 0,
     10'000},
    {"HERRING_ARENA_BYTES", Type::kBytes, &Config::arena_bytes,
     "Address space for shared buckets; memory is taken only when used.", 1 * kMiB, 256 * kTiB, 1,
     "half of the memory that this process may use"},
    choice("HERRING_INTRA_NODE", &Config::intra_node, kSwitchChoices,
           "Whether ranks of one host reduce through shared memory before the network."),
    choice(
        "HERRING_FAILOVER", &Config::failover, kSwitchChoices,
        "Whether other servers take over the work of a lost server process. auto: if there are at least two servers. "
        "on: as auto, and an error if there are fewer."),
    choice("HERRING_CHECKSUM", &Config::checksum, kToggleChoices,
           "Whether all data on the network carries CRC32C checksums. Damaged data is counted, logged and sent again; "
           "after 8 damaged arrivals the operation fails."),
    choice(
        "HERRING_CHECK_FINITE", &Config::check_finite, kToggleChoices,
        "Whether NaN or infinity in the input of a reduction is an error on all ranks. The error names the ranks that "
        "have it, and where."),
    {"HERRING_BACKUP_WORKERS", Type::kCount, &Config::backup_workers,
     "How many of the slowest workers a reduction does not wait for (with backup=True, and in Herring's DDP). Less "
     "than "
     "the number of workers. 0: off. Not in elastic jobs; turns HERRING_FAILOVER=auto off.",
     0, 1'000'000},
    {"HERRING_BACKUP_GRACE_S", Type::kSeconds, &Config::backup_grace_s,
     "Backup workers: how long to wait for the last ones when the others are there. A rank that is still behind in an "
     "earlier operation is not waited for.",
     0, 3600},
    {"HERRING_BACKUP_BYTES", Type::kBytes, &Config::backup_bytes,
     "Backup workers: the most that each server lane keeps of results for late ranks. When it is full, operations wait "
     "for these ranks.",
     0, kTiB},
    {"HERRING_TIMEOUT_S", Type::kSeconds, &Config::timeout_s,
     "Time limit of an operation. When it has passed, the error names the ranks that are missing.", 0.001, kMaxSeconds},
    {"HERRING_JOIN_TIMEOUT_S", Type::kSeconds, &Config::join_timeout_s,
     "How long to wait for all processes of the job at start.", 0.001, kMaxSeconds},
    {"HERRING_HEARTBEAT_S", Type::kSeconds, &Config::heartbeat_s,
     "Time between two heartbeats of a process. Less than HERRING_DEAD_AFTER_S. Longer in jobs of more than 5,000 "
     "processes, up to a third of HERRING_DEAD_AFTER_S.",
     0.001, 3600},
    {"HERRING_DEAD_AFTER_S", Type::kSeconds, &Config::dead_after_s,
     "A process that sends no heartbeat for this long counts as lost. More than HERRING_HEARTBEAT_S.", 0.005, 86'400},
    {"HERRING_DEADLOCK_AFTER_S", Type::kSeconds, &Config::deadlock_after_s,
     "When ranks have waited for each other for this long, each for an operation that another one has not called, the "
     "job ends with an error that names them. 0: only HERRING_TIMEOUT_S ends it.",
     0, 86'400},
    {"HERRING_STALL_WARNING_S", Type::kSeconds, &Config::stall_warning_s,
     "When a collective operation (not gather or scatter) has waited for this long, a warning names the ranks that it "
     "waits for. Each process "
     "writes at most one in that time. 0: no warning.",
     0, kMaxSeconds},
    {"HERRING_SPIN_US", Type::kMicroseconds, &Config::spin_us,
     "How long a thread polls before it sleeps; ten times as long if a caller waits. 0: sleep at once.", 0, 1'000'000},
    {"HERRING_SLICE_US", Type::kMicroseconds, &Config::slice_us,
     "The time slice of threads that move data, if other programs want their cores: Linux runs threads with short time "
     "slices sooner. Needs Linux 6.12 or later. Less than 100 counts as 100. 0: the system's time slice.",
     0, 100'000},
    {"HERRING_TCP_CONGESTION", Type::kText, &Config::tcp_congestion,
     "TCP's congestion control, on connections without libfabric. auto: the system's, but cubic or reno instead of "
     "BBR, which shares a link less evenly among many connections. system: the system's. Or a name that "
     "/proc/sys/net/ipv4/tcp_allowed_congestion_control has."},
    {"HERRING_LIBFABRIC", Type::kText, &Config::libfabric, "Path of libfabric.so. Empty: search for it."},
    choice(
        "HERRING_LANE_THREADS", &Config::lane_threads, kSwitchChoices,
        "Whether server lanes inside a worker have threads of their own. auto: if this process has four processor "
        "cores or more for each worker of its host; else the thread that moves the worker's data runs its lanes too."),
    choice(
        "HERRING_CUDA", &Config::cuda, kSwitchChoices,
        "Whether the torch backend takes tensors on GPUs. auto: yes. on: as auto, and an error at start if the driver "
        "or the GPUs cannot be used. off: such tensors are refused, and herring doctor does not ask the driver."),
    choice(
        "HERRING_ON_HOST", &Config::on_host, kOnHostChoices,
        "Where the torch backend's all_reduce sums tensors of GPUs that ranks of one host have. host: on the "
        "processors. device: on the GPUs, each reading the others' memory; an error if they cannot. auto: on the GPUs "
        "if they can and HERRING_CHECK_FINITE is off, else on the processors. nccl: on the GPUs, by NCCL; an error if "
        "it cannot. NCCL adds in an order of its own, so with more than two ranks on a host the last bits are not "
        "those of the others. device, auto and nccl have not been tried on several GPUs."),
    {"HERRING_DEVICE_MEMORY_BYTES", Type::kBytes, &Config::device_memory_bytes,
     "HERRING_ON_HOST=device, auto, nccl: how much memory of its GPU each rank uses for sums, for each process group.",
     1 * kMiB, 64 * 1024 * kMiB, 1 * kMiB},
    {"HERRING_DEVICE_BLOCKS", Type::kCount, &Config::device_blocks,
     "HERRING_ON_HOST=device, auto, nccl: how many of the GPU's multiprocessors a sum uses at most.", 1, 1024},
    {"HERRING_NCCL", Type::kText, &Config::nccl,
     "With HERRING_ON_HOST=nccl: path of libnccl.so.2. Empty: the one that torch uses, else search for it."},
    choice(
        "HERRING_GPUDIRECT", &Config::gpudirect, kSwitchChoices,
        "Whether the network card reads and writes GPU memory itself (GPUDirect RDMA) in the torch backend's "
        "all_reduce, where all servers are processes on other hosts. off: data goes through host memory. on: an error "
        "if it cannot. auto: as on if it can, else as off, with a line that says why. on and auto have never run on "
        "real hardware."),
    choice(
        "HERRING_TENSORFLOW_STREAM", &Config::tensorflow_stream, kSwitchChoices,
        "Who copies TensorFlow's tensors on GPUs to the host for all-reduce and broadcast. off: TensorFlow. on: "
        "Herring, "
        "on streams of its own; an error if it cannot. auto: as on if it can, else as off, with a line that says why. "
        "on and auto have never run on a GPU."),
    choice(
        "HERRING_PROVIDER", &Config::provider, kProviderChoices,
        "What carries data between hosts: libfabric's efa, verbs or tcp, or builtin, TCP without libfabric. auto: the "
        "best one present."),
    {"HERRING_INTERFACE", Type::kText, &Config::interface,
     "Network interface, or an address of it, to bind to. Several, with commas: the ranks of a host, and the lanes "
     "of a server, take them in turns. Empty: choose; several EFA devices are shared out evenly, to processes of the "
     "same NUMA node first."},
    choice("HERRING_SIMD", &Config::simd, kSimdChoices,
           "Processor instructions for sums. auto: the best that the processor has."),
    {"HERRING_SECRET", Type::kSecret, &Config::secret,
     "The job's secret, the same on all of its processes. Keeps other processes out of the job. Never shown."},
    {"HERRING_HUB", Type::kHostPort, &Config::hub,
     "Where worker 0 listens for the other processes. Empty: as the launcher says."},
    choice("HERRING_ELASTIC", &Config::elastic, kToggleChoices,
           "Whether the job goes on when a worker dies, and new workers can join. Needs HERRING_RENDEZVOUS."),
    {"HERRING_RENDEZVOUS", Type::kHostPort, &Config::rendezvous,
     "Where the launcher's rendezvous listens (herringrun sets it; by hand: herring rendezvous). Empty: none."},
    {"HERRING_JOURNAL_BYTES", Type::kBytes, &Config::journal_bytes,
     "Elastic jobs: the most that is kept of results until every worker has them. When it is full, operations wait.",
     1 * kMiB, kTiB},
    choice("HERRING_LOG", &Config::log_level, kLogChoices, "What is logged to stderr."),
});
using Sources = std::array<std::string_view, kSettings.size()>;

std::string_view type_text(Type type) {
  switch (type) {
    case Type::kBytes:
      return "bytes";
    case Type::kCount:
      return "count";
    case Type::kMicroseconds:
      return "microseconds";
    case Type::kSeconds:
      return "seconds";
    case Type::kChoice:
      return "choice";
    case Type::kText:
    case Type::kHostPort:
    case Type::kSecret:
      return "text";
  }
  return "unknown";
}

std::string number_text(Type type, double value) {
  if (type == Type::kSeconds) return seconds_text(value);
  const auto whole = static_cast<std::uint64_t>(value);
  return type == Type::kBytes ? bytes_text(whole) : std::to_string(whole);
}

std::string range_text(const Setting& setting) {
  switch (setting.type) {
    case Type::kChoice:
      return choices_text(setting.choices);
    case Type::kText:
    case Type::kSecret:
      return "any text";
    case Type::kHostPort:
      return "host:port with a port of 1 to 65535, an IPv6 host in brackets";
    case Type::kBytes:
    case Type::kCount:
    case Type::kMicroseconds:
    case Type::kSeconds:
      break;
  }
  std::string text;
  if (!setting.zero.empty()) text += "0 (" + std::string(setting.zero) + ") or ";
  text += number_text(setting.type, setting.low) + " to " + number_text(setting.type, setting.high);
  if (setting.type == Type::kSeconds) text += " seconds";
  if (setting.type == Type::kMicroseconds) text += " microseconds";
  if (setting.type == Type::kCount) text = "a whole number, " + text;
  if (setting.type == Type::kBytes) {
    if (setting.multiple > 1) text += ", a multiple of " + std::to_string(setting.multiple);
    text += " (bytes, or with KB, MB or GB)";
  }
  return text;
}

std::string value_text(const Setting& setting, const Config& config) {
  if (setting.type == Type::kSecret) return config.secret.empty() ? "" : "(set)";
  const auto text = [&](auto field) -> std::string {
    const auto& value = config.*field;
    using Value = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, std::string>) {
      return value;
    } else if constexpr (std::is_enum_v<Value>) {
      return std::string(setting.choices[static_cast<std::size_t>(value)]);
    } else if constexpr (std::is_floating_point_v<Value>) {
      return seconds_text(value);
    } else {
      return setting.type == Type::kBytes ? bytes_text(value) : std::to_string(value);
    }
  };
  return std::visit(text, setting.field);
}

bool is_host_port(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::string_view host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (!bracketed && host.find_first_of(":[] /") != std::string_view::npos) return false;
  const auto port = parse_count(text.substr(colon + 1));
  return port && *port >= 1 && *port <= std::numeric_limits<std::uint16_t>::max();
}

template <class Integer>
bool assign_integer(const Setting& setting, std::string_view text, Integer& value) {
  const auto read = setting.type == Type::kBytes ? parse_bytes(text) : parse_count(text);
  if (!read) return false;
  const bool in_range = static_cast<double>(*read) >= setting.low && static_cast<double>(*read) <= setting.high &&
                        *read % setting.multiple == 0 && *read <= std::numeric_limits<Integer>::max();
  const bool is_special = *read == 0 && !setting.zero.empty();
  if (!in_range && !is_special) return false;
  value = static_cast<Integer>(*read);
  return true;
}

bool assign_text(const Setting& setting, std::string_view text, std::string& value) {
  if (setting.type == Type::kChoice) {
    const auto choice = parse_choice(text, setting.choices);
    if (!choice) return false;
    text = setting.choices[*choice];
  }
  if (setting.type == Type::kHostPort && !text.empty() && !is_host_port(text)) return false;
  value = text;
  return true;
}

/// Puts `text` into the setting's field; false, and nothing done, where it is not what the setting takes.
bool assign(const Setting& setting, std::string_view text, Config& config) {
  const auto into = [&](auto field) {
    auto& value = config.*field;
    using Value = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, std::string>) {
      return assign_text(setting, text, value);
    } else if constexpr (std::is_enum_v<Value>) {
      const auto choice = parse_choice(text, setting.choices);
      if (choice) value = static_cast<Value>(*choice);
      return choice.has_value();
    } else if constexpr (std::is_floating_point_v<Value>) {
      const auto read = parse_seconds(text);
      if (!read || *read < setting.low || *read > setting.high) return false;
      value = *read;
      return true;
    } else {
      return assign_integer(setting, text, value);
    }
  };
  return std::visit(into, setting.field);
}

/// What somebody wrote, short enough for an error message.
std::string quoted(std::string_view text) {
  constexpr std::size_t kLongest = 80;
  std::string out = "'";
  out += text.substr(0, kLongest);
  out += text.size() > kLongest ? "...'" : "'";
  return out;
}

std::string unknown_text(std::string_view name, std::string_view source) {
  std::array<std::string_view, kSettings.size()> known;
  std::transform(kSettings.begin(), kSettings.end(), known.begin(),
                 [](const Setting& setting) { return setting.name.substr(kPrefix.size()); });
  std::string text = quoted(name) + " (" + std::string(source) + ") is not a setting of Herring";
  // Not the value: it may be a secret under a mistyped name.
  const std::string_view bare = name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : name;
  const std::string_view nearest = nearest_name(bare, known);
  if (!nearest.empty()) return text + "; did you mean " + std::string(kPrefix) + std::string(nearest) + "?";
  text += "; the settings are, with " + std::string(kPrefix) + " in front:";
  for (const std::string_view each : known) text += (each == known.front() ? " " : ", ") + std::string(each);
  return text;
}

/// Collects values and everything that is wrong with them.
class Builder {
 public:
  Builder() { sources_.fill(kFromDefault); }

  void set(std::string_view name, std::string_view value, std::string_view source) {
    const auto setting =
        std::find_if(kSettings.begin(), kSettings.end(), [&](const Setting& s) { return s.name == name; });
    if (setting == kSettings.end() && source == kFromEnvironment && is_service_link(name, value)) {
      ignored_.emplace_back(name);
      return;
    }
    if (setting == kSettings.end()) {
      problems_.push_back(unknown_text(name, source));
      return;
    }
    std::string_view& known_source = sources_[static_cast<std::size_t>(setting - kSettings.begin())];
    // A variable that is in the environment twice: the first counts, as it does for getenv().
    if (source == kFromEnvironment && known_source == kFromEnvironment) return;
    if (!assign(*setting, value, config_)) {
      problems_.push_back(std::string(name) + " is " + quoted(value) + " (" + std::string(source) + "); it takes " +
                          range_text(*setting));
      return;
    }
    known_source = source;
  }

  /// Values that must fit each other. One that nobody set follows the one that somebody did.
  void reconcile() {
    Config& c = config_;
    // Eight chunks of a job with eight servers are a message that EFA's receiver reads from the sender's memory.
    constexpr std::uint32_t kEfaChunkBytes = 1 * kMiB;
    if (c.provider == "efa" && may_adjust(&Config::chunk_bytes)) c.chunk_bytes = kEfaChunkBytes;
    if (c.chunk_bytes > c.part_bytes && may_adjust(&Config::chunk_bytes)) {
      c.chunk_bytes = static_cast<std::uint32_t>(c.part_bytes);
    }
    require(c.chunk_bytes <= c.part_bytes, &Config::chunk_bytes, "at most", &Config::part_bytes);

    if (c.eager_bytes > c.chunk_bytes && may_adjust(&Config::eager_bytes)) c.eager_bytes = c.chunk_bytes;
    require(c.eager_bytes <= c.chunk_bytes, &Config::eager_bytes, "at most", &Config::chunk_bytes);
    c.embedded_eager_bytes =
        is_unset(&Config::eager_bytes) ? std::min(c.embedded_eager_bytes, c.chunk_bytes) : c.eager_bytes;

    if (c.dead_after_s <= c.heartbeat_s) {
      constexpr double kBeats = 5;  // Heartbeats that may be lost before a process is given up.
      if (may_adjust(&Config::heartbeat_s)) {
        c.heartbeat_s = c.dead_after_s / kBeats;
      } else if (may_adjust(&Config::dead_after_s)) {
        c.dead_after_s = c.heartbeat_s * kBeats;
      }
    }
    require(c.dead_after_s > c.heartbeat_s, &Config::dead_after_s, "more than", &Config::heartbeat_s);

    if ((c.on_host == "device" || c.on_host == "nccl") && c.check_finite == Toggle::kOn) {
      problems_.push_back(described(&Config::on_host) + " does not go together with " +
                          described(&Config::check_finite) + ": sums on GPUs are not checked");
    }
    if (c.backup_workers > 0) {
      const auto excludes = [&](bool is_set, Field field) {
        if (!is_set) return;
        problems_.push_back(described(field) + " does not go together with " + described(&Config::backup_workers) +
                            ": backup workers are for slow workers, not for lost ones");
      };
      excludes(c.failover == Switch::kOn, &Config::failover);
      excludes(c.elastic == Toggle::kOn, &Config::elastic);
      excludes(!c.rendezvous.empty(), &Config::rendezvous);
    }

    if (c.arena_bytes == 0) return;
    const std::uint64_t half = c.arena_bytes / 2 / kWireAlignment * kWireAlignment;
    require(c.local_part_bytes <= half, &Config::local_part_bytes, "at most half of", &Config::arena_bytes);
  }

  ConfigResult finish() {
    if (problems_.empty()) reconcile();
    if (!problems_.empty()) {
      std::string text;
      for (const std::string& problem : problems_) text += (text.empty() ? "" : "\n") + problem;
      throw Error(Code::kInvalidArgument, text);
    }
    ConfigResult result;
    result.config = config_;
    result.ignored = ignored_;
    for (std::size_t i = 0; i < kSettings.size(); ++i) {
      result.origins.push_back({kSettings[i].name, value_text(kSettings[i], config_), sources_[i]});
    }
    return result;
  }

 private:
  static std::size_t index_of(Field field) {
    const auto setting =
        std::find_if(kSettings.begin(), kSettings.end(), [&](const Setting& s) { return s.field == field; });
    return static_cast<std::size_t>(setting - kSettings.begin());
  }

  bool is_unset(Field field) const {
    const std::string_view source = sources_[index_of(field)];
    return source == kFromDefault || source == kFromAdjustment;
  }

  bool may_adjust(Field field) {
    if (!is_unset(field)) return false;
    sources_[index_of(field)] = kFromAdjustment;
    return true;
  }

  void require(bool holds, Field field, std::string_view relation, Field other) {
    if (holds) return;
    problems_.push_back(described(field) + "; it must be " + std::string(relation) + " " + described(other));
  }

  std::string described(Field field) const {
    const std::size_t i = index_of(field);
    return std::string(kSettings[i].name) + "=" + value_text(kSettings[i], config_) + " (" + std::string(sources_[i]) +
           ")";
  }

  Config config_;
  Sources sources_;
  std::vector<std::string> problems_;
  std::vector<std::string> ignored_;
};

}  // namespace

std::string to_string(const ConfigOrigin& origin) {
  return std::string(origin.name) + "=" + origin.value + " (" + std::string(origin.source) + ")";
}

ConfigResult read_config(std::span<const std::pair<std::string, std::string>> environment,
                         std::span<const std::pair<std::string, std::string>> overrides) {
  Builder builder;
  for (const auto& [name, value] : environment) {
    if (name.starts_with(kPrefix) && !name.starts_with(kTestPrefix)) builder.set(name, value, kFromEnvironment);
  }
  for (const auto& [name, value] : overrides) builder.set(name, value, kFromArgument);
  return builder.finish();
}

std::vector<std::pair<std::string, std::string>> process_environment() {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    pairs.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  return pairs;
}

std::vector<ConfigRow> config_table() {
  const Config defaults;
  std::vector<ConfigRow> rows;
  for (const Setting& setting : kSettings) {
    rows.push_back(
        {setting.name, type_text(setting.type), value_text(setting, defaults), range_text(setting), setting.help});
  }
  return rows;
}

std::uint64_t resolve_arena_bytes(const Config& config) {
  return config.arena_bytes != 0 ? config.arena_bytes : usable_memory_bytes() / 2;
}

}  // namespace herring
