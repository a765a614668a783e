// The callers' side: operations, groups, messages.

#include "elastic/elastic_runtime.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/clock.h"
#include "core/copy.h"
#include "core/status.h"
#include "core/thread.h"
#include "elastic/elastic_impl.h"
#include "runtime/messages.h"
#include "runtime/name_uses.h"
#include "runtime/validate.h"

namespace herring::elastic {
namespace {

using runtime::Request;
using runtime::Work;
using Clock = std::chrono::steady_clock;

// An orderly end waits so long for what is pending, and then for others to have what they may still ask for.
constexpr Duration kGoodbye = std::chrono::seconds(30);
constexpr Duration kSettling = std::chrono::seconds(10);
constexpr Duration kAnswer = std::chrono::seconds(1);
constexpr Duration kLastCallbacks = std::chrono::seconds(10);

/// Nothing where it is lost.
std::optional<std::uint32_t> rank_in(const Group& group, std::uint64_t member) {
  const auto place = std::find(group.members.begin(), group.members.end(), member);
  if (place == group.members.end()) return std::nullopt;
  return static_cast<std::uint32_t>(place - group.members.begin());
}

/// An all_gather for more workers than there are left.
bool has_blocks_of_the_lost(const Request& request, const Group& group) {
  if (request.descriptor.collective != Collective::kAllGather || request.input.empty()) return false;
  const std::size_t blocks = request.output.size() / request.input.size();
  return blocks > group.members.size() && blocks <= group.most_members;
}

/// What ends with one of these was cut short by the end of its generation; it is nobody's fault who called.
bool is_break(Code code) {
  return code == Code::kPeerLost || code == Code::kTransport || code == Code::kShutdown || code == Code::kCancelled;
}

}  // namespace

ElasticRuntime::Impl::Impl(const Home& given, Instant deadline)
    : home(given),
      elastic(given.config.elastic == Toggle::kOn),
      join_timeout(duration_of(given.config.join_timeout_s)),
      logger(logger_options(given.config, "elastic")) {
  groups[GroupId{0}] = Group{GroupId{0}, {}, {}, 0, 0};
  RendezvousClientOptions options;
  options.host = home.host;
  options.port = home.port;
  options.secret = home.config.secret;
  options.dead_after = duration_of(home.config.dead_after_s);
  options.enter.role = control::Role::kWorker;
  options.enter.rank = home.self.rank;
  options.enter.workers = home.workers;
  options.enter.pid = home.self.pid;
  options.enter.host = home.self.host_name;
  options.enter.is_elastic = elastic;
  rendezvous = std::make_unique<RendezvousClient>(options, deadline);
  while (!is_stable) {
    const std::optional<Message> go = await_go(deadline);
    if (!go) {
      ended.or_throw();
      throw Error(Code::kTimeout, "the rendezvous did not admit this worker in time: " + whom_it_waits_for());
    }
    const Status joined = join(*go, go->text, std::min(deadline, Clock::now() + join_timeout));
    if (joined.is_ok()) break;
    if (!elastic) throw Error(joined);
    send(MessageKind::kBroken, go->generation, joined.message());
    send(MessageKind::kReady, go->generation);
  }
  is_supervising = true;
  supervisor = start_thread("herring-superv", [this] { supervise(); });
}

std::string ElasticRuntime::Impl::whom_it_waits_for() {
  send(MessageKind::kQuery, 0);
  const Instant deadline = Clock::now() + kAnswer;
  while (Clock::now() < deadline) {
    Message message;
    if (!rendezvous->next(message, deadline)) continue;
    if (message.kind == MessageKind::kMissing || message.kind == MessageKind::kEnd) return message.text;
  }
  return "it did not say who is missing";
}

void ElasticRuntime::Impl::wait_for_room(std::unique_lock<std::mutex>& lock) {
  if (!elastic || kept_bytes <= home.config.journal_bytes) return;
  // Others are slower, or the report is still to go; never for ever: they have a deadline for each operation.
  rendezvous->wake();
  changed.wait_for(lock, duration_of(home.config.timeout_s),
                   [this] { return kept_bytes <= home.config.journal_bytes || !ended.is_ok() || is_stopping; });
}

/// What is called now is either in the plan that is being made, for all ranks alike, or after it: never beside it.
void ElasticRuntime::Impl::wait_for_plan(std::unique_lock<std::mutex>& lock) {
  changed.wait(lock, [this] { return !is_planning || !ended.is_ok() || is_stopping; });
}

/// The caller may not know yet who is in the group now: where others called before that changed, what they said counts.
Status ElasticRuntime::Impl::check(Request& request) const {
  if (!ended.is_ok()) return ended;
  if (is_stopping) return {Code::kShutdown, "herring has been shut down"};
  const auto found = groups.find(request.group);
  if (found == groups.end()) {
    return {Code::kInvalidArgument, "group " + std::to_string(request.group.value) + " does not exist on this rank"};
  }
  const Group& group = found->second;
  if (!group.closed.is_ok()) return group.closed;
  if (!journal.has_room(request.group.value, request.name)) {
    return runtime::no_room_for_name(*request.name, journal.names());
  }
  const OperationId id = journal.next(request.group.value, request.name);
  if (outcomes.contains(id)) return Status::ok();  // Nothing of this call is asked for any more.
  if (const auto root = straddling.find(id); root != straddling.end()) {
    request.descriptor.root = rank_in(group, root->second).value_or(request.descriptor.root);
  }
  runtime::GroupRoute route;
  route.ranks = group.ranks;
  route.index = group.index;
  const Status status = runtime::validate(request, route);
  if (!status.is_ok() && has_blocks_of_the_lost(request, group)) {
    return {Code::kPeerLost, to_string(request.descriptor) + kOthersAreIn};
  }
  return status;
}

std::shared_ptr<Work> ElasticRuntime::Impl::submit(const Request& request) {
  auto work = std::make_shared<runtime::PendingWork>(callbacks);
  std::unique_lock lock(mutex);
  wait_for_room(lock);
  wait_for_plan(lock);
  Operation operation;
  operation.request = request;
  Status status = check(operation.request);
  if (status.is_ok()) {
    operation.call = std::make_shared<runtime::OrderedCall>(
        runtime::OperationOrder::call_of(operation.request, groups.at(request.group).index));
    status = order->check(*operation.call);
  }
  if (!status.is_ok()) {
    work->complete(status);
    return work;
  }
  operation.request.name.reset();
  operation.request.is_waited_for = false;
  operation.work = work;
  const Group& group = groups.at(request.group);
  if (request.descriptor.collective == Collective::kBroadcast) {
    const std::uint32_t root = operation.request.descriptor.root;
    operation.root = root < group.members.size() ? group.members[root] : 0;  // Settled already.
  }
  Journal::Submission submission;
  submission.group = request.group.value;
  if (request.name) submission.name = *request.name;
  submission.collective = request.descriptor.collective;
  submission.bytes = request.output.size();
  submission.root = operation.root;
  submission.members = static_cast<std::uint32_t>(group.members.size());
  const OperationId id = journal.submit(submission);
  Operation& kept = operations.insert_or_assign(id, std::move(operation)).first->second;
  ++unfinished;
  order->enter(kept.call);
  if (!take_outcome(id, kept) && kept.call->waits_for == 0) begin(id, kept);
  return work;
}

/// What it reads is what it is to read from now on.
void ElasticRuntime::Impl::begin(const OperationId& id, Operation& operation) {
  const Request& request = operation.request;
  operation.has_begun = true;
  if (elastic && runtime::overlap(request.input, request.output)) {
    operation.source.assign(request.input.begin(), request.input.end());
  }
  if (is_stable) start(id, operation);
}

/// Those that have waited for others which have ended.
void ElasticRuntime::Impl::begin_ready() {
  if (is_beginning) return;  // The loop below goes round once more.
  is_beginning = true;
  while (std::exchange(may_begin, false)) {
    std::vector<OperationId> ready;
    for (const auto& [id, operation] : operations) {
      if (!operation.has_begun && operation.call->waits_for == 0 && !operation.work->is_done()) ready.push_back(id);
    }
    for (const OperationId& id : ready) {
      if (const auto found = operations.find(id); found != operations.end()) begin(id, found->second);
    }
  }
  is_beginning = false;
}

/// True where it was settled before this rank called it.
bool ElasticRuntime::Impl::take_outcome(const OperationId& id, Operation& operation) {
  if (const auto root = straddling.find(id); root != straddling.end()) {
    operation.root = root->second;
    journal.set_root(id, operation.root);
    straddling.erase(root);
  }
  const auto found = outcomes.find(id);
  if (found == outcomes.end()) return false;
  Outcome outcome = std::move(found->second);
  outcomes.erase(found);
  const std::size_t bytes = outcome.result ? outcome.result->size() : 0;
  if (outcome.status.is_ok() && bytes != operation.request.output.size()) {
    outcome.status = Status(Code::kMismatch, to_string(operation.request.descriptor) + ": on other ranks it has " +
                                                 std::to_string(bytes) + " bytes, here " +
                                                 std::to_string(operation.request.output.size()));
  }
  if (outcome.status.is_ok()) {
    if (bytes > 0) copy_bytes(*outcome.result, operation.request.output);
    operation.result = outcome.result;
    kept_bytes += bytes;
  }
  end_operation(id, operation, outcome.status);
  return true;
}

bool ElasticRuntime::Impl::is_old(const OperationId& id) const {
  if (!old.runtime) return false;
  const auto group = cutoff.find(id.group);
  const Record* record = journal.find(id);
  if (group == cutoff.end() || record == nullptr) return false;
  if (record->name == 0) return id.key < group->second.next;
  const auto uses = group->second.uses.find(record->name);
  return uses != group->second.uses.end() && record->use < uses->second;
}

void ElasticRuntime::Impl::start(const OperationId& id, Operation& operation) {
  Request request = operation.request;
  request.key = id.key;
  if (!operation.source.empty()) request.input = operation.source;
  const Group& group = groups.at(request.group);
  if (request.descriptor.collective == Collective::kBroadcast) {
    if (const auto root = rank_in(group, operation.root)) {
      request.descriptor.root = *root;
    } else if (request.descriptor.root < group.members.size()) {
      // It is gone, and nobody else had called yet: the number means what it means to those who call only now.
      operation.root = group.members[request.descriptor.root];
      journal.set_root(id, operation.root);
    } else {
      return end_operation(id, operation,
                           Status(Code::kPeerLost, to_string(request.descriptor) + ": its root is lost"));
    }
  }
  // All get the sum, and who wants it is another number to those who call after a loss: it is not compared.
  if (request.descriptor.collective == Collective::kReduce) request.descriptor.root = 0;
  const bool goes_old = is_old(id);
  const Generation& generation = goes_old ? old : present;
  if (goes_old) ++old_unfinished;
  const std::uint64_t run = generation.number;
  operation.run = run;
  generation.runtime->submit(request)->on_done([this, id, run](const Status& status) { finished(id, run, status); });
}

/// On a thread of the generation's runtime.
void ElasticRuntime::Impl::finished(const OperationId& id, std::uint64_t run, const Status& status) {
  std::span<const std::byte> output;
  {
    const std::scoped_lock lock(mutex);
    const auto found = operations.find(id);
    if (found == operations.end() || found->second.run != run) return;
    output = found->second.request.output;
  }
  // Its caller does not know yet that it is done: nobody else touches the memory.
  Data result;
  if (status.is_ok() && elastic) result = std::make_shared<std::vector<std::byte>>(output.begin(), output.end());
  const std::scoped_lock lock(mutex);
  const auto found = operations.find(id);
  if (found == operations.end() || found->second.run != run) return;
  Operation& operation = found->second;
  const bool is_cut_short = elastic && ended.is_ok() && !status.is_ok() && is_break(status.code());
  if (is_cut_short && id.group != 0 && is_supervising && end_of(id, run).is_ok()) {
    doubtful.insert_or_assign(id, Doubt{run, status, Clock::now()});
    rendezvous->wake();
    return;
  }
  if (run == old.number && old_unfinished > 0) --old_unfinished;
  if (is_cut_short && end_of(id, run).is_ok()) return break_off(operation, status);
  if (result) {
    kept_bytes += result->size();
    operation.result = std::move(result);
  }
  end_operation(id, operation, status);
}

void ElasticRuntime::Impl::end_operation(const OperationId& id, Operation& operation, const Status& status) {
  --unfinished;
  operation.run = 0;
  operation.source = {};
  may_begin |= order->leave(*operation.call);
  operation.work->complete(status);
  if (status.is_ok()) {
    journal.complete(id);
  } else {
    journal.fail(id);
  }
  const auto group = groups.find(GroupId{id.group});
  bool is_over = group == groups.end() || !group->second.closed.is_ok();  // Nobody calls it any more.
  if (!is_over && !status.is_ok()) is_over = !end_of(id, present.number).is_ok();
  if (elastic && !is_over) {
    if (unreported.empty() || kept_bytes > home.config.journal_bytes / 2) rendezvous->wake();
    unreported.push_back(id);
  } else {
    if (elastic && group == groups.end())
      unreported.push_back(id);  // Those who stay in the group keep it until all have it.
    forget(id);
    if (old.runtime) rendezvous->wake();
  }
  begin_ready();
  changed.notify_all();
}

void ElasticRuntime::Impl::forget(const OperationId& id) {
  const auto found = operations.find(id);
  if (found == operations.end() || !found->second.work->is_done()) return;
  if (found->second.result) kept_bytes -= found->second.result->size();
  operations.erase(found);
  journal.forget(id);
}

std::optional<std::uint64_t> ElasticRuntime::Impl::take_number(GroupId id) {
  std::unique_lock lock(mutex);
  wait_for_plan(lock);
  return groups.contains(id) ? std::optional(journal.take_number(id.value)) : std::nullopt;
}

std::shared_ptr<runtime::Runtime> ElasticRuntime::Impl::for_message(GroupId id, const runtime::Composed* collective,
                                                                    Status& status) {
  std::unique_lock lock(mutex);
  ++messages_used;
  changed.wait(lock, [this] { return (is_stable && !holds_messages) || !ended.is_ok() || is_stopping; });
  const auto group = groups.find(id);
  if (collective != nullptr && group != groups.end() && collective->number < group->second.first_of_messages) {
    status = Status(Code::kPeerLost, to_string(collective->descriptor) +
                                         ": another rank called it before the job was set up again, and there "
                                         "it failed; call it again");
  }
  return present.runtime;
}

std::shared_ptr<runtime::ReceiveWork> ElasticRuntime::Impl::refused_message(const Status& why) const {
  auto work = std::make_shared<runtime::MessageWork>(callbacks);
  work->complete(why);
  return work;
}

/// Between two generations there is no shared memory to be had, and the caller takes its own.
std::shared_ptr<std::byte> ElasticRuntime::Impl::allocate(std::size_t bytes) {
  try {
    return now()->allocate(bytes);
  } catch (const Error& error) {
    const std::scoped_lock lock(mutex);
    if (error.status().code() != Code::kShutdown || is_stopping) throw;
    return nullptr;
  }
}

void ElasticRuntime::Impl::abort(const std::string& reason) {
  std::shared_ptr<runtime::Runtime> runtime;
  {
    const std::scoped_lock lock(mutex);
    if (!ended.is_ok() || is_stopping) return;
    runtime = present.runtime;
  }
  give_up(Status(Code::kCancelled, reason));
  runtime->abort(reason);
  rendezvous->wake();
}

void ElasticRuntime::Impl::shutdown() {
  {
    std::unique_lock lock(mutex);
    if (std::exchange(is_stopping, true)) return;
    changed.wait_for(lock, kGoodbye, [this] { return unfinished == 0 || !ended.is_ok(); });
    // Others may have died before they told: what this one has, those left may still need.
    rendezvous->wake();
    changed.wait_for(lock, kSettling, [this] { return operations.empty() || !ended.is_ok(); });
    supervises = false;
    rendezvous->wake();
    changed.wait(lock, [this] { return !is_supervising; });
  }
  wait_for_retired();
  drop_beside();
  if (old.runtime) old.runtime->shutdown();
  if (present.runtime) present.runtime->shutdown();
  {
    const std::scoped_lock lock(mutex);
    is_gone = true;
  }
  rendezvous->wake();
  if (supervisor.joinable()) supervisor.join();
  bool is_well = false;
  {
    const std::scoped_lock lock(mutex);
    is_well = ended.is_ok();
  }
  if (is_well) {
    send(MessageKind::kLeave, present.number);
    give_up(Status(Code::kShutdown, "the runtime was shut down before this operation finished"));
  }
  rendezvous->close();
  callbacks->close(Clock::now() + kLastCallbacks);
}

bool ElasticRuntime::Impl::let_in(Instant deadline) {
  constexpr std::uint8_t kBusy = 2;  // Some rank has something under way: not now.
  std::uint8_t wanted = 0;
  {
    const std::scoped_lock lock(mutex);
    wanted = unfinished > 0 ? kBusy : newcomers > 0 ? 1 : 0;
  }
  Request request;
  request.name = "herring.elastic.step";
  request.descriptor.dtype = DataType::kUInt8;
  request.descriptor.reduce = ReduceOp::kMax;
  request.descriptor.dims = 1;
  request.descriptor.shape[0] = 1;
  request.input = std::as_bytes(std::span(&wanted, 1));
  request.output = std::as_writable_bytes(std::span(&wanted, 1));
  const std::shared_ptr<Work> asked = submit(request);
  asked->wait(Instant::max());  // It has a deadline of its own.
  asked->status().or_throw();
  if (wanted != 1) return false;
  std::unique_lock lock(mutex);
  pass_boundary(lock, deadline);
  return true;
}

void ElasticRuntime::Impl::start_again(Instant deadline) {
  std::unique_lock lock(mutex);
  starts_again = true;
  pass_boundary(lock, deadline);
}

void ElasticRuntime::Impl::pass_boundary(std::unique_lock<std::mutex>& lock, Instant deadline) {
  boundary_reached = false;
  boundary_wanted = true;
  rendezvous->wake();
  const bool in_time = changed.wait_until(lock, deadline, [this] { return !boundary_wanted || !ended.is_ok(); });
  boundary_wanted = false;
  starts_again = false;
  if (!in_time) {
    throw Error(Code::kTimeout, "the job could not be set up again: not all ranks reached the end of the step in time");
  }
  ended.or_throw();
}

/// Who leaves before all have what it has takes away what they still need to come to the boundary.
bool ElasticRuntime::Impl::is_ready_for_boundary() const {
  if (!boundary_wanted || !is_stable) return false;
  if (!starts_again) return operations.empty();
  // What failed did so on all of them, whether they have called it yet or never will.
  return std::none_of(operations.begin(), operations.end(), [](const auto& entry) {
    return entry.second.work->is_done() && entry.second.work->status().is_ok();
  });
}

/// Nothing runs any more.
void ElasticRuntime::Impl::forget_everything() {
  for (auto& [id, operation] : operations) {
    if (operation.work->is_done()) continue;
    --unfinished;
    order->leave(*operation.call);
    operation.work->complete(Status(Code::kCancelled, "the job starts again from an earlier state"));
  }
  operations.clear();
  outcomes.clear();
  straddling.clear();
  unreported.clear();
  kept_bytes = 0;
  journal.restart();
}

ElasticRuntime::ElasticRuntime(const Home& home, Instant deadline) : impl_(std::make_unique<Impl>(home, deadline)) {}
ElasticRuntime::~ElasticRuntime() = default;

std::uint32_t ElasticRuntime::rank() const { return impl_->now()->rank(); }
std::uint32_t ElasticRuntime::size() const { return impl_->now()->size(); }
std::uint32_t ElasticRuntime::local_rank() const { return impl_->now()->local_rank(); }
std::uint32_t ElasticRuntime::local_size() const { return impl_->now()->local_size(); }
std::uint32_t ElasticRuntime::servers() const { return impl_->now()->servers(); }
std::string ElasticRuntime::description() const {
  return impl_->now()->description() + (impl_->elastic ? ", elastic" : "");
}
void ElasticRuntime::add_group(GroupId id, std::span<const std::uint32_t> ranks) { impl_->add_group(id, ranks); }
void ElasticRuntime::leave_group(GroupId id) { impl_->leave_group(id); }
void ElasticRuntime::remove_group(GroupId id) { impl_->remove_group(id); }
std::shared_ptr<Work> ElasticRuntime::submit(const Request& request) { return impl_->submit(request); }
std::shared_ptr<Work> ElasticRuntime::send(const runtime::Send& message) {
  Status refused;
  const auto runtime = impl_->for_message(message.group, message.collective.get(), refused);
  return refused.is_ok() ? runtime->send(message) : impl_->refused_message(refused);
}
std::shared_ptr<runtime::ReceiveWork> ElasticRuntime::receive(const runtime::Receive& message) {
  Status refused;
  const auto runtime = impl_->for_message(message.group, message.collective.get(), refused);
  return refused.is_ok() ? runtime->receive(message) : impl_->refused_message(refused);
}
std::optional<std::uint64_t> ElasticRuntime::take_number(GroupId group) { return impl_->take_number(group); }
std::shared_ptr<std::byte> ElasticRuntime::allocate(std::size_t bytes) { return impl_->allocate(bytes); }
void ElasticRuntime::abort(const std::string& reason) { impl_->abort(reason); }
void ElasticRuntime::abort_group(GroupId id, const std::string& reason) { impl_->abort_group(id, reason); }
void ElasticRuntime::shutdown() { impl_->shutdown(); }

runtime::RuntimeStats ElasticRuntime::stats() const {
  const std::scoped_lock lock(impl_->mutex);
  runtime::RuntimeStats all = impl_->past;
  for (const auto& runtime : {impl_->present.runtime, impl_->old.runtime, impl_->retired}) {
    if (runtime) all += runtime->stats();
  }
  return all;
}

std::vector<runtime::Straggler> ElasticRuntime::stragglers() {
  return impl_->ask([](runtime::Runtime& runtime) { return runtime.stragglers(); });
}

std::vector<runtime::ServerCounters> ElasticRuntime::server_counters() {
  return impl_->ask([](runtime::Runtime& runtime) { return runtime.server_counters(); });
}

std::uint64_t ElasticRuntime::generation() const {
  const std::scoped_lock lock(impl_->mutex);
  return impl_->present.number;
}

std::uint64_t ElasticRuntime::job_id() const {
  const std::scoped_lock lock(impl_->mutex);
  return impl_->present.hub->job_id();
}

std::vector<control::Member> ElasticRuntime::members() const {
  const std::scoped_lock lock(impl_->mutex);
  return impl_->present.hub->workers();
}

std::vector<control::Member> ElasticRuntime::server_processes() const {
  const std::scoped_lock lock(impl_->mutex);
  return impl_->present.hub->servers();
}

std::uint32_t ElasticRuntime::group_size(GroupId id) const {
  const std::scoped_lock lock(impl_->mutex);
  const auto found = impl_->groups.find(id);
  return found == impl_->groups.end() ? 0 : static_cast<std::uint32_t>(found->second.members.size());
}

std::uint32_t ElasticRuntime::waiting() const {
  const std::scoped_lock lock(impl_->mutex);
  return impl_->newcomers;
}

bool ElasticRuntime::let_in(Instant deadline) { return impl_->let_in(deadline); }
void ElasticRuntime::start_again(Instant deadline) { impl_->start_again(deadline); }

void ElasticRuntime::on_change(std::function<void(const Change&)> callback) {
  const std::scoped_lock lock(impl_->mutex);
  impl_->change_callback = std::move(callback);
}

}  // namespace herring::elastic
