#include "runtime/progress.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "control/protocol.h"
#include "core/log.h"
#include "core/status.h"
#include "core/thread.h"
#include "runtime/durations.h"

namespace herring::runtime {
namespace {

/// One after the other. Where `take` throws, those behind it are still in the queue.
template <typename Item, typename Take>
void take_all(std::vector<Item>& queue, const Take& take) {
  auto next = queue.begin();
  try {
    while (next != queue.end()) take(*next++);
  } catch (...) {
    queue.erase(queue.begin(), next);
    throw;
  }
  queue.clear();
}

}  // namespace

Progress::Progress(ProgressOptions options)
    : options_(std::move(options)),
      config_(options_.config),
      lanes_(options_.lanes),
      watches_network_(options_.endpoint != nullptr),
      seat_(std::make_shared<DriverSeat>(this)),
      wait_(seat_->core_share(), options_.neighborhood.get()),
      spin_(std::chrono::microseconds(config_.spin_us)) {
  if (!options_.order) options_.order = std::make_shared<OperationOrder>();
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) throw Error(Code::kTransport, std::string("eventfd: ") + std::strerror(errno));
  try {
    if (options_.neighborhood) host_ = std::make_unique<HostExchange>(host_options());
    if (options_.endpoint) {
      servers_ = std::make_unique<ServerExchange>(server_options());
      traffic_.resize(servers_->config().lanes.size());
    }
    messages_ = std::make_unique<Messages>(message_options());
    operations_ = std::make_unique<PendingOperations>(operation_options());
    thread_ = start_thread("herring-worker", [this] { loop(); });
  } catch (...) {
    close(wake_fd_);
    throw;
  }
}

HostExchangeOptions Progress::host_options() {
  HostExchangeOptions options;
  options.config = config_;
  options.ranks = options_.placement->neighbours(options_.rank);
  options.rank = options_.rank;
  options.neighborhood = options_.neighborhood;
  options.on_message = [this](std::uint32_t from, std::span<const std::byte> bytes) {
    if (messages_) messages_->deliver(from, bytes);
  };
  options.on_action = [this](Instant now, const intra_node::LocalAction& action) {
    operations_->on_host_action(now, action);
  };
  return options;
}

ServerExchangeOptions Progress::server_options() {
  ServerExchangeOptions options;
  options.config = config_;
  options.placement = options_.placement;
  options.rank = options_.rank;
  options.job_id = options_.job_id;
  options.memory = options_.memory;
  options.endpoint = std::move(options_.endpoint);
  options.on_unreachable = [this](std::span<const std::uint32_t> members, std::uint32_t of, const Unreachable& found) {
    report_unreachable(members, of, found);
  };
  return options;
}

MessagesOptions Progress::message_options() {
  MessagesOptions options;
  options.config = config_;
  options.placement = options_.placement;
  options.rank = options_.rank;
  options.job_id = options_.job_id;
  options.neighborhood = options_.neighborhood;
  options.endpoint = std::move(options_.peer_endpoint);
  options.on_unreachable = [this](const Unreachable& found) {
    std::vector<std::uint32_t> workers;
    for (const PeerId peer : found.peers) workers.push_back(peer.value);
    report_unreachable(workers, found.of, found);
  };
  options.before_complete = [this] {
    watch_unsent();  // Else a drain could miss the answers.
    publish();
  };
  options.on_complete = [this](bool ok) {
    ++(ok ? counters_.ops_completed : counters_.ops_failed);
    count_ended(1);
  };
  options.on_long_wait = [this](const WaitingCollective& waiting) { operations_->declare(waiting); };
  options.on_collective_end = [this](const OpKey& key) { ended_collectives_.push_back(key); };
  return options;
}

PendingOperationsOptions Progress::operation_options() {
  PendingOperationsOptions options;
  options.config = config_;
  options.placement = options_.placement;
  options.rank = options_.rank;
  options.order = options_.order;
  options.host = host_.get();
  options.servers = servers_.get();
  options.counters = &counters_;
  options.before_complete = [this] {
    publish();
    watch_unsent();  // Else a drain could miss what others may still need.
  };
  options.on_complete = [this] { count_ended(1); };
  return options;
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
    commands_.operations.push_back(std::move(operation));
  }
  wake_up(needs_thread);
}

void Progress::submit(PendingMessage message) {
  bool needs_thread = false;
  {
    const std::scoped_lock lock(mutex_);
    ++pending_;
    needs_thread = !is_driven_;
    commands_.messages.push_back(std::move(message));
  }
  wake_up(needs_thread);
}

void Progress::cancel_unmatched_receives() {
  {
    const std::scoped_lock lock(mutex_);
    commands_.cancel_receives = true;
  }
  wake_up(true);
}

void Progress::cancel_unmatched_receives(GroupId group) {
  {
    const std::scoped_lock lock(mutex_);
    commands_.left_groups.push_back(group);
  }
  wake_up(true);
}

void Progress::look_at_late_memory() {
  {
    const std::scoped_lock lock(mutex_);
    commands_.has_late_memory = true;
  }
  wake_up(false);  // An operation is pending: somebody drives, or will.
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
  const Instant begun = std::chrono::steady_clock::now();
  seat_->unpark();
  ++drainers_;
  std::unique_lock lock(mutex_);
  const bool ended =
      drained_.wait_until(lock, deadline, [this] { return pending_.load() == 0 && !is_needed_later_.load(); });
  --drainers_;
  const bool is_pending = pending_.load() > 0;
  lock.unlock();
  if (!ended && failure().is_ok()) {
    const std::string what =
        is_pending ? "operations or messages of it have not ended" : "other ranks may still need results that it has";
    Logger(logger_options(config_, "rank " + std::to_string(options_.rank)))
        .log(LogLevel::kWarning, "this process shuts down although " + what + " after " +
                                     control::seconds_text(std::chrono::steady_clock::now() - begun) +
                                     ". Other ranks may fail because of it");
  }
  return ended;
}

RuntimeStats Progress::stats() const {
  RuntimeStats stats;
  {
    const std::scoped_lock lock(mutex_);
    stats = stats_;
  }
  if (!host_) return stats;
  const std::uint64_t zero_copy = host_->zero_copy_exchanges();
  const std::uint64_t staged = host_->staged_exchanges();
  stats.ops_completed += zero_copy + staged;
  stats.zero_copy_ops += zero_copy;
  stats.staged_ops += staged;
  return stats;
}

std::vector<PeerTraffic> Progress::lane_traffic() const {
  const std::scoped_lock lock(mutex_);
  return traffic_;
}

Shortcut Progress::take_shortcut(SmallOperation& operation) {
  if (is_broken_ || !host_ || operations_->has_departed() || !host_->may_exchange() || !failure().is_ok()) {
    return Shortcut::kNotTaken;
  }
  // Counted, so that a shutdown waits for it; alone, so that what is peeked at is for nobody else.
  std::uint64_t none = 0;
  if (!pending_.compare_exchange_strong(none, 1)) return Shortcut::kNotTaken;
  Shortcut result = Shortcut::kDone;
  try {
    if (!host_->exchange(operation, wait_, spin_.longest())) result = Shortcut::kAnnounced;
  } catch (const std::exception& problem) {
    break_down(problem);
    operation.status = failure();
  }
  watch_unsent();
  count_ended(1);
  if (host_->has_backlog()) seat_->unpark();
  return result;
}

bool Progress::do_turn(Instant now) {
  bool busy = take_commands(now);
  if (host_) busy |= host_->take_messages(now);
  if (servers_) busy |= servers_->step(now);
  if (messages_) busy |= messages_->step(now);
  if (host_) {
    busy |= host_->run_actions(now);
    busy |= host_->flush_backlog();
  }
  if (!busy) busy = take_hub_events(now);
  run_ticks(now);
  if (operations_->may_begin()) busy |= begin_held(now);
  busy |= end_collectives(now);
  if (!closing_.empty()) end_closing();
  watch_unsent();
  return busy;
}

bool Progress::take_commands(Instant now) {
  Commands commands;
  Status requested;
  {
    const std::scoped_lock lock(mutex_);
    if (failure_.is_ok() && !requested_failure_.is_ok()) {
      requested = requested_failure_;
    } else {
      std::swap(commands, commands_);
    }
  }
  if (!requested.is_ok()) {
    fail_everything(requested);
    return true;
  }
  if (commands.is_empty()) return false;
  carry_out(now, std::move(commands));
  return true;
}

/// Where one throws, those that were not begun end with all the rest.
void Progress::carry_out(Instant now, Commands commands) {
  try {
    begin(now, commands);
  } catch (...) {
    const auto give_back = [](const auto& from, auto& to) { to.insert(to.end(), from.begin(), from.end()); };
    const std::scoped_lock lock(mutex_);
    give_back(commands.operations, commands_.operations);
    give_back(commands.messages, commands_.messages);
    give_back(commands.closed_groups, commands_.closed_groups);
    throw;
  }
}

/// Takes out of them what it begins.
void Progress::begin(Instant now, Commands& commands) {
  const bool has_operations = !commands.operations.empty();
  start_all(now, commands.operations);
  if (servers_ && has_operations) servers_->flush(now);
  if (commands.has_late_memory) operations_->start_late_parts(now);
  take_all(commands.messages, [&](const PendingMessage& message) { start(now, message); });
  take_all(commands.closed_groups, [&](const ClosingGroup& closing) { start_closing(now, closing); });
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

void Progress::start_all(Instant now, std::vector<std::shared_ptr<PendingOperation>>& operations) {
  if (operations.empty()) return;
  Status failed;
  {
    const std::scoped_lock lock(mutex_);
    failed = failure_;
  }
  take_all(operations, [&](const std::shared_ptr<PendingOperation>& operation) {
    try {
      if (failed.is_ok()) {
        operations_->start(now, operation);
      } else {
        operations_->refuse(operation, failed);
      }
    } catch (...) {
      const std::scoped_lock lock(mutex_);
      if (!operations_->knows(operation)) commands_.operations.push_back(operation);
      throw;
    }
  });
}

/// Where it throws, the message is known by then.
void Progress::start(Instant now, const PendingMessage& message) {
  if (messages_) return messages_->submit(now, message);
  message.work->complete(failure());
  count_ended(1);
}

/// In call order, as what they waited for has ended.
bool Progress::begin_held(Instant now) {
  Commands held;
  held.operations = operations_->take_ready();
  if (held.is_empty()) return false;
  carry_out(now, std::move(held));
  return true;
}

/// Of collectives that are made of messages, and what others call in their place: PendingOperations::declare().
bool Progress::end_collectives(Instant now) {
  if (!operations_->has_declared() && ended_collectives_.empty()) return false;
  const std::vector<OpKey> ended = std::exchange(ended_collectives_, {});
  if (!messages_) return false;  // Everything has failed.
  operations_->begin_declared(now);
  for (const auto& [key, why] : operations_->take_refused()) messages_->end_collective(now, key, why);
  for (const OpKey& key : ended) operations_->end_declared(now, key);
  if (servers_) servers_->flush(now);
  return true;
}

void Progress::run_ticks(Instant now) {
  if (host_) {
    if (const auto stall = host_->tick(now)) warn(*stall);
  }
  if (servers_) servers_->tick(now);
  if (messages_) messages_->tick(now);
  operations_->tick(now);
  if (servers_) servers_->end_holds();
  end_stuck(now);
}

/// Engines end what is past its deadline as soon as nobody uses its memory any more. A link that stays cut, with a
/// provider that cannot be talked out of a transfer, may use it for ever: closing the endpoint is all that helps.
void Progress::end_stuck(Instant now) {
  if (now < next_look_) return;
  const Duration grace = dead_after(config_);
  next_look_ = now + grace / 4;
  // An engine waits twice so long: for the verdict of a server, and then for what may be on its way.
  const Duration patience = 3 * grace;
  std::string what = operations_->stuck(now, patience);
  if (messages_ && messages_->is_stuck(now, patience)) what = "a message from worker to worker";
  if (what.empty()) return;
  const std::string text = what + " did not end by its deadline, and its memory is still in use by the network " +
                           control::seconds_text(patience) +
                           " after it: a connection of this process is cut or its peer stopped";
  fail_everything(Status(Code::kTimeout, text));
  if (options_.hub != nullptr) options_.hub->report_failure(text);
}

void Progress::warn(const intra_node::StallWarning& stall) {
  const std::string name = operations_->name_of(stall.key);
  Logger(logger_options(config_, "rank " + std::to_string(options_.rank)))
      .log(LogLevel::kWarning, (name.empty() ? "" : "'" + name + "': ") + stall.text);
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
  note_needed_later(servers_ && servers_->is_needed());
  const bool has_unsent = (host_ && host_->has_backlog()) || (messages_ && messages_->has_unsent()) ||
                          (options_.placement->failover && is_needed_later_.load(std::memory_order_relaxed));
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

/// A lost process's error also says what it kept from ending.
Status Progress::with_pending(const Status& status) const {
  const std::uint64_t pending = pending_.load();
  if (status.code() != Code::kPeerLost || pending == 0) return status;
  return Status(status.code(),
                status.message() + "; " + std::to_string(pending) + " pending here" + operations_->listed());
}

void Progress::fail_everything(const Status& status) {
  const Status with_what = with_pending(status);
  {
    const std::scoped_lock lock(mutex_);
    if (failure_.is_ok()) failure_ = with_what;
    has_failed_.store(true);
  }
  publish();
  // Nothing may touch the callers' memory once their operations have failed: the endpoint goes before they complete.
  if (servers_) servers_->close();
  if (host_) host_->close();
  std::vector<std::shared_ptr<PendingOperation>> operations = operations_->close();
  std::vector<PendingMessage> messages;
  std::vector<ClosingGroup> closing;
  {
    const std::scoped_lock lock(mutex_);
    std::ranges::move(std::exchange(commands_.operations, {}), std::back_inserter(operations));
    messages.swap(commands_.messages);
    closing.swap(commands_.closed_groups);
  }
  closing.insert(closing.end(), closing_.begin(), closing_.end());
  closing_.clear();
  counters_.ops_failed += operations.size() + messages.size();
  publish();
  for (const auto& operation : operations) options_.order->leave(operation->call);
  for (const auto& operation : operations) operation->work->complete(failure());
  for (const PendingMessage& message : messages) message.work->complete(failure());
  std::uint64_t ended = operations.size() + messages.size() + (std::exchange(has_unsent_, false) ? 1 : 0);
  if (messages_) {
    ended += messages_->fail_all(failure());
    messages_.reset();
  }
  note_needed_later(false);
  count_ended(ended);
  for (const ClosingGroup& each : closing) each.closed->set();
}

/// What a failed job's engines have counted stays when they are gone.
void Progress::publish() {
  if (messages_) {
    const point_to_point::EngineStats& messages = messages_->stats();
    counters_.messages_sent = messages.sent;
    counters_.messages_received = messages.received;
    counters_.message_bytes_sent = messages.bytes_sent;
    counters_.message_bytes_received = messages.bytes_received;
  }
  const std::scoped_lock lock(mutex_);
  if (servers_) servers_->count(counters_, traffic_);
  stats_ = counters_;
}

}  // namespace herring::runtime
