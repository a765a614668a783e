// The callers' side: coming and going, boundaries, messages.

#include "elastic/elastic_runtime.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/clock.h"
#include "core/status.h"
#include "core/thread.h"
#include "elastic/elastic_impl.h"
#include "runtime/messages.h"

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

}  // namespace

ElasticRuntime::Impl::Impl(const Home& given, Instant deadline)
    : home(given),
      elastic(given.config.elastic == Toggle::kOn),
      join_timeout(duration_of(given.config.join_timeout_s)),
      logger(logger_options(given.config, "elastic")),
      life(elastic) {
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
  for (;;) {
    const std::optional<Message> go = await_go(deadline);
    if (!go) {
      life.end().or_throw();
      throw Error(Code::kTimeout, "the rendezvous did not admit this worker in time: " + whom_it_waits_for());
    }
    const Status joined = join(*go, go->text, std::min(deadline, Clock::now() + join_timeout));
    if (joined.is_ok()) break;
    if (!elastic) throw Error(joined);
    send(MessageKind::kBroken, go->generation, joined.message());
    send(MessageKind::kReady, go->generation);
  }
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

std::shared_ptr<runtime::Runtime> ElasticRuntime::Impl::for_message(GroupId id, const runtime::Composed* collective,
                                                                    Status& status) {
  std::unique_lock lock(mutex);
  ++messages_used;
  changed.wait(lock, [this] { return !life.holds_messages(); });
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
    if (error.status().code() != Code::kShutdown || life.is_stopping()) throw;
    return nullptr;
  }
}

void ElasticRuntime::Impl::abort(const std::string& reason) {
  std::shared_ptr<runtime::Runtime> runtime;
  {
    const std::scoped_lock lock(mutex);
    if (!life.refusal().is_ok()) return;
    runtime = present.runtime;
  }
  give_up(Status(Code::kCancelled, reason));
  runtime->abort(reason);
  rendezvous->wake();
}

void ElasticRuntime::Impl::shutdown() {
  {
    std::unique_lock lock(mutex);
    if (!life.stop()) return;
    changed.wait_for(lock, kGoodbye, [this] { return unfinished == 0 || life.has_ended(); });
    // Others may have died before they told: what this one has, those left may still need.
    rendezvous->wake();
    changed.wait_for(lock, kSettling, [this] { return operations.empty() || life.has_ended(); });
    static_cast<void>(life.let_go());
    rendezvous->wake();
    changed.wait(lock, [this] { return life.has_stepped_down(); });
  }
  wait_for_retired();
  drop_beside();
  if (old.runtime) old.runtime->shutdown();
  if (present.runtime) present.runtime->shutdown();
  {
    const std::scoped_lock lock(mutex);
    static_cast<void>(life.advance(Event::kFinish));
  }
  rendezvous->wake();
  if (supervisor.joinable()) supervisor.join();
  bool is_well = false;
  {
    const std::scoped_lock lock(mutex);
    is_well = !life.has_ended();
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
  pass_boundary(lock, Departure::kBoundary, deadline);
  return true;
}

void ElasticRuntime::Impl::start_again(Instant deadline) {
  std::unique_lock lock(mutex);
  pass_boundary(lock, Departure::kAnew, deadline);
}

void ElasticRuntime::Impl::pass_boundary(std::unique_lock<std::mutex>& lock, Departure how, Instant deadline) {
  life.call_boundary(how);
  rendezvous->wake();
  const bool in_time =
      changed.wait_until(lock, deadline, [this] { return !life.awaits_boundary() || life.has_ended(); });
  life.forget_boundary();
  if (!in_time) {
    throw Error(Code::kTimeout, "the job could not be set up again: not all ranks reached the end of the step in time");
  }
  life.end().or_throw();
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
void ElasticRuntime::give_up_pending(GroupId id, const std::string& reason) { impl_->give_up_pending(id, reason); }
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
