#include "collectives/fusion.h"

#include "collectives/fusion_impl.h"
#include "collectives/scale.h"
#include "core/thread.h"

namespace herring::collectives {
namespace {

// So long a driver waits for the network at most before it looks up: others may want its place, or its caller signals.
constexpr Duration kSlice = std::chrono::milliseconds(50);

// The background thread's: what it waits for ends also where this rank closes. What comes meanwhile may get late.
constexpr Duration kBackgroundSlice = std::chrono::seconds(1);

// Between two looks of the background thread, where the cycle is not shorter.
constexpr Duration kLeastSleep = std::chrono::microseconds(500);

// Who closes stays for so long where something is under way outside that nobody else calls: who has it pending in a
// round has heard of it by then.
constexpr Duration kTelling = std::chrono::seconds(5);

// What has ended on another rank of a group that all are closing ends here within so long, or that rank never calls it.
constexpr Duration kEnding = std::chrono::milliseconds(500);

// Who closes a group with nothing left waits for the other ranks of it for so long: they may have something left, and
// end it when they know that it comes nowhere else.
constexpr Duration kStaying = std::chrono::seconds(1);

/// Never past the clock's end.
Instant soon(Instant limit) { return std::min(limit, now() + kSlice); }

runtime::Awaited awaits(const std::shared_ptr<runtime::Work>& work, std::string text) {
  return {work.get(), std::move(text), work};
}

Error in_flight(std::string_view name) {
  return {Code::kInvalidArgument, "an operation named " + std::string(name) +
                                      " is in flight already (duplicate name); synchronize it first, or choose another "
                                      "name"};
}

}  // namespace

Fusion::Fusion(std::shared_ptr<runtime::Communicator> runtime, GroupId group, std::span<const std::uint32_t> ranks,
               FusionSettings settings, GoAlone go_alone)
    : impl_(std::make_shared<Impl>(runtime, group, ranks, settings, std::move(go_alone))) {
  runtime->set_background_caller(group, impl_);
}
Fusion::~Fusion() { impl_->close(now(), Leaving::kJob); }
TensorRow Fusion::place(std::span<const NamedBytes> tensors) { return impl_->place(tensors); }
Fusion::Counters Fusion::counters() const { return impl_->counters(); }
std::optional<Ticket> Fusion::submit(const Tensor& tensor) { return impl_->submit(tensor); }
std::optional<Ticket> Fusion::queue_outside(std::string_view name, std::shared_ptr<void> owner) {
  return impl_->queue_outside(name, std::move(owner));
}
bool Fusion::go_outside(std::string_view name) { return impl_->go_outside(name); }
Fusion::State Fusion::state(Ticket ticket) const { return impl_->state(ticket); }
bool Fusion::has_pending(std::string_view name) const { return impl_->has_pending(name); }
Fusion::Outcome Fusion::outcome(Ticket ticket) const { return impl_->outcome(ticket); }
Fusion::State Fusion::poll(Ticket ticket) { return impl_->poll(ticket); }
Fusion::State Fusion::wait(Ticket ticket, Instant deadline) { return impl_->wait(ticket, deadline); }
Status Fusion::forget(Ticket ticket) { return impl_->forget(ticket); }
void Fusion::on_end(Ticket ticket, std::function<void(State)> callback) { impl_->on_end(ticket, std::move(callback)); }
void Fusion::went_outside(std::string_view name) { impl_->went_outside(name); }
void Fusion::came_back(std::string_view name) { impl_->came_back(name); }
void Fusion::pause() { impl_->pause(); }
void Fusion::resume() { impl_->resume(); }
void Fusion::close(Instant deadline, Leaving leaving) { impl_->close(deadline, leaving); }
runtime::Awaited Fusion::awaited(Ticket ticket) const { return impl_->awaited(ticket); }
std::shared_ptr<void> Fusion::block(Ticket ticket) { return impl_->block(ticket); }

Fusion::Impl::Impl(std::shared_ptr<runtime::Communicator> runtime, GroupId group, std::span<const std::uint32_t> ranks,
                   FusionSettings settings, GoAlone go_alone)
    : runtime_(std::move(runtime)),
      group_(group),
      settings_(settings),
      go_alone_(std::move(go_alone)),
      memory_(runtime_),
      engine_(settings.engine),
      next_ticket_(kFirstTicket | Ticket{group.value & 0xFFFFF} << 40 | Ticket{settings.series & 0xF} << 36) {
  runtime_->add_group(group_, ranks);
}

Fusion::Impl::~Impl() = default;

TensorRow Fusion::Impl::place(std::span<const NamedBytes> tensors) {
  TensorRow row = make_row(*runtime_, tensors);
  const std::scoped_lock lock(mutex_);
  places_.add(tensors, row);
  return row;
}

Fusion::Counters Fusion::Impl::counters() const {
  const std::scoped_lock lock(mutex_);
  return counters_;
}

/// How it comes to the engine. None: it goes outside.
std::optional<Placement> Fusion::Impl::admit(const Record& record) {
  const TensorSpec& spec = record.spec;
  const bool is_scaled = spec.prescale != 1 || spec.postscale != 1;
  if (is_scaled && !may_scale(spec.descriptor.dtype)) return std::nullopt;
  const PlacedMemory::Place* place = place_of(record);
  const std::uint64_t number = place != nullptr ? place->number : 0;
  if (spec.descriptor.op_bytes <= settings_.tensor_bytes) return Placement{number, false};
  // Also where rank 0 has got other memory for it: the plan with the new place comes first, as for a small one.
  if (engine_.knows_place(record.name, spec)) return Placement{number, place == nullptr};
  if (place != nullptr) engine_.propose(record.name, spec, number);
  return std::nullopt;
}

/// The place of its name, where it lies there and may be reduced there. What is changed before the operation, or may
/// need a second one, is copied.
const PlacedMemory::Place* Fusion::Impl::place_of(const Record& record) const {
  if (places_.is_empty() || record.spec.prescale != 1 || settings_.checks_finite) return nullptr;
  return record.source.data() == record.result.data() ? places_.find(record.name, record.result) : nullptr;
}

std::optional<Ticket> Fusion::Impl::submit(const Tensor& tensor) {
  Lock lock(mutex_);
  if (is_closed_) return std::nullopt;
  Record record;
  record.name = tensor.name;
  record.spec = tensor.spec;
  record.source = tensor.source;
  record.result = tensor.result;
  record.owner = tensor.owner;
  const std::optional<Placement> placement = admit(record);
  if (!placement) {
    return settings_.queues_names ? queue_outside(lock, tensor.name, tensor.owner) : std::nullopt;
  }
  Ticket& slot = slot_of(record.name);
  if (slot != 0) {
    if (!settings_.queues_names) throw in_flight(tensor.name);
    return enqueue(slot, std::move(record));
  }
  // What is under way outside already has its place there, also where it shares this memory.
  const Status status = engine_.is_outside(tensor.name) ? Status::ok() : lend(record);
  if (!status.is_ok()) throw Error(status);
  const Ticket ticket = next_ticket_++;
  const Instant when = now();
  if (!engine_.submit(ticket, tensor.name, tensor.spec, when, *placement)) {
    if (settings_.queues_names) engine_.went_outside(tensor.name, when);
    return std::nullopt;
  }
  slot = ticket;
  record.slot = &slot;
  records_.add(ticket, std::move(record));
  wake_driver(lock, when);
  return ticket;
}

Ticket& Fusion::Impl::slot_of(const std::string& name) {
  if (names_.size() >= most_names_) {
    std::erase_if(names_, [](const auto& each) { return each.second == 0; });
    most_names_ = std::max(kManyNames, 2 * names_.size());
  }
  return names_.try_emplace(name, 0).first->second;
}

/// 0: the name is free.
Ticket Fusion::Impl::latest_use(std::string_view name) const {
  const auto found = names_.find(std::string(name));
  return found == names_.end() ? 0 : found->second;
}

Status Fusion::Impl::lend(Record& record) const {
  const bool is_in_place = record.source.data() == record.result.data();
  return runtime_->lend(record.name, is_in_place ? std::span<const std::byte>() : record.source, record.result,
                        record.lease);
}

// --- uses of a name that follow each other
// ----------------------------------------------------------------------------

std::optional<Ticket> Fusion::Impl::queue_outside(std::string_view name, std::shared_ptr<void> owner) {
  Lock lock(mutex_);
  return queue_outside(lock, name, std::move(owner));
}

std::optional<Ticket> Fusion::Impl::queue_outside(Lock& lock, std::string_view name, std::shared_ptr<void> owner) {
  const auto found = names_.find(std::string(name));
  if (found == names_.end() || found->second == 0) {
    engine_.went_outside(name, now());
    wake_driver(lock);
    return std::nullopt;
  }
  Record record;
  record.name = name;
  record.owner = std::move(owner);
  record.is_outside = true;
  return enqueue(found->second, std::move(record));
}

bool Fusion::Impl::go_outside(std::string_view name) {
  Lock lock(mutex_);
  if (latest_use(name) != 0) return false;
  engine_.went_outside(name, now());
  wake_driver(lock);
  return true;
}

Ticket Fusion::Impl::enqueue(Ticket& latest, Record record) {
  record.slot = &latest;
  const Ticket ticket = next_ticket_++;
  records_.at(latest).next = ticket;
  latest = ticket;
  records_.add(ticket, std::move(record));
  return ticket;
}

/// In turn, not one inside of the other: a name may have thousands of uses.
void Fusion::Impl::begin_next(Lock& lock) {
  if (next_ones_.empty() || std::exchange(is_beginning_, true)) return;
  while (!next_ones_.empty()) {
    const Ticket ticket = next_ones_.back();
    next_ones_.pop_back();
    begin_queued(lock, ticket);
  }
  is_beginning_ = false;
}

void Fusion::Impl::begin_queued(Lock& lock, Ticket ticket) {
  Record& record = records_.at(ticket);
  if (is_closed_) return end(lock, {&ticket, 1}, State::kDone, explained(closed(), {&ticket, 1}));
  if (!record.is_outside && !engine_.is_outside(record.name)) {
    const Status status = lend(record);
    if (!status.is_ok()) return end(lock, {&ticket, 1}, State::kDone, status);
    const std::optional<Placement> placement = admit(record);
    if (placement && engine_.submit(ticket, record.name, record.spec, now(), *placement)) return wake_driver(lock);
  }
  go_alone(lock, {&ticket, 1});
}

Fusion::State Fusion::Impl::state(Ticket ticket) const {
  const std::scoped_lock lock(mutex_);
  const auto found = records_.find(ticket);
  return found == records_.end() ? State::kDone : found->second.state;
}

bool Fusion::Impl::has_pending(std::string_view name) const {
  const std::scoped_lock lock(mutex_);
  const Ticket latest = latest_use(name);
  if (latest != 0 && records_.at(latest).state == State::kPending) return true;
  // Their names are free already, for the operations that follow.
  return std::ranges::any_of(going_alone_, [&](Ticket ticket) { return records_.at(ticket).name == name; });
}

Fusion::Outcome Fusion::Impl::outcome(Ticket ticket) const {
  const std::scoped_lock lock(mutex_);
  const auto found = records_.find(ticket);
  if (found == records_.end()) return {};
  return {found->second.state, found->second.status};
}

Fusion::State Fusion::Impl::poll(Ticket ticket) {
  const std::scoped_lock lock(mutex_);
  const auto found = records_.find(ticket);
  if (found == records_.end()) return State::kDone;
  if (found->second.state == State::kDone) free_name(found->second);
  return found->second.state;
}

void Fusion::Impl::free_name(Record& record) {
  if (settings_.queues_names) return;  // end() does it.
  if (Ticket* const slot = std::exchange(record.slot, nullptr)) *slot = 0;
}

Fusion::State Fusion::Impl::wait(Ticket ticket, Instant deadline) {
  Lock lock(mutex_);
  ++waiters_;
  State result = State::kDone;
  while (true) {
    const auto found = records_.find(ticket);
    if (found == records_.end()) break;
    result = found->second.state;
    if (result != State::kPending || now() >= deadline) break;
    if (help(lock, ticket, soon(deadline))) continue;
    drive(lock, true, soon(deadline));
  }
  --waiters_;
  stop_driving(lock);
  return result;
}

/// Does what there is to do, or waits for who does.
void Fusion::Impl::drive(Lock& lock, bool is_waiter, Instant limit) {
  if (is_driven_) {
    ended_.wait_until(lock, limit);
    return;
  }
  is_driven_ = true;
  engine_.flush();
  Instant next_look = Instant::max();
  const bool has_moved = step(lock, is_waiter, limit, next_look);
  is_driven_ = false;
  if (!has_moved) ended_.wait_until(lock, std::min(limit, next_look));
}

/// A waiter leaves: what it drove goes on without it.
void Fusion::Impl::stop_driving(Lock& lock) {
  if (waiters_ > 0) {
    if (!is_driven_) ended_.notify_all();
    return;
  }
  wake_driver(lock);
  watch_all(lock);
}

Status Fusion::Impl::forget(Ticket ticket) {
  const std::scoped_lock lock(mutex_);
  const auto found = records_.find(ticket);
  if (found == records_.end()) return Status::ok();
  if (found->second.state == State::kPending) {
    return {Code::kInvalidArgument, "allreduce '" + found->second.name + "' has not ended"};
  }
  free_name(found->second);
  return records_.take(found).status;
}

void Fusion::Impl::on_end(Ticket ticket, std::function<void(State)> callback) {
  Lock lock(mutex_);
  const auto found = records_.find(ticket);
  if (found != records_.end() && found->second.state == State::kPending) {
    found->second.on_end.push_back(std::move(callback));
    return;
  }
  const State state = found == records_.end() ? State::kDone : found->second.state;
  lock.unlock();
  callback(state);
}

void Fusion::Impl::went_outside(std::string_view name) {
  Lock lock(mutex_);
  if (latest_use(name) != 0) throw in_flight(name);
  engine_.went_outside(name, now());
  wake_driver(lock);
}

void Fusion::Impl::came_back(std::string_view name) {
  const std::scoped_lock lock(mutex_);
  engine_.came_back(name);
  if (!engine_.has_outside()) ended_.notify_all();  // close() may wait for it.
}

void Fusion::Impl::pause() {
  Lock lock(mutex_);
  engine_.pause();
  wake_driver(lock);
}

void Fusion::Impl::resume() {
  const std::scoped_lock lock(mutex_);
  engine_.resume();
}

void Fusion::Impl::close(Instant deadline, Leaving leaving) {
  Lock lock(mutex_);
  leaving_ = leaving;
  engine_.close(leaving == Leaving::kGroup);
  const Instant begun = now();
  Instant ended = Instant::max();
  const auto has_work = [&] {
    const Instant when = now();
    if (engine_.has_ended()) ended = std::min(ended, when);
    const bool may_end =
        engine_.is_anything_outside() && (when - ended < kEnding || engine_.is_anything_outside_everywhere());
    const bool is_called = engine_.has_ended() ? may_end : engine_.has_outside();
    const bool tells = settings_.queues_names && is_called && when < begun + kTelling;
    const bool stays = leaving == Leaving::kGroup && engine_.wants_round() && when < begun + kStaying;
    return when < deadline && (!engine_.is_idle() || tells || stays);
  };
  ++waiters_;
  while (!is_closed_ && has_work()) {
    if (!watch_all(lock)) drive(lock, false, soon(deadline));
  }
  --waiters_;
  if (std::exchange(is_closed_, true)) return;
  background_.notify_all();
  std::thread thread = std::move(thread_);
  const bool is_under_way = exchange_.has_value();
  lock.unlock();
  // Who still waits in a round with this rank waits in vain: they hear of it. Their buckets go on.
  if (is_under_way) runtime_->give_up_pending(group_, "this rank has shut down or left the group");
  if (thread.joinable()) thread.join();
  lock.lock();
  end_pending(lock);
  if (!exchange_) return;
  // Its end may come later, and until then the runtime has its memory.
  const auto kept = std::make_shared<Exchange>(std::move(*exchange_));
  exchange_.reset();
  lock.unlock();
  kept->work->on_done([kept](const Status&) {});
}

// --- who waits for whom ----------------------------------------------------------------------------------------------

runtime::Awaited Fusion::Impl::awaited(Ticket ticket) const {
  const std::scoped_lock lock(mutex_);
  const auto found = records_.find(ticket);
  if (found == records_.end() || found->second.state != State::kPending) return {};
  const std::shared_ptr<Flight> flight = flight_of(ticket);
  return awaits(flight ? flight->work : exchange_ ? exchange_->work : nullptr, "'" + found->second.name + "'");
}

std::shared_ptr<void> Fusion::Impl::block(Ticket ticket) {
  return runtime_->block([self = shared_from_this(), ticket] { return self->awaited(ticket); }, false);
}

runtime::BackgroundCaller::Outlook Fusion::Impl::outlook() const {
  const std::scoped_lock lock(mutex_);
  Outlook outlook;
  const bool begins = !going_alone_.empty() || is_beginning_ || !next_ones_.empty();
  const bool moves = !is_closed_ && (engine_.is_moving() || (engine_.wants_round() && !exchange_));
  outlook.is_about_to_call = begins || moves;
  outlook.is_quiet = !outlook.is_about_to_call && (is_closed_ || engine_.is_quiet());
  if (outlook.is_about_to_call || is_closed_ || !engine_.wants_round()) return outlook;
  outlook.awaited = awaits(exchange_->work, "a round of small tensors");
  return outlook;
}

// --- the background thread -------------------------------------------------------------------------------------------

/// Where there may be something to do before anybody looks by himself: who waits does it, else the background thread.
void Fusion::Impl::wake_driver([[maybe_unused]] const Lock& lock, Instant when) {
  if (is_closed_) return;
  if (waiters_ > 0) {
    if (!is_driven_) ended_.notify_all();
    return;
  }
  const Instant look = engine_.next_look(when);
  if (!exchange_ && look >= background_until_ && look > when) return;  // It will have looked by then, or soon after.
  if (!thread_.joinable()) {
    thread_ = start_thread("herring-fusion", [this] { run_background(); });
  } else if (std::exchange(background_sleeps_, false)) {
    background_.notify_one();
  }
}

void Fusion::Impl::run_background() {
  Lock lock(mutex_);
  while (!is_closed_) {
    Instant next_look = Instant::max();
    if (!is_driven_ && waiters_ == 0) {
      is_driven_ = true;
      const bool has_moved = step(lock, false, now() + kBackgroundSlice, next_look);
      is_driven_ = false;
      if (waiters_ > 0) ended_.notify_all();
      if (has_moved) continue;
    }
    background_until_ = next_look;
    background_sleeps_ = true;
    if (next_look == Instant::max()) {
      background_.wait(lock);
    } else {
      // While calls keep coming each look finds the next one a little later, and takes a core from who calls.
      background_.wait_until(lock, std::max(next_look, now() + std::min(kLeastSleep, settings_.engine.cycle / 2)));
    }
    background_sleeps_ = false;
  }
}

}  // namespace herring::collectives
