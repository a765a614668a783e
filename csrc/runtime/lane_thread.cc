#include "runtime/lane_thread.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/status.h"
#include "core/thread.h"
#include "runtime/pump.h"
#include "runtime/validate.h"
#include "server/reduce.h"
#include "wire/header.h"

namespace herring::runtime {
namespace {

// Long beside what a message costs, short beside a bucket.
constexpr Duration kRunTime = std::chrono::microseconds(500);
// A message costs nothing beside so many bytes; and transports have a largest message (efa/select.cc).
constexpr std::uint32_t kMostRunBytes = 4 << 20;
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

/// With checksums a result keeps its slot until all have confirmed it: two more windows of them, so that nobody waits.
std::uint64_t slot_bytes(const LaneOptions& options) {
  const std::uint64_t windows = std::uint64_t{options.workers} + (options.config.checksum == Toggle::kOn ? 2 : 0);
  return windows * options.max_window * options.chunk_bytes;
}

}  // namespace

std::vector<wire::RankSpan> host_spans(const Config& config, const Placement& placement) {
  if (config.intra_node == Switch::kOff || !placement.host_first || placement.hosts == placement.workers) return {};
  std::vector<std::vector<std::uint32_t>> ranks(placement.hosts);
  for (std::uint32_t rank = 0; rank < placement.workers; ++rank) ranks[placement.host_of[rank]].push_back(rank);
  std::vector<wire::RankSpan> spans;
  for (const std::vector<std::uint32_t>& host : ranks) {
    const auto span = wire::span_of(host);
    if (!span) return {};
    spans.push_back(*span);
  }
  return spans;
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
  const Budget& budget = placement.budget;
  options.announce_credits = budget.announce_credits;
  options.eager_bytes = budget.eager_bytes;
  options.eager_window = budget.eager_window;
  options.control_messages = budget.control_messages();
  options.max_body_bytes = budget.body_bytes;
  options.memory_bound = budget.lane_bytes[lane.peer.value - placement.workers];
  options.record_bytes = budget.record_bytes;
  options.near_worker = near_worker(config, lane);
  return options;
}

LaneThread::LaneThread(const LaneOptions& options, std::unique_ptr<transport::Endpoint> endpoint)
    : options_(options),
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
  thread_ = start_thread("herring-lane", [this] { loop(); });
}

void LaneThread::peer_lost(PeerId worker, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    losses_.emplace_back(worker, why);
  }
  endpoint_->wake();
}

void LaneThread::peer_left(PeerId worker, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    departures_.emplace_back(worker, why);
  }
  endpoint_->wake();
}

server::EngineStats LaneThread::stats() const {
  const std::scoped_lock lock(mutex_);
  return stats_;
}

void LaneThread::deliver_losses(Instant now, server::Engine& engine) {
  std::vector<std::pair<PeerId, std::string>> losses;
  std::vector<std::pair<PeerId, std::string>> departures;
  {
    const std::scoped_lock lock(mutex_);
    losses.swap(losses_);
    departures.swap(departures_);
  }
  for (const auto& [peer, why] : departures) engine.on_peer_left(now, peer, why);
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
  if (engine.stats().over_credit != stats_.over_credit) {
    logger_.log_limited(LogLevel::kWarning, "lane.over_credit",
                        "rank " + std::to_string(engine.stats().over_credit_by.value) +
                            " sent announces that it had no credit for; they were dropped: " +
                            std::to_string(engine.stats().over_credit) + " so far");
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
  engine_config.hosts = options_.hosts;
  engine_config.self = options_.self;
  engine_config.job_id = options_.job_id;
  engine_config.workers = options_.workers;
  engine_config.max_chunk_bytes = options_.chunk_bytes;
  engine_config.max_window = options_.max_window;
  engine_config.max_run = std::clamp(kMostRunBytes / options_.chunk_bytes, 1u, wire::kMaxRun);
  engine_config.run_time = kRunTime;
  engine_config.window = options_.window;
  engine_config.max_eager_bytes = options_.eager_bytes;
  engine_config.announce_credits = options_.announce_credits;
  engine_config.eager_window = options_.eager_window;
  engine_config.record_bytes = options_.record_bytes;
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
  const std::size_t control_receives = options_.control_messages;
  pump_options.control_receives = control_receives * (options_.workers - (options_.near_worker ? 1 : 0));
  if (options_.near_worker) pump_options.near.push_back({PeerId{*options_.near_worker}, control_receives});
  pump_options.max_body_bytes = options_.max_body_bytes;
  // Workers ask: whatever a lane waits for, its worker waits for too.
  pump_options.links.self = options_.self;
  pump_options.links.job_id = options_.job_id;
  for (std::uint32_t worker = 0; worker < options_.workers; ++worker) {
    pump_options.links.peers.push_back(PeerId{worker});
  }
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
    pump.flush(now);
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
