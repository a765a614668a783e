#include "runtime/progress.h"

#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/log.h"
#include "core/status.h"
#include "core/thread.h"
#include "runtime/deadlock.h"
#include "runtime/poll.h"
#include "runtime/progress_options.h"
#include "runtime/progress_part.h"
#include "runtime/validate.h"

namespace herring::runtime {
namespace {

memory::Buffer map_bounce(memory::Domain& domain, std::size_t bytes) {
  try {
    return domain.allocate(bytes);
  } catch (const Error& error) {
    throw Error(error.status().code(),
                "memory for results of servers: " + error.status().message() +
                    "; lower HERRING_WINDOW or HERRING_CHUNK_BYTES, or set HERRING_FAILOVER=off");
  }
}

}  // namespace

Progress::Progress(ProgressOptions options)
    : options_(std::move(options)),
      config_(options_.config),
      lanes_(options_.lanes),
      watches_network_(options_.endpoint != nullptr),
      isa_(reduction_isa(config_)),
      local_writes_(isa_),
      spin_(std::chrono::microseconds(config_.spin_us)) {
  if (!options_.order) options_.order = std::make_shared<OperationOrder>();
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) throw Error(Code::kTransport, std::string("eventfd: ") + std::strerror(errno));
  if (options_.neighborhood) join_neighbourhood(*options_.neighborhood);
  if (options_.endpoint) {
    memory_ = options_.endpoint->memory();
    network_config_ = make_network_config(options_);
    if (network_config_.failover) {
      bounce_ = map_bounce(*options_.memory, worker::bounce_bytes(network_config_));
      network_config_.bounce = bounce_.bytes();
    }
    network_ = std::make_unique<worker::Engine>(network_config_);
    pump_ = std::make_unique<Pump<worker::Engine>>(
        *network_, *options_.endpoint, make_pump_options(options_, lane_links()), no_reduction,
        [this](const CompleteAction& action) { network_completions_.push_back(action); });
    traffic_.resize(network_config_.lanes.size());
  }
  MessagesOptions message_options;
  message_options.config = config_;
  message_options.placement = options_.placement;
  message_options.rank = options_.rank;
  message_options.job_id = options_.job_id;
  message_options.neighborhood = options_.neighborhood;
  message_options.endpoint = std::move(options_.peer_endpoint);
  message_options.on_unreachable = [this](const Unreachable& found) {
    std::vector<std::uint32_t> workers;
    for (const PeerId peer : found.peers) workers.push_back(peer.value);
    report_unreachable(workers, found.of, found);
  };
  message_options.before_complete = [this] {
    watch_unsent();  // Else a drain could miss the answers.
    publish();
  };
  message_options.on_complete = [this](bool ok) {
    ++(ok ? counters_.ops_completed : counters_.ops_failed);
    count_ended(1);
  };
  watch_collectives(message_options);
  messages_ = std::make_unique<Messages>(std::move(message_options));
  seat_ = std::make_shared<DriverSeat>(this);
  try {
    thread_ = start_thread("herring-worker", [this] { loop(); });
  } catch (...) {
    close(wake_fd_);
    throw;
  }
}

/// The ranks of this host.
void Progress::join_neighbourhood(intra_node::Neighborhood& neighborhood) {
  neighbours_ = options_.placement->neighbours(options_.rank);
  intra_node::EngineConfig config;
  config.local_size = static_cast<std::uint32_t>(neighbours_.size());
  for (std::uint32_t i = 0; i < config.local_size; ++i) {
    if (neighbours_[i] == options_.rank) config.local_rank = i;
    config.arenas.push_back(neighborhood.arena(i));
  }
  config.check_finite = config_.check_finite == Toggle::kOn;
  config.stall_warning = stall_warning(config_);
  config.inline_bytes = local_inline_bytes(neighborhood.max_message_bytes());
  config.allocate = [&neighborhood](std::size_t bytes) { return neighborhood.allocate(bytes); };
  config.deallocate = [&neighborhood](std::span<std::byte> memory) { neighborhood.deallocate(memory); };
  local_ = std::make_unique<intra_node::Engine>(std::move(config));
  local_backlog_.resize(neighbours_.size());
  core_balance_.emplace(neighborhood);
  cpu_set_t cores;
  shares_cores_ = sched_getaffinity(0, sizeof(cores), &cores) != 0 ||
                  neighbours_.size() > static_cast<std::size_t>(CPU_COUNT(&cores));
}

/// Lanes of this process need no link.
PumpLinks Progress::lane_links() {
  PumpLinks links;
  links.self = PeerId{options_.rank};
  links.job_id = options_.job_id;
  links.watch = {dead_after(config_), true};
  for (const LanePlace& lane : options_.placement->lanes) {
    if (!lane.embedded || lane.owner != options_.rank) links.peers.push_back(lane.peer);
  }
  links.on_unreachable = [this](const Unreachable& found) { report_lanes(found); };
  return links;
}

/// A process is as reachable as its worst lane.
void Progress::report_lanes(const Unreachable& found) {
  const Placement& placement = *options_.placement;
  std::set<std::uint32_t> all;
  std::set<std::uint32_t> silent;
  for (const LanePlace& lane : placement.lanes) {
    const bool is_gone = !lane.embedded && lost_servers_.contains(lane.owner);
    if (is_gone || (lane.embedded && lane.owner == options_.rank)) continue;
    const std::uint32_t member = lane.embedded ? lane.owner : placement.workers + lane.owner;
    all.insert(member);
    if (std::find(found.peers.begin(), found.peers.end(), lane.peer) != found.peers.end()) silent.insert(member);
  }
  const std::vector<std::uint32_t> members(silent.begin(), silent.end());
  report_unreachable(members, static_cast<std::uint32_t>(all.size()), found);
}

void Progress::report_unreachable(std::span<const std::uint32_t> members, std::uint32_t of, const Unreachable& found) {
  if (options_.hub != nullptr && !hub_lost_ && !members.empty()) {
    options_.hub->report_unreachable(members, of, found.answering, found.silent);
  }
}

Progress::~Progress() {
  stop_.store(true);
  ring();
  seat_->unpark();
  thread_.join();
  close(wake_fd_);
}

void Progress::submit(std::shared_ptr<PendingOperation> operation) {
  bool needs_thread = false;
  {
    const std::scoped_lock lock(mutex_);
    ++pending_;
    // Nobody drives: the caller will, or the progress thread has to.
    needs_thread = !is_driven_ && !operation->is_waited_for;
    submitted_.push_back(std::move(operation));
  }
  wake_up(needs_thread);
}

void Progress::submit(PendingMessage message) {
  bool needs_thread = false;
  {
    const std::scoped_lock lock(mutex_);
    ++pending_;
    needs_thread = !is_driven_;
    message_commands_.submitted.push_back(std::move(message));
  }
  wake_up(needs_thread);
}

void Progress::cancel_unmatched_receives() {
  {
    const std::scoped_lock lock(mutex_);
    message_commands_.cancel_receives = true;
  }
  wake_up(true);
}

void Progress::cancel_unmatched_receives(GroupId group) {
  {
    const std::scoped_lock lock(mutex_);
    message_commands_.left_groups.push_back(group);
  }
  wake_up(true);
}

void Progress::look_at_late_memory() {
  {
    const std::scoped_lock lock(mutex_);
    message_commands_.has_late_memory = true;
  }
  wake_up(false);  // An operation is pending: somebody drives, or will.
}

void Progress::wake_up(bool needs_thread) {
  if (needs_thread) seat_->unpark();
  if (asleep_.exchange(false)) ring();
}

void Progress::ring() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

void Progress::fail(const Status& status) {
  {
    const std::scoped_lock lock(mutex_);
    if (requested_failure_.is_ok()) requested_failure_ = status;
    has_failed_.store(true);
  }
  ring();
  seat_->unpark();
}

Status Progress::failure() const {
  if (!has_failed_.load()) return Status::ok();
  const std::scoped_lock lock(mutex_);
  return failure_.is_ok() ? requested_failure_ : failure_;
}

bool Progress::drain(Instant deadline) {
  seat_->unpark();
  ++drainers_;
  std::unique_lock lock(mutex_);
  const bool ended =
      drained_.wait_until(lock, deadline, [this] { return pending_.load() == 0 && !is_needed_later_.load(); });
  --drainers_;
  return ended;
}

RuntimeStats Progress::stats() const {
  RuntimeStats stats;
  {
    const std::scoped_lock lock(mutex_);
    stats = stats_;
  }
  const std::uint64_t zero_copy = zero_copy_shortcuts_.load(std::memory_order_relaxed);
  const std::uint64_t staged = staged_shortcuts_.load(std::memory_order_relaxed);
  stats.ops_completed += zero_copy + staged;
  stats.zero_copy_ops += zero_copy;
  stats.staged_ops += staged;
  return stats;
}

std::vector<PeerTraffic> Progress::lane_traffic() const {
  const std::scoped_lock lock(mutex_);
  return traffic_;
}

bool Progress::do_turn(Instant now) {
  bool busy = take_commands(now);
  busy |= take_local_messages(now);
  if (pump_) busy |= pump_->step(now);
  if (messages_) busy |= messages_->step(now);
  busy |= run_local_actions(now);
  busy |= flush_local_backlog();
  if (!busy) busy = take_hub_events(now);
  run_ticks(now);
  if (may_begin_) busy |= begin_held(now);
  busy |= end_collectives(now);
  if (!closing_.empty()) end_closing();
  watch_unsent();
  return busy;
}

bool Progress::take_commands(Instant now) {
  std::vector<std::shared_ptr<PendingOperation>> operations;
  MessageCommands messages;
  Status requested;
  {
    const std::scoped_lock lock(mutex_);
    operations.swap(submitted_);
    std::swap(messages, message_commands_);
    if (failure_.is_ok() && !requested_failure_.is_ok()) requested = requested_failure_;
  }
  if (!requested.is_ok()) fail_everything(requested);
  start_all(now, operations);
  if (pump_ && !operations.empty()) pump_->flush(now);
  carry_out(now, messages);
  return !messages.is_empty() || !operations.empty() || !requested.is_ok();
}

void Progress::carry_out(Instant now, const MessageCommands& commands) {
  if (commands.has_late_memory) start_late_parts(now);
  start_all(now, commands.submitted);
  for (const ClosingGroup& closing : commands.closed_groups) start_closing(now, closing);
  for (const GroupId group : commands.left_groups) {
    if (!messages_) break;
    messages_->cancel_unmatched_receives(
        now, Status(Code::kCancelled, "this rank left the group before a message came"), group);
  }
  if (commands.cancel_receives && messages_) {
    messages_->cancel_unmatched_receives(now,
                                         Status(Code::kShutdown, "the runtime was shut down before a message came"));
  }
}

/// So many operations have ended; or are known to be in nobody's way any more.
void Progress::count_ended(std::uint64_t ended) {
  // Who drains says so before it looks at what is pending: either it sees that this was the last, or we see it.
  if (pending_.fetch_sub(ended) != ended || drainers_.load() == 0) return;
  const std::scoped_lock lock(mutex_);
  drained_.notify_all();
}

/// What others wait for counts as pending until it is out, and so do results that others may still need.
void Progress::watch_unsent() {
  note_needed_later(network_ && network_->is_needed());
  const bool has_unsent = has_local_backlog() || (messages_ && messages_->has_unsent()) ||
                          (network_config_.failover && is_needed_later_.load(std::memory_order_relaxed));
  if (has_unsent == has_unsent_) return;
  has_unsent_ = has_unsent;
  if (has_unsent) {
    ++pending_;
  } else {
    count_ended(1);
  }
}

/// Only who drains waits for this: what follows need not.
void Progress::note_needed_later(bool is_needed) {
  if (is_needed_later_.load(std::memory_order_relaxed) == is_needed) return;
  is_needed_later_.store(is_needed);
  if (is_needed || drainers_.load() == 0) return;
  const std::scoped_lock lock(mutex_);
  drained_.notify_all();
}

bool Progress::take_hub_events(Instant now) {
  HubEvent event;
  bool any = false;
  while (options_.hub != nullptr && !hub_lost_ && options_.hub->next_event(event)) {
    any = true;
    const std::string who = to_string(event.member);
    switch (event.kind) {
      case HubEvent::Kind::kFinished:
        // With backup workers who is late has the results of operations that others have finished long ago.
        if (options_.placement->backup_workers > 0) break;
        [[fallthrough]];
      case HubEvent::Kind::kLeft:
        member_left(now, event);
        break;
      case HubEvent::Kind::kLost:
        if (lose_server(now, event)) break;
        if (event.member.role == Role::kWorker)
          options_.on_peer_lost(PeerId{event.member.rank}, who + " is lost: " + event.reason);
        fail_everything(Status(Code::kPeerLost, who + " is lost: " + event.reason));
        break;
      case HubEvent::Kind::kFailed:
        if (lose_server(now, event)) break;
        fail_everything(event.reason.starts_with(kDeadlockText)
                            ? Status(Code::kMismatch, event.reason)
                            : Status(Code::kPeerLost, who + " failed: " + event.reason));
        break;
      case HubEvent::Kind::kGroupAborted:
        group_aborted(now, event);
        break;
      case HubEvent::Kind::kGroupLeft:
        group_left(now, event);
        break;
      case HubEvent::Kind::kHubLost:
        hub_lost_ = true;
        if (!left_.contains(0)) {
          fail_everything(Status(Code::kPeerLost, to_string(event)));
        }
        break;
    }
  }
  return any;
}

/// True where the event is the end of a server whose work others go on with.
bool Progress::lose_server(Instant now, const HubEvent& event) {
  const Placement& placement = *options_.placement;
  if (event.member.role != Role::kServer || !placement.failover || !network_) return false;
  lost_servers_.insert(event.member.rank);
  const bool any_left = std::any_of(placement.lanes.begin(), placement.lanes.end(), [this](const LanePlace& lane) {
    return lane.embedded || !lost_servers_.contains(lane.owner);
  });
  if (!any_left) return false;
  std::string text = to_string(event.member) + " is lost: " + event.reason;
  if (options_.rank == 0) {
    Logger(logger_options(config_, "rank 0")).log(LogLevel::kWarning, text + ". Its work goes on at the other servers");
  }
  for (const LanePlace& lane : placement.lanes) {
    if (lane.embedded || lane.owner != event.member.rank) continue;
    options_.endpoint->remove_peer(lane.peer);
    pump_->forget_peer(lane.peer);
    network_->on_peer_lost(now, lane.peer, text);
  }
  pump_->flush(now);
  return true;
}

void Progress::member_left(Instant now, const HubEvent& event) {
  const std::string text = to_string(event);
  if (lose_server(now, event)) return;
  if (event.member.role == Role::kServer) {
    fail_everything(Status(Code::kPeerLost, text + " while workers still need it"));
    return;
  }
  const std::uint32_t rank = event.member.rank;
  if (event.kind == HubEvent::Kind::kLeft) {
    left_.insert(rank);
    for (std::size_t i = 0; i < neighbours_.size(); ++i) {
      if (neighbours_[i] == rank) local_backlog_[i].clear();
    }
  }
  if (std::ranges::find(departed_, rank, &Departed::rank) == departed_.end()) {
    departed_.push_back({rank, text});
    // All that it has sent to ranks of its host is in their rings by now.
    while (take_local_messages(now)) {
    }
    run_local_actions(now);
    options_.on_peer_left(PeerId{rank}, text);
    end_local_without(now, rank, text);
  }
  if (messages_) messages_->worker_left(now, rank, text, left_.contains(rank));
  // What it took part in is finished on its side and on its way here; what it did not join never comes. The engines
  // know which is which, but for groups that a lane does not know yet.
  const Duration grace = dead_after(config_);
  for (const auto& operation : operations_) {
    if (!check_departed(*operation).is_ok()) operation->deadline = std::min(operation->deadline, now + grace);
  }
}

void Progress::warn(const intra_node::StallWarning& stall) {
  const auto found = parts_.find(stall.key);
  const std::string name = found == parts_.end() ? "" : found->second->operation->name;
  Logger(logger_options(config_, "rank " + std::to_string(options_.rank)))
      .log(LogLevel::kWarning, (name.empty() ? "" : "'" + name + "': ") + stall.text);
}

void Progress::run_ticks(Instant now) {
  if (local_ && now >= local_->next_deadline()) {
    while (take_local_messages(now)) {
    }  // What has arrived in time counts as in time.
    local_->on_tick(now);
    if (const auto stall = local_->take_warning()) warn(*stall);
    run_local_actions(now);
  }
  if (network_ && now >= network_->next_deadline()) {
    network_->on_tick(now);
    pump_->flush(now);
  }
  if (messages_) messages_->tick(now);
  expire_held(now);
  expire_operations(now);
  while (!network_completions_.empty()) {
    const CompleteAction action = std::move(network_completions_.front());
    network_completions_.pop_front();
    network_done(now, action);
  }
  if (!lingering_.empty()) release_lingering();
  end_stuck(now);
}

/// What a failed job's engines have counted stays when they are gone.
void Progress::publish() {
  if (network_) {
    const worker::EngineStats& network = network_->stats();
    counters_.bytes_to_servers = network.bytes_sent;
    counters_.bytes_from_servers = network.bytes_received;
    counters_.announces = network.announces;
    counters_.came_last = network.came_last;
    counters_.late_us = network.late_us;
  }
  if (messages_) {
    const point_to_point::EngineStats& messages = messages_->stats();
    counters_.messages_sent = messages.sent;
    counters_.messages_received = messages.received;
    counters_.message_bytes_sent = messages.bytes_sent;
    counters_.message_bytes_received = messages.bytes_received;
  }
  const std::scoped_lock lock(mutex_);
  stats_ = counters_;
  if (pump_) {
    for (std::size_t lane = 0; lane < traffic_.size(); ++lane) {
      const auto traffic = pump_->traffic(network_config_.lanes[lane]);
      traffic_[lane] = {traffic.bytes_sent, traffic.bytes_received, traffic.messages};
    }
  }
}

}  // namespace herring::runtime
