#include "runtime/lane_thread.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/roster.h"
#include "core/status.h"
#include "runtime/checked_endpoint.h"
#include "runtime/pump.h"
#include "runtime/validate.h"
#include "server/reduce.h"
#include "wire/header.h"

namespace herring::runtime {
namespace {

// Slots and announce buffers grow with the number of workers; past these totals each worker gets fewer instead.
constexpr std::uint64_t kMaxSlotBytes = 256u << 20;
constexpr std::uint64_t kMaxAnnounceBytes = 128u << 20;
// Text of an Error or Cancel that still fits next to an announce.
constexpr std::size_t kMinBodyBytes = 2048;
// Messages of one worker that take no credit (cancels, grants' answers, pings) and may wait at the same moment.
constexpr std::uint32_t kUncreditedMessages = 24;
constexpr Duration kIdleWait = std::chrono::seconds(1);
constexpr Duration kLatenessPeriod = std::chrono::seconds(60);

std::span<std::byte> map_slots(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Code::kUnavailable, "mmap of " + std::to_string(bytes) + " bytes for a server lane: " +
                                        std::strerror(errno) + "; lower HERRING_WINDOW or HERRING_CHUNK_BYTES");
  }
  madvise(memory, bytes, MADV_HUGEPAGE);  // Only a hint.
  return {static_cast<std::byte*>(memory), bytes};
}

std::uint32_t share(std::uint64_t total, std::uint64_t unit, std::uint32_t workers, std::uint32_t low,
                    std::uint32_t high) {
  const std::uint64_t each = total / (unit * std::max(workers, 1u));
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(each, low, high));
}

}  // namespace

ProtocolLimits protocol_limits(const Config& config, std::uint32_t workers) {
  ProtocolLimits limits;
  limits.announce_credits = share(kMaxAnnounceBytes, config.eager_bytes + kMinBodyBytes, workers, 4, 32);
  limits.eager_window = std::max(limits.announce_credits / 2, 1u);
  return limits;
}

LaneOptions lane_options(const Config& config, const Placement& placement, const LanePlace& lane) {
  LaneOptions options;
  options.config = config;
  options.self = lane.peer;
  options.workers = placement.workers;
  options.chunk_bytes = placement.chunk_bytes;
  options.window = lane.window;
  options.max_window = lane.max_window;
  options.failover = placement.failover;
  options.backup_workers = placement.backup_workers;
  options.lanes = static_cast<std::uint32_t>(placement.lanes.size());
  return options;
}

std::uint32_t max_lane_window(const LaneOptions& options) {
  return share(kMaxSlotBytes, options.chunk_bytes, options.workers, 1, std::max(options.max_window, 1u));
}

/// With checksums a result keeps its slot until all have confirmed it: two more windows of them, so that nobody waits.
std::uint64_t slot_bytes(const LaneOptions& options) {
  const std::uint64_t windows = std::uint64_t{options.workers} + (options.config.checksum == Toggle::kOn ? 2 : 0);
  return windows * max_lane_window(options) * options.chunk_bytes;
}

/// Announces and what takes no credit, of one worker at the same moment.
std::uint32_t control_messages(const LaneOptions& options) {
  const std::uint32_t messages =
      protocol_limits(options.config, options.workers).announce_credits + kUncreditedMessages;
  // A Ready for each grant, a Moved for each lane.
  return messages + (options.failover ? max_lane_window(options) + options.lanes : 0);
}

/// The largest body of a control message.
std::uint64_t max_body_bytes(const LaneOptions& options) {
  const std::uint64_t words = options.backup_workers > 0 ? roster_words(options.workers) : 0;
  const std::uint64_t announce = wire::kAnnounceBytes + words * sizeof(std::uint64_t);
  return std::max<std::uint64_t>(options.config.eager_bytes + announce, kMinBodyBytes);
}

std::uint64_t lane_memory_bound(const LaneOptions& options) {
  const Config& config = options.config;
  const ProtocolLimits limits = protocol_limits(config, options.workers);
  const std::uint64_t body = max_body_bytes(options);
  const std::uint64_t kept = options.backup_workers > 0 ? config.backup_bytes : 0;
  const std::uint64_t checked = config.checksum == Toggle::kOn ? CheckedEndpoint::kPostBytes : 0;
  return slot_bytes(options) + kept +
         std::uint64_t{options.workers} * (std::uint64_t{max_lane_window(options)} * checked +
                                           control_messages(options) * (body + wire::kHeaderBytes + checked) +
                                           limits.eager_window * std::uint64_t{config.eager_bytes});
}

LaneThread::LaneThread(const LaneOptions& options, std::unique_ptr<transport::Endpoint> endpoint)
    : options_(options),
      limits_(protocol_limits(options.config, options.workers)),
      endpoint_(std::move(endpoint)),
      slots_(map_slots(slot_bytes(options))),
      logger_(logger_options(options.config, "lane " + std::to_string(options.self.value))) {}

LaneThread::~LaneThread() {
  stop_.store(true, std::memory_order_release);
  endpoint_->wake();
  if (thread_.joinable()) thread_.join();
  endpoint_.reset();  // Nothing may write to the slots any more.
  munmap(slots_.data(), slots_.size());
}

void LaneThread::start(std::span<const transport::Address> workers) {
  for (std::uint32_t rank = 0; rank < workers.size(); ++rank) endpoint_->add_peer(PeerId{rank}, workers[rank]);
  thread_ = std::thread([this] { loop(); });
  pthread_setname_np(thread_.native_handle(), "herring-lane");
}

void LaneThread::peer_lost(PeerId worker, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    losses_.emplace_back(worker, why);
  }
  endpoint_->wake();
}

void LaneThread::peer_left(PeerId worker) {
  {
    const std::scoped_lock lock(mutex_);
    departures_.push_back(worker);
  }
  endpoint_->wake();
}

server::EngineStats LaneThread::stats() const {
  const std::scoped_lock lock(mutex_);
  return stats_;
}

void LaneThread::deliver_losses(Instant now, server::Engine& engine) {
  std::vector<std::pair<PeerId, std::string>> losses;
  std::vector<PeerId> departures;
  {
    const std::scoped_lock lock(mutex_);
    losses.swap(losses_);
    departures.swap(departures_);
  }
  for (const PeerId peer : departures) engine.on_peer_left(now, peer);
  for (const auto& [peer, why] : losses) {
    engine.on_peer_lost(now, peer, why);
    endpoint_->remove_peer(peer);
  }
}

void LaneThread::publish(const server::Engine& engine) {
  idle_.store(engine.is_idle(), std::memory_order_release);
  const std::scoped_lock lock(mutex_);
  const std::uint64_t rejected = engine.stats().messages_rejected;
  if (rejected != stats_.messages_rejected) {
    // Often of an operation that was given up meanwhile; more than a few are a stranger's, or a bug.
    logger_.log_limited(LogLevel::kInfo, "lane.rejected",
                        "dropped messages that fit nothing under way: " + std::to_string(rejected) + " so far");
  }
  stats_ = engine.stats();
}

/// Once a minute, where anybody was late at all.
void LaneThread::log_stragglers(Instant now, const server::Engine& engine) {
  if (now < lateness_due_ || !logger_.is_on(LogLevel::kInfo)) return;
  const bool is_first = lateness_due_ == Instant{};
  lateness_due_ = now + kLatenessPeriod;
  if (is_first) return;
  lateness_logged_.resize(engine.lateness().size());
  const std::string text = straggler_text(engine.lateness(), lateness_logged_);
  lateness_logged_ = engine.lateness();
  if (!text.empty()) logger_.log(LogLevel::kInfo, text);
}

void LaneThread::loop() {
  try {
    serve();
  } catch (const std::exception& problem) {
    idle_.store(true, std::memory_order_release);
    options_.on_failure("server lane " + std::to_string(options_.self.value) + ": " + problem.what());
  }
}

void LaneThread::serve() {
  const Config& config = options_.config;
  server::EngineConfig engine_config;
  engine_config.self = options_.self;
  engine_config.job_id = options_.job_id;
  engine_config.workers = options_.workers;
  engine_config.max_chunk_bytes = options_.chunk_bytes;
  engine_config.max_window = max_lane_window(options_);
  engine_config.window = std::min(std::max(options_.window, 1u), engine_config.max_window);
  engine_config.max_eager_bytes = config.eager_bytes;
  engine_config.announce_credits = limits_.announce_credits;
  engine_config.eager_window = limits_.eager_window;
  engine_config.failover = options_.failover;
  engine_config.check_finite = config.check_finite == Toggle::kOn;
  engine_config.backup_workers = options_.backup_workers;
  engine_config.backup_grace =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(config.backup_grace_s));
  engine_config.backup_bytes = config.backup_bytes;
  engine_config.lanes = options_.lanes;
  server::Engine engine(engine_config, slots_);
  const std::unique_ptr<transport::Registration> registration =
      endpoint_->needs_registration() ? endpoint_->register_memory(slots_) : nullptr;
  PumpOptions pump_options;
  pump_options.control_receives = std::size_t{control_messages(options_)} * options_.workers;
  pump_options.max_body_bytes = max_body_bytes(options_);
  Pump<server::Engine> pump(
      engine, *endpoint_, pump_options,
      [isa = reduction_isa(config)](const ReduceAction& action) {
        server::reduce(action.spec, action.inputs, action.outputs, isa);
      },
      [](const CompleteAction&) {});
  const Duration spin = std::chrono::microseconds(config.spin_us);
  Instant busy_until{};
  while (!stop_.load(std::memory_order_acquire)) {
    const Instant now = std::chrono::steady_clock::now();
    deliver_losses(now, engine);
    if (now >= engine.next_deadline()) engine.on_tick(now);
    pump.flush();
    if (pump.step(now)) {
      busy_until = now + spin;
      continue;
    }
    if (now < busy_until) continue;
    publish(engine);
    log_stragglers(now, engine);
    endpoint_->wait(std::min(engine.next_deadline(), now + kIdleWait));
  }
  publish(engine);
}

}  // namespace herring::runtime
