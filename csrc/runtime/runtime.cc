#include "runtime/runtime.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/clock.h"
#include "core/copy.h"
#include "core/log.h"
#include "core/status.h"
#include "core/text.h"
#include "intra_node/neighborhood.h"
#include "runtime/awaited_calls.h"
#include "runtime/connect.h"
#include "runtime/control.h"
#include "runtime/deadlock_watch.h"
#include "runtime/device_memory.h"
#include "runtime/group_table.h"
#include "runtime/job_counters.h"
#include "runtime/lane_thread.h"
#include "runtime/pending.h"
#include "runtime/placement.h"
#include "runtime/progress.h"
#include "runtime/user_memory.h"
#include "runtime/validate.h"

namespace herring::runtime {
namespace {

constexpr std::uint32_t kRingBytes = 256 << 10;
// How long an orderly shutdown waits: for what is pending here, and for the others to have got everything that this
// process's lanes owe them.
constexpr Duration kGoodbye = std::chrono::seconds(30);
// More than kNoHaste, however long it has taken until an engine hears of it.
constexpr Duration kYear = std::chrono::hours(24 * 365);
// And for the callbacks of what has ended; longer only where one waits for the thread that shuts down.
constexpr Duration kLastCallbacks = std::chrono::seconds(10);

std::uint64_t host_token(std::uint64_t job_id, const std::string& host) {
  return job_id ^ (name_key(host) & ~kNamedKey);
}

}  // namespace

class Runtime::Impl {
 public:
  Impl(RuntimeOptions given, Instant deadline)
      : options(std::move(given)),
        placement(make_placement(options.config, options.hub->workers(), options.hub->servers())),
        callbacks(std::make_shared<CallbackPool>()) {
    join_neighbours(deadline);
    Connections connections = connect(options.config, placement, *options.hub, Role::kWorker, options.rank,
                                      options.fabric_search, deadline, *domain, options.wrap_endpoint);
    lanes = std::move(connections.lanes);
    const bool has_threads = wants_lane_threads(options.config, neighbours.size());
    damage = connections.damage;
    strangers = connections.strangers;
    network = std::move(connections.network);
    description = describe(options.config, placement, neighborhood != nullptr, connections.endpoint.get());
    no_device_memory = why_no_device_memory(options.config, placement, *options.hub, options.rank, network.get());
    std::vector<std::uint32_t> everybody(placement.workers);
    for (std::uint32_t rank = 0; rank < placement.workers; ++rank) everybody[rank] = rank;
    add_group(GroupId{0}, everybody);
    ProgressOptions progress_options;
    progress_options.config = options.config;
    progress_options.placement = &placement;
    progress_options.rank = options.rank;
    progress_options.job_id = options.hub->job_id();
    progress_options.hub = options.hub.get();
    progress_options.order = order;
    progress_options.neighborhood = neighborhood;
    progress_options.memory = domain.get();
    progress_options.endpoint = std::move(connections.endpoint);
    progress_options.peer_endpoint = std::move(connections.peer_endpoint);
    for (const auto& lane : lanes) {
      if (!has_threads) progress_options.lanes.push_back(lane.get());
    }
    progress_options.on_peer_lost = [this](PeerId worker, const std::string& why) {
      for (const auto& lane : lanes) lane->peer_lost(worker, why);
    };
    progress_options.on_peer_left = [this](PeerId worker, const std::string& why) {
      for (const auto& lane : lanes) lane->peer_left(worker, why);
    };
    progress_options.on_group_aborted = [this](const HubEvent& event, const Status& why) {
      return close_group(event, why);
    };
    progress_options.on_group_left = [this](const HubEvent& event) {
      const std::scoped_lock lock(mutex);
      return groups.note_left(event);
    };
    progress = std::make_unique<Progress>(std::move(progress_options));
    seat = progress->seat();
    if (has_threads) lane_threads = start_lane_threads(options.config, lanes);
    watch_for_deadlocks(everybody);
  }

  /// In an elastic job operations go from one generation to the next, and nobody there knows who waits.
  void watch_for_deadlocks(std::span<const std::uint32_t> everybody) {
    const Duration patience = duration_of(options.config.deadlock_after_s);
    if (options.is_generation || placement.workers < 2 || patience <= Duration::zero()) return;
    add_group(DeadlockWatch::kGroup, everybody);
    DeadlockWatch::Ports ports;
    ports.report = [this](const std::vector<Awaited>& awaited) {
      const Outlooks outlooks = ask_callers();
      const std::scoped_lock lock(mutex);
      return report_waiting(awaited, outlooks, *order, groups);
    };
    ports.not_called = [this](const DeadlockList& list) {
      const Outlooks outlooks = ask_callers();
      const std::scoped_lock lock(mutex);
      return calls_not_called(list, outlooks, groups);
    };
    ports.send = [this](const Send& message) { return send(message); };
    ports.receive = [this](const Receive& message) { return receive(message); };
    ports.fail = [this](const std::string& text) {
      const std::scoped_lock lock(mutex);
      if (progress) progress->fail(Status(Code::kMismatch, text));
      options.hub->report_failure(text);  // All are told at once: who leaves because of it is not what the others see.
    };
    watch = std::make_unique<DeadlockWatch>(options.rank, placement.workers, patience, std::move(ports));
    waits = watch->waits();
  }

  Outlooks ask_callers() {
    std::unique_lock lock(mutex);
    const BackgroundCallers callers = background_callers(groups);
    lock.unlock();  // They call with a lock of theirs.
    return ask(callers);
  }

  void join_neighbours(Instant deadline) {
    neighbours = placement.neighbours(options.rank);
    const auto self = std::find(neighbours.begin(), neighbours.end(), options.rank);
    local_rank = static_cast<std::uint32_t>(self - neighbours.begin());
    if (!placement.host_first || options.config.intra_node == Switch::kOff || neighbours.size() < 2) return;
    intra_node::NeighborhoodOptions near;
    near.local_rank = local_rank;
    near.local_size = static_cast<std::uint32_t>(neighbours.size());
    near.token = host_token(options.hub->job_id(), options.hub->member(options.rank).host_identity);
    near.arena_bytes = effective_arena_bytes(options.config);
    near.ring_bytes = kRingBytes;
    near.on_discard = [domain = std::weak_ptr(domain)](std::span<const std::byte> memory) {
      if (const auto alive = domain.lock()) alive->invalidate(memory);
    };
    near.while_waiting = [this] { fail_where_somebody_is_gone(); };
    neighborhood = std::make_shared<intra_node::Neighborhood>(near, deadline);
  }

  /// Before everybody is connected the first event of the job is its end.
  void fail_where_somebody_is_gone() {
    HubEvent event;
    if (options.hub->next_event(event)) throw Error(Code::kPeerLost, to_string(event));
  }

  void add_group(GroupId id, std::span<const std::uint32_t> ranks) {
    GroupRoute route = make_route(placement, options.config, options.rank, ranks);
    const std::scoped_lock lock(mutex);
    if (stopped) throw Error(shut_down());
    if (groups.add(id, std::move(route))) return;
    throw Error(Code::kInvalidArgument, "group " + std::to_string(id.value) + " exists already");
  }

  /// The caller holds the lock. Who leaves the whole job says so otherwise; an elastic job counts `calls` itself.
  void report_left(Group& group, std::optional<std::uint64_t> calls = std::nullopt) const {
    if (group.id == GroupId{0} || !group.closed.is_ok() || group.route.ranks.size() < 2) return;
    if (!calls && (group.has_own_keys || options.is_generation)) return;
    if (std::exchange(group.is_left, true)) return;
    options.hub->report_group_left({group.id, group.use}, calls.value_or(group.next_op.load()));
  }

  void leave_group(GroupId id, std::optional<std::uint64_t> calls) {
    const std::scoped_lock lock(mutex);
    const std::shared_ptr<Group> group = groups.find(id);
    if (!group || !progress) return;
    progress->cancel_unmatched_receives(id);
    report_left(*group, calls);
  }

  /// True where this rank is in the group and has not closed it before.
  bool close_group(const HubEvent& event, const Status& why) {
    const std::scoped_lock lock(mutex);
    const std::shared_ptr<Group> group = groups.find(event);
    if (!group || !group->closed.is_ok()) return false;
    group->closed = why;
    return true;
  }

  std::shared_ptr<Work> submit(const Request& request) {
    Admitted admitted;
    const std::scoped_lock lock(mutex);
    const Status status = admit(request, admitted);
    // Under the lock, so that call order and sequence numbers agree.
    if (status.is_ok() && !admitted.is_alone()) return submit(request, admitted, false);
    auto work = std::make_shared<PendingWork>(callbacks, seat);
    work->complete(status.is_ok() ? finish_alone(request) : status);
    return work;
  }

  std::shared_ptr<Work> run(const Request& request, Status& status) {
    if (waits && !request.from_pool) waits->know_thread();
    Admitted admitted;
    SmallOperation small;
    Progress* driver = nullptr;
    {
      const std::scoped_lock lock(mutex);
      status = admit(request, admitted);
      if (!status.is_ok()) return nullptr;
      if (admitted.is_alone()) {
        status = finish_alone(request);
        return nullptr;
      }
      small = small_operation(request, admitted.op, admitted.group->route);
      // Under the same lock as its number: else two threads with one name could enter against the order of its uses.
      if (has_backup(request) || request.is_special() || !progress->is_small(small))
        return submit(request, admitted, false);
      driver = progress.get();
    }
    Shortcut shortcut = Shortcut::kNotTaken;
    seat->use([&] { shortcut = driver->take_shortcut(small); });  // In its seat the driver lives.
    if (shortcut == Shortcut::kDone) {
      status = small.status;
      return nullptr;
    }
    const std::scoped_lock lock(mutex);
    status = stopped ? shut_down() : admitted.group->closed;
    if (!status.is_ok()) return nullptr;
    return submit(request, admitted, shortcut == Shortcut::kAnnounced);
  }

  /// What an operation is known by once it may begin.
  struct Admitted {
    std::shared_ptr<Group> group;
    std::uint64_t op = 0;
    std::uint64_t use = 0;  ///< As OrderedCall's.

    bool is_alone() const { return group->route.path == GroupRoute::Path::kAlone; }
  };

  /// The caller holds the lock.
  Status admit(const Request& request, Admitted& admitted) {
    if (stopped) return shut_down();
    admitted.group = groups.find(request.group);
    if (!admitted.group) return no_group(request.group);
    if (!admitted.group->closed.is_ok()) return admitted.group->closed;
    Status valid = validate(request, admitted.group->route);
    if (!valid.is_ok()) return valid;
    if (!order->is_empty()) {
      const Status apart = order->check(OperationOrder::call_of(request, admitted.group->route.index));
      if (!apart.is_ok()) return apart;
    }
    return number(*admitted.group, request, admitted);
  }

  /// The caller holds the lock.
  std::shared_ptr<Work> submit(const Request& request, const Admitted& admitted, bool announced) {
    auto work = std::make_shared<PendingWork>(callbacks, seat, waits);
    auto operation = std::make_shared<PendingOperation>();
    operation->group = admitted.group;
    operation->op = admitted.op;
    operation->descriptor = request.descriptor;
    operation->descriptor.op_bytes = request.output.size();
    operation->input = request.input;
    operation->output = request.output;
    operation->name = request.name.value_or("");
    operation->has_backup = has_backup(request);
    operation->late = request.late;
    operation->device_memory = request.device_memory;
    operation->call = OperationOrder::call_of(request, admitted.group->route.index);
    operation->call.group = request.group;
    operation->call.use = admitted.use;
    operation->call.work = work.get();
    operation->deadline = std::chrono::steady_clock::now() + time_limit(request);
    operation->work = work;
    operation->is_waited_for = request.is_waited_for;
    operation->announced = announced;
    operation->is_counted = !request.name && (admitted.op & kNamedKey) == 0;
    order->enter({operation, &operation->call});
    progress->submit(std::move(operation));
    return work;
  }

  Duration time_limit(const Request& request) const {
    if (request.is_patient) return kYear;
    // As long as it may be without being a patient one.
    return std::min<Duration>(request.timeout.value_or(duration_of(options.config.timeout_s)),
                              kNoHaste - std::chrono::milliseconds(1));
  }

  bool has_backup(const Request& request) const { return request.has_backup && placement.backup_workers > 0; }

  Status finish_alone(const Request& request) const {
    if (!request.input.empty()) copy_bytes(request.input, request.output);
    return progress->failure();
  }

  static Status shut_down() { return Status(Code::kShutdown, "herring has been shut down"); }
  static Status no_group(GroupId id) {
    return Status(Code::kInvalidArgument, "group " + std::to_string(id.value) + " does not exist on this rank");
  }

  /// What the operation is known by. The caller holds the lock.
  Status number(Group& group, const Request& request, Admitted& admitted) const {
    group.has_own_keys |= request.key.has_value();
    if (request.key || !request.name) {
      admitted.op = admitted.use = request.key ? *request.key : group.next_op++;
      return Status::ok();
    }
    const std::uint64_t name = name_key(*request.name);
    const auto use = group.name_uses.next(name);
    if (!use) return no_room_for_name(*request.name, group.name_uses.size());
    if (*use == 0 && group.name_uses.size() == NameUses::kManyNames) {
      Logger logger(logger_options(options.config, "rank " + std::to_string(options.rank)));
      logger.log(LogLevel::kWarning, many_names(*request.name));
    }
    admitted.op = use_key(name, *use);
    admitted.use = *use;
    return Status::ok();
  }

  /// Ok, or why the message is none; the group's route otherwise.
  Status find_route(GroupId id, std::optional<std::uint32_t> peer, const std::optional<Duration>& timeout,
                    const char* what, PendingMessage& message) {
    const std::shared_ptr<Group> group = groups.find(id);
    if (stopped) return shut_down();
    if (!group) return no_group(id);
    if (!group->closed.is_ok()) return group->closed;
    const std::size_t size = group->route.ranks.size();
    if (peer && *peer >= size) {
      return Status(Code::kInvalidArgument, std::string(what) + " rank " + std::to_string(*peer) +
                                                ", which is not in the group; it has ranks 0 to " +
                                                std::to_string(size - 1));
    }
    if (timeout && *timeout <= Duration::zero()) {
      return Status(Code::kInvalidArgument, std::string(what) + ": the timeout must be above zero");
    }
    message.owner = group;
    message.route = {group, &group->route};
    return Status::ok();
  }

  std::shared_ptr<MessageWork> submit(PendingMessage message, std::optional<std::uint32_t> peer,
                                      const std::optional<Duration>& timeout, const char* what) {
    auto work = std::make_shared<MessageWork>(callbacks);
    message.work = work;
    message.deadline = std::chrono::steady_clock::now() + timeout.value_or(duration_of(options.config.timeout_s));
    const std::scoped_lock lock(mutex);
    Status status = find_route(message.group, peer, timeout, what, message);
    if (status.is_ok()) {
      const char* const kind = message.is_send ? "send" : "receive";
      std::shared_ptr<void> lease;
      status = order->lend(OperationOrder::Borrower::kMessage, kind, message.data, message.memory, lease);
      work->set_lease(std::move(lease));
    }
    if (!status.is_ok()) {
      work->complete(status);
      return work;
    }
    if (peer) message.peer = message.route->ranks[*peer];
    if (message.collective) {  // In an elastic job it was numbered elsewhere.
      message.owner->next_op = std::max(message.owner->next_op.load(), message.collective->number + 1);
    }
    progress->submit(std::move(message));  // Under the lock, so that messages go in call order.
    return work;
  }

  std::shared_ptr<Work> send(const Send& message) {
    return submit(pending_message(message), message.to, message.timeout, "send to");
  }

  std::shared_ptr<ReceiveWork> receive(const Receive& message) {
    return submit(pending_message(message), message.from, message.timeout, "receive from");
  }

  void shutdown() {
    if (watch) watch->stop();  // Its messages need the runtime.
    {
      const std::scoped_lock lock(mutex);
      if (std::exchange(stopped, true)) return;
      for (const auto& [id, group] : groups.all()) {
        if (id != DeadlockWatch::kGroup) report_left(*group);
      }
    }
    const Instant deadline = std::chrono::steady_clock::now() + kGoodbye;
    if (progress->failure().is_ok()) {
      progress->cancel_unmatched_receives();
      progress->drain(deadline);
      if (progress->failure().is_ok()) say_goodbye(deadline);
    }
    std::unique_ptr<Progress> ended;
    {
      const std::scoped_lock lock(mutex);
      progress_stats = progress->stats();
      lane_traffic = progress->lane_traffic();
      ended = std::move(progress);
    }
    ended.reset();
    options.hub->leave();
    lane_threads.clear();
    lanes.clear();
    callbacks->close(std::chrono::steady_clock::now() + kLastCallbacks);
  }

  /// Lanes inside workers owe results to others until all have finished; with backup workers all do.
  void say_goodbye(Instant deadline) {
    const bool embedded = std::any_of(placement.lanes.begin(), placement.lanes.end(),
                                      [](const LanePlace& lane) { return lane.embedded; });
    if ((!embedded && placement.backup_workers == 0) || placement.workers == 1) return;
    try {
      options.hub->exchange("goodbye", {}, deadline, Wants::kNothing);
    } catch (const Error& error) {
      // Somebody is late or gone. This process has done its part and goes well; its user should know all the same.
      Logger logger(logger_options(options.config, "rank " + std::to_string(options.rank)));
      logger.log(LogLevel::kWarning, std::string("shut down without waiting for all: ") + error.what());
    }
  }

  RuntimeOptions options;
  Placement placement;
  std::vector<std::uint32_t> neighbours;
  std::uint32_t local_rank = 0;
  std::string description;
  std::string no_device_memory;                   // why_no_device_memory()
  const std::shared_ptr<CallbackPool> callbacks;  // Closed by shutdown(), never gone: calls come at any time.
  const std::shared_ptr<memory::Domain> domain =
      std::make_shared<memory::Domain>();  // Before all endpoints: goes last.
  std::shared_ptr<intra_node::Neighborhood> neighborhood;
  std::unique_ptr<Network> network;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<std::unique_ptr<LaneThread>> lane_threads;
  const std::shared_ptr<OperationOrder> order = std::make_shared<OperationOrder>();
  std::unique_ptr<Progress> progress;  // guarded by mutex where it goes away, in shutdown()
  std::shared_ptr<DamageCounters> damage;
  std::shared_ptr<tcp::StrangerCounters> strangers;
  std::shared_ptr<DriverSeat> seat;
  RuntimeStats progress_stats;            // after shutdown
  std::vector<PeerTraffic> lane_traffic;  // after shutdown
  std::unique_ptr<DeadlockWatch> watch;   // Null where nobody looks for ranks that wait for each other.
  std::shared_ptr<WaitTable> waits;       // Of the watch.
  mutable std::mutex mutex;
  GroupTable groups;  // guarded by mutex, as all below
  bool stopped = false;
};

Runtime::Runtime(RuntimeOptions options, Instant deadline)
    : impl_(std::make_unique<Impl>(std::move(options), deadline)) {}

Runtime::~Runtime() { shutdown(); }

std::uint32_t Runtime::rank() const { return impl_->options.rank; }
std::uint32_t Runtime::size() const { return impl_->placement.workers; }
std::uint32_t Runtime::local_rank() const { return impl_->local_rank; }
std::uint32_t Runtime::local_size() const { return static_cast<std::uint32_t>(impl_->neighbours.size()); }
std::uint32_t Runtime::servers() const { return impl_->placement.servers; }
std::string Runtime::description() const { return impl_->description; }

void Runtime::add_group(GroupId id, std::span<const std::uint32_t> ranks) { impl_->add_group(id, ranks); }

void Runtime::leave_group(GroupId id) { impl_->leave_group(id, std::nullopt); }
void Runtime::leave_group(GroupId id, std::uint64_t calls) { impl_->leave_group(id, calls); }

void Runtime::remove_group(GroupId id) {
  std::shared_ptr<GroupClosed> closed;
  {
    const std::scoped_lock lock(impl_->mutex);
    if (impl_->groups.remove(id) && impl_->progress) closed = impl_->progress->close_group(id);
  }
  if (closed) closed->wait();  // What is pending has deadlines, and the end of the runtime sets it too.
}

std::shared_ptr<void> Runtime::will_call() { return impl_->waits ? impl_->waits->hold() : nullptr; }

std::shared_ptr<void> Runtime::block(std::function<Awaited()> ask, bool from_pool) {
  return impl_->waits ? impl_->waits->enter(std::move(ask), from_pool) : nullptr;
}

void Runtime::set_background_caller(GroupId id, std::weak_ptr<const BackgroundCaller> caller) {
  const std::scoped_lock lock(impl_->mutex);
  if (const std::shared_ptr<Group> group = impl_->groups.find(id)) group->caller = std::move(caller);
}

std::shared_ptr<Work> Runtime::submit(const Request& request) { return impl_->submit(request); }

std::shared_ptr<Work> Runtime::run(const Request& request, Status& status) { return impl_->run(request, status); }

std::vector<std::uint32_t> Runtime::worker_hosts() const { return impl_->placement.host_of; }
std::uint64_t Runtime::late_part_bytes(GroupId id) const {
  const std::scoped_lock lock(impl_->mutex);
  const std::shared_ptr<Group> group = impl_->groups.find(id);
  return group && group->route.path != GroupRoute::Path::kAlone ? impl_->progress->part_bytes(group->route.path) : 0;
}

void Runtime::look_at_late_memory() { impl_->progress->look_at_late_memory(); }

DeviceMemoryUse Runtime::device_memory(GroupId id) const {
  const std::scoped_lock lock(impl_->mutex);
  return device_memory_use(impl_->no_device_memory, impl_->groups.find(id).get(), impl_->placement);
}

std::shared_ptr<void> Runtime::register_device_memory(std::span<std::byte> memory, std::uint32_t device,
                                                      std::shared_ptr<void> owner) {
  return std::make_shared<memory::Buffer>(impl_->domain->adopt(memory, {MemoryKind::kDevice, device}, owner));
}

std::optional<std::uint64_t> Runtime::take_number(GroupId id) {
  const std::scoped_lock lock(impl_->mutex);
  const std::shared_ptr<Group> group = impl_->groups.find(id);
  return group ? std::optional(group->next_op++) : std::nullopt;
}

std::shared_ptr<Work> Runtime::send(const Send& message) { return impl_->send(message); }
std::shared_ptr<ReceiveWork> Runtime::receive(const Receive& message) { return impl_->receive(message); }

Status Runtime::lend(std::string_view name, std::span<const std::byte> reads, std::span<const std::byte> writes,
                     std::shared_ptr<void>& lease) {
  return impl_->order->lend(OperationOrder::Borrower::kTensor, name, reads, writes, lease);
}

std::shared_ptr<std::byte> Runtime::allocate(std::size_t bytes) {
  {
    const std::scoped_lock lock(impl_->mutex);
    if (impl_->stopped) throw Error(Impl::shut_down());
  }
  if (bytes == 0) return nullptr;
  if (!impl_->neighborhood) return allocate_private(*impl_->domain, bytes);
  return allocate_in_arena(*impl_->domain, impl_->neighborhood, bytes);
}

void Runtime::abort(const std::string& reason) {
  const std::scoped_lock lock(impl_->mutex);
  if (!impl_->progress) return;
  impl_->progress->fail(Status(Code::kCancelled, reason));
  impl_->options.hub->report_failure(reason);
}

void Runtime::abort_group(GroupId id, const std::string& reason) {
  if (id == GroupId{0}) return abort(reason);
  const std::scoped_lock lock(impl_->mutex);
  const std::shared_ptr<Group> group = impl_->groups.find(id);
  if (!group || !impl_->progress || !group->closed.is_ok()) return;
  group->closed = Status(Code::kCancelled, reason);
  impl_->progress->abort_group(id, reason);
  // Also for what others call in it and this rank never would have.
  impl_->options.hub->report_group_abort({id, group->use}, reason);
}

void Runtime::give_up_pending(GroupId id, const std::string& reason) {
  const std::scoped_lock lock(impl_->mutex);
  const std::shared_ptr<Group> group = impl_->groups.find(id);
  if (group && impl_->progress && group->closed.is_ok()) impl_->progress->give_up_pending(id, reason);
}

Status Runtime::group_end(GroupId id, std::optional<std::uint64_t> op) const {
  const std::scoped_lock lock(impl_->mutex);
  return impl_->groups.end_of(id, op);
}

void Runtime::report_left_before(GroupId id, std::uint64_t calls) {
  impl_->options.hub->report_group_left({id, 0}, calls);
}
void Runtime::report_aborted_before(GroupId id, const std::string& reason) {
  impl_->options.hub->report_group_abort({id, 0}, reason);
}

Status Runtime::failure() const {
  const std::scoped_lock lock(impl_->mutex);
  if (!impl_->progress) return Impl::shut_down();
  impl_->progress->hear_news();
  return impl_->progress->failure();
}

void Runtime::give_up(const Status& status) {
  const std::scoped_lock lock(impl_->mutex);
  if (impl_->progress) impl_->progress->fail(status);
}

void Runtime::shutdown() { impl_->shutdown(); }

RuntimeStats Runtime::stats() const {
  const std::scoped_lock lock(impl_->mutex);
  RuntimeStats stats = impl_->progress ? impl_->progress->stats() : impl_->progress_stats;
  stats.damaged_messages = impl_->damage->damaged.load();
  stats.resent_messages = impl_->damage->resent.load();
  const tcp::StrangerCounters& strangers = *impl_->strangers;
  stats.strangers = strangers.bad.value() + strangers.slow.value() + strangers.failed.value();
  return stats;
}

std::vector<Straggler> Runtime::stragglers() { return gather_stragglers(*this, stats()); }

std::vector<ServerCounters> Runtime::server_counters() {
  std::vector<PeerTraffic> traffic;
  {
    const std::scoped_lock lock(impl_->mutex);
    if (impl_->stopped) throw Error(Impl::shut_down());
    traffic = impl_->progress ? impl_->progress->lane_traffic() : impl_->lane_traffic;
  }
  return gather_server_counters(*this, impl_->placement, traffic);
}

}  // namespace herring::runtime
