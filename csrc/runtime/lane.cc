#include "runtime/lane.h"

#include <algorithm>

#include "core/clock.h"
#include "core/status.h"
#include "runtime/durations.h"
#include "runtime/validate.h"
#include "server/reduce.h"
#include "wire/header.h"

namespace herring::runtime {
namespace {

// Long beside what a message costs, short beside a bucket.
constexpr Duration kRunTime = std::chrono::microseconds(500);
// A message costs nothing beside so many bytes; and transports have a largest message (efa/select.cc).
constexpr std::uint32_t kMostRunBytes = 4 << 20;
constexpr Duration kLatenessPeriod = std::chrono::seconds(60);

/// The worker in this process has taken back what it had lent: its part in the job is over.
struct WorkerHasEnded {};

/// The loan of a sum while it is carried out.
class Borrowed {
 public:
  explicit Borrowed(Loan* loan) : loan_(loan) {
    if (loan_ != nullptr && !loan_->begin()) throw WorkerHasEnded();
  }
  ~Borrowed() {
    if (loan_ != nullptr) loan_->end();
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

 private:
  Loan* const loan_;
};

memory::Buffer map_slots(memory::Domain& domain, std::size_t bytes) {
  try {
    return domain.allocate(bytes);
  } catch (const Error& error) {
    throw Error(error.status().code(), "memory of a server lane: " + error.status().message() +
                                           "; lower HERRING_WINDOW or HERRING_CHUNK_BYTES");
  }
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
  options.are_lanes_apart = placement.are_lanes_apart;
  options.max_window = lane.max_window;
  options.slots = placement.budget.lane_slots[lane.peer.value - placement.workers];
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

Lane::Lane(const LaneOptions& options, std::unique_ptr<transport::Endpoint> endpoint)
    : options_(options),
      endpoint_(std::move(endpoint)),
      slots_(map_slots(*options.memory, options.slots * options.chunk_bytes)),
      logger_(logger_options(options.config, peer_name(options.workers, options.self))) {}

Lane::~Lane() {
  pump_.reset();
  endpoint_.reset();  // Nothing may write to the slots any more.
}

server::EngineConfig Lane::engine_config() const {
  const Config& config = options_.config;
  server::EngineConfig result;
  result.hosts = options_.hosts;
  result.self = options_.self;
  result.job_id = options_.job_id;
  result.workers = options_.workers;
  result.max_chunk_bytes = options_.chunk_bytes;
  result.are_lanes_apart = options_.are_lanes_apart;
  result.max_window = options_.max_window;
  result.max_run = std::clamp(kMostRunBytes / options_.chunk_bytes, 1u, wire::kMaxRun);
  result.run_time = kRunTime;
  result.window = options_.window;
  result.max_eager_bytes = options_.eager_bytes;
  result.announce_credits = options_.announce_credits;
  result.eager_window = options_.eager_window;
  result.record_bytes = options_.record_bytes;
  result.failover = options_.failover;
  if (options_.near_worker) result.near_worker = PeerId{*options_.near_worker};
  result.check_finite = config.check_finite == Toggle::kOn;
  result.backup_workers = options_.backup_workers;
  result.backup_grace = duration_of(config.backup_grace_s);
  result.backup_bytes = config.backup_bytes;
  result.stall_warning = stall_warning(config);
  result.lanes = options_.lanes;
  return result;
}

PumpOptions Lane::pump_options() const {
  PumpOptions result;
  const std::size_t control_receives = options_.control_messages;
  result.control_receives = control_receives * (options_.workers - (options_.near_worker ? 1 : 0));
  if (options_.near_worker) result.near.push_back({PeerId{*options_.near_worker}, control_receives});
  result.max_body_bytes = options_.max_body_bytes;
  // Workers ask: whatever a lane waits for, its worker waits for too.
  result.links.self = options_.self;
  result.links.job_id = options_.job_id;
  for (std::uint32_t worker = 0; worker < options_.workers; ++worker) result.links.peers.push_back(PeerId{worker});
  return result;
}

void Lane::open(std::span<const transport::Address> workers) {
  for (std::uint32_t rank = 0; rank < workers.size(); ++rank) endpoint_->add_peer(PeerId{rank}, workers[rank]);
  engine_ = std::make_unique<server::Engine>(engine_config(), slots_.bytes());
  pump_ = std::make_unique<Pump<server::Engine>>(
      *engine_, *endpoint_, pump_options(),
      [isa = reduction_isa(options_.config)](const ReduceAction& action) {
        const Borrowed borrowed(action.loan.get());
        return server::carry_out(action, isa);
      },
      [](const CompleteAction&) {});
}

bool Lane::turn(Instant now) {
  if (has_stopped_) return false;
  try {
    return do_turn(now);
  } catch (const WorkerHasEnded&) {
    stop();
    return true;
  } catch (const std::exception& problem) {
    fail(problem);
    return true;
  }
}

bool Lane::do_turn(Instant now) {
  if (has_news_.load(std::memory_order_acquire)) deliver_losses(now);
  if (now >= engine_->next_deadline()) {
    engine_->on_tick(now);
    const std::string warning = engine_->take_warning();
    if (!warning.empty()) logger_.log(LogLevel::kWarning, warning);
  }
  if (!engine_->is_idle() && core_wait_.look(now)) engine_->on_core_wait(core_wait_.share());
  pump_->flush(now);
  return pump_->step(now);
}

void Lane::stop() {
  has_stopped_ = true;
  pump_.reset();
  endpoint_->shut_down();  // What still comes must not keep anybody awake.
}

void Lane::fail(const std::exception& problem) {
  stop();
  options_.on_failure(peer_name(options_.workers, options_.self) + ": " + problem.what());
}

Instant Lane::next_deadline() const { return has_stopped_ ? Instant::max() : engine_->next_deadline(); }

bool Lane::is_quiet() const { return has_stopped_ || (engine_->is_quiet() && !pump_->has_unsent()); }

void Lane::peer_lost(PeerId worker, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    losses_.emplace_back(worker, why);
    has_news_.store(true, std::memory_order_release);
  }
  endpoint_->wake();
}

void Lane::peer_left(PeerId worker, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    departures_.emplace_back(worker, why);
    has_news_.store(true, std::memory_order_release);
  }
  endpoint_->wake();
}

server::EngineStats Lane::stats() const {
  const std::scoped_lock lock(mutex_);
  return stats_;
}

void Lane::deliver_losses(Instant now) {
  std::vector<std::pair<PeerId, std::string>> losses;
  std::vector<std::pair<PeerId, std::string>> departures;
  {
    const std::scoped_lock lock(mutex_);
    losses.swap(losses_);
    departures.swap(departures_);
    has_news_.store(false, std::memory_order_release);
  }
  for (const auto& [peer, why] : departures) engine_->on_peer_left(now, peer, why);
  for (const auto& [peer, why] : losses) {
    engine_->on_peer_lost(now, peer, why);
    endpoint_->remove_peer(peer);
  }
}

void Lane::publish(Instant now) {
  if (has_stopped_) return;
  log_stragglers(now);
  const server::EngineStats& known = engine_->stats();
  const std::scoped_lock lock(mutex_);
  if (known.messages_rejected != stats_.messages_rejected) {
    // Often of an operation that was given up meanwhile; more than a few are a stranger's, or a bug.
    logger_.log_limited(
        LogLevel::kInfo, "lane.rejected",
        "dropped messages that belong to no pending operation: " + std::to_string(known.messages_rejected) + " so far");
  }
  if (known.over_credit != stats_.over_credit) {
    logger_.log_limited(LogLevel::kWarning, "lane.over_credit",
                        "rank " + std::to_string(known.over_credit_by.value) +
                            " sent announces that it had no credit for; they were dropped: " +
                            std::to_string(known.over_credit) + " so far");
  }
  stats_ = known;
}

/// Once a minute, where anybody was late at all.
void Lane::log_stragglers(Instant now) {
  if (now < lateness_due_ || !logger_.is_on(LogLevel::kInfo)) return;
  const bool is_first = lateness_due_ == Instant{};
  lateness_due_ = now + kLatenessPeriod;
  if (is_first) return;
  const std::vector<server::Lateness>& lateness = engine_->lateness();
  lateness_logged_.resize(lateness.size());
  const std::string text = straggler_text(lateness, lateness_logged_);
  lateness_logged_ = lateness;
  if (!text.empty()) logger_.log(LogLevel::kInfo, text);
}

}  // namespace herring::runtime
