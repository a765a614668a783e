// What a driver of Fusion does: rounds, buckets and their ends.

#include <algorithm>
#include <string>
#include <utility>

#include "collectives/fusion_impl.h"
#include "collectives/scale.h"
#include "core/seconds_text.h"

namespace herring::collectives {
namespace {

constexpr const char* kRoundName = "names of small tensors";
constexpr const char* kPlanName = "new names of small tensors";
constexpr const char* kBucketName = "small tensors";
// Uses of one name follow each other, and buckets go side by side; names are bounded, for the runtime remembers them.
constexpr std::uint64_t kBucketNames = 64;
constexpr std::size_t kMostNamesInText = 3;

runtime::Request request(GroupId group, std::string name, Collective collective, DataType dtype, ReduceOp reduce,
                         std::span<std::byte> memory, Duration timeout) {
  runtime::Request made;
  made.group = group;
  made.name = std::move(name);
  made.descriptor.collective = collective;
  made.descriptor.dtype = dtype;
  made.descriptor.reduce = reduce;
  made.descriptor.dims = 1;
  made.descriptor.op_bytes = memory.size();
  made.descriptor.shape[0] = memory.size() / element_bytes(dtype);
  made.input = memory;
  made.output = memory;
  made.timeout = timeout;
  return made;
}

}  // namespace

bool Fusion::Impl::step(Lock& lock, bool is_waiter, Instant until, Instant& next_look) {
  if (exchange_ && !engine_.has_late(now())) {
    drive_exchange(lock, until);
    return true;
  }
  Step next = engine_.next(now(), landing_ > 0);
  if (auto* round = std::get_if<FusionStep::Round>(&next)) {
    start_round(std::move(*round));
  } else if (auto* plan = std::get_if<FusionStep::Plan>(&next)) {
    start_plan(std::move(*plan));
  } else if (auto* reduce = std::get_if<FusionStep::Reduce>(&next)) {
    start_batches(lock, std::move(reduce->batches), is_waiter);
  } else if (auto* alone = std::get_if<FusionStep::Alone>(&next)) {
    go_alone(lock, alone->tickets);
  } else {
    next_look = std::get<FusionStep::Wait>(next).until;
    return false;
  }
  return true;
}

void Fusion::Impl::start_round(FusionStep::Round round) {
  Exchange& exchange = exchange_.emplace();
  exchange.words = std::move(round.words);
  runtime::Request made = request(group_, kRoundName, Collective::kAllReduce, DataType::kInt64, ReduceOp::kBand,
                                  std::as_writable_bytes(std::span(exchange.words)), settings_.timeout);
  made.is_patient = round.is_patient;
  made.is_waited_for = true;
  if (!round.is_patient && settings_.stall_warning > Duration{}) exchange.warn_at = now() + settings_.stall_warning;
  exchange.work = runtime_->submit(made);
}

void Fusion::Impl::start_plan(FusionStep::Plan plan) {
  Exchange& exchange = exchange_.emplace();
  exchange.is_plan = true;
  exchange.plan = std::move(plan.bytes);
  exchange.plan.resize(engine_.plan_bytes());
  runtime::Request made = request(group_, kPlanName, Collective::kBroadcast, DataType::kUInt8, ReduceOp::kSum,
                                  exchange.plan, settings_.timeout);
  made.is_waited_for = true;
  exchange.work = runtime_->submit(made);
}

void Fusion::Impl::drive_exchange(Lock& lock, Instant until) {
  const std::shared_ptr<runtime::Work> work = exchange_->work;
  if (!work->is_done()) {
    lock.unlock();
    work->wait(until);
    lock.lock();
  }
  if (!exchange_) return;
  if (work->is_done()) {
    end_exchange(lock);
  } else {
    warn_of_stall(now());
  }
}

/// Who has not called them, the runtime says of the round itself: it knows no names.
void Fusion::Impl::warn_of_stall(Instant now) {
  if (now < exchange_->warn_at) return;
  exchange_->warn_at = Instant::max();
  const std::vector<Ticket> waiting = engine_.pending();
  if (waiting.empty()) return;
  const bool is_one = waiting.size() == 1;
  settings_.warn(names_of(waiting) + (is_one ? " has" : " have") + " waited for " +
                 round_seconds_text(settings_.stall_warning) + ": not all ranks have called " +
                 (is_one ? "it" : "them") + ". Another warning, of this process or of a server, names the ranks");
}

void Fusion::Impl::end_exchange(Lock& lock) {
  const Exchange ended = std::move(*exchange_);
  exchange_.reset();
  const Status status = ended.work->status();
  if (!status.is_ok()) return break_down(lock, status);
  const bool is_good = ended.is_plan ? engine_.plan_came(ended.plan, now()) : engine_.round_ended(ended.words, now());
  if (!is_good) {
    break_down(
        lock,
        Status(Code::kInternal,
               "ranks disagree about which small tensors travel together: this is a bug in Herring, please report it"));
  } else if (engine_.has_ended()) {
    end_pending(lock);
  }
}

// --- buckets ---------------------------------------------------------------------------------------------------------

void Fusion::Impl::start_batches(Lock& lock, std::vector<Batch> batches, bool is_waiter) {
  for (Batch& batch : batches) {
    const std::shared_ptr<Flight> flight = start(lock, std::move(batch));
    if (!flight) continue;
    // The last bucket of a step, and somebody waits: it is driven by who waits, where he waits for it: see help().
    const bool lands_by_itself = !is_waiter && helpers_ == 0;
    flight->has_callback = lands_by_itself;
    flights_.push_back(flight);
    if (!lands_by_itself) continue;
    lock.unlock();
    watch(flight);
    lock.lock();
  }
}

/// Null where it could not be started; its tickets have failed then.
std::shared_ptr<Fusion::Impl::Flight> Fusion::Impl::start(Lock& lock, Batch batch) {
  auto flight = std::make_shared<Flight>();
  std::vector<const Record*> records;
  for (const Batch::Item& item : batch.items) {
    records.push_back(&records_.at(item.ticket));  // It stays: it is pending.
    flight->results.push_back(records.back()->result);
    flight->postscales.push_back(records.back()->spec.postscale);
  }
  if (std::shared_ptr<std::byte> row = row_of(batch, records)) {
    flight->bucket = {std::move(row), batch.bytes};
    flight->is_in_place = true;
    ++counters_.in_place;
  }
  // All ranks start the same buckets in the same order.
  const std::string name = std::string(kBucketName) + " " + std::to_string(counters_.buckets++ % kBucketNames);
  flight->batch = std::move(batch);
  const Batch& started = flight->batch;
  lock.unlock();
  Status status;
  try {
    if (!flight->is_in_place) fill(*flight, records);
    runtime::Request made = request(group_, name, Collective::kAllReduce, started.dtype, started.reduce,
                                    flight->bucket.first(started.bytes), settings_.timeout);
    made.is_lent = flight->is_in_place;
    flight->work = runtime_->submit(made);
  } catch (const Error& error) {
    status = error.status();
  } catch (const std::bad_alloc&) {
    status = Status(Code::kUnavailable, "no memory for a bucket of " + std::to_string(started.bytes) + " bytes");
  }
  lock.lock();
  if (status.is_ok()) return flight;
  engine_.batch_ended();
  break_down(lock, status);
  std::vector<Ticket> tickets;
  for (const Batch::Item& item : started.items) tickets.push_back(item.ticket);
  end(lock, tickets, State::kDone, explained(status, tickets));
  return nullptr;
}

/// Where this rank's tensors lie in memory as the batch has them: that memory, which is a bucket already. Else null.
std::shared_ptr<std::byte> Fusion::Impl::row_of(const Batch& batch, std::span<const Record* const> records) const {
  std::byte* start = nullptr;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::span<std::byte> result = records[i]->result;
    if (result.empty()) continue;
    // Tensors of a row are apart by what is nobody's. Parts of them, under other names, are not.
    if (place_of(*records[i]) == nullptr) return nullptr;
    std::byte* const here = result.data() - batch.items[i].slice.offset;
    if (start == nullptr) start = here;
    if (here != start) return nullptr;
  }
  return start == nullptr ? nullptr : places_.keep(start, batch.bytes);
}

/// Takes a bucket and copies the tensors into it. Without the lock.
void Fusion::Impl::fill(Flight& flight, std::span<const Record* const> records) {
  const Batch& batch = flight.batch;
  std::vector<std::span<const std::byte>> sources;
  std::vector<TensorSlice> slices;
  for (std::size_t i = 0; i < records.size(); ++i) {
    sources.push_back(records[i]->source);
    slices.push_back(batch.items[i].slice);
  }
  flight.bucket = memory_.take(batch.bytes);
  const std::span<std::byte> bucket = flight.bucket.first(batch.bytes);
  herring::pack(sources, slices, bucket);
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const double prescale = records[i]->spec.prescale;
    if (prescale != 1) scale(bucket.subspan(slices[i].offset, slices[i].bytes), batch.dtype, prescale);
  }
}

void Fusion::Impl::watch(const std::shared_ptr<Flight>& flight) {
  flight->work->on_done([self = shared_from_this(), flight](const Status&) {
    // Whoever waits for it is awake: nobody has to wait for this thread.
    if (flight->waiters == 0) self->land(flight);
  });
}

/// What nobody watches lands by itself from now on. False where there is none.
bool Fusion::Impl::watch_all(Lock& lock) {
  std::vector<std::shared_ptr<Flight>> unwatched;
  for (const auto& flight : flights_) {
    if (!std::exchange(flight->has_callback, true)) unwatched.push_back(flight);
  }
  if (unwatched.empty()) return false;
  lock.unlock();
  for (const auto& flight : unwatched) watch(flight);
  lock.lock();
  return true;
}

/// A bucket has come back: its tensors are written, by who comes first. Without the lock.
void Fusion::Impl::land(const std::shared_ptr<Flight>& flight) {
  if (flight->is_taken.exchange(true)) return;
  const Batch& batch = flight->batch;
  const Status status = flight->work->status();
  std::vector<Ticket> tickets;
  for (const Batch::Item& item : batch.items) tickets.push_back(item.ticket);
  if (status.is_ok()) {
    const std::span<std::byte> bucket = flight->bucket.first(batch.bytes);
    std::vector<TensorSlice> slices;
    for (std::size_t i = 0; i < batch.items.size(); ++i) {
      slices.push_back(batch.items[i].slice);
      if (flight->postscales[i] == 1) continue;
      scale(bucket.subspan(slices[i].offset, slices[i].bytes), batch.dtype, flight->postscales[i]);
    }
    if (!flight->is_in_place) unpack(bucket, slices, flight->results);
  }
  if (!flight->is_in_place) memory_.give_back(std::move(flight->bucket));
  Lock lock(mutex_);
  std::erase(flights_, flight);
  engine_.batch_ended();
  ++landing_;
  if (status.is_ok()) {
    end(lock, tickets, State::kDone, status);
  } else if (status.code() == Code::kNotFinite || status.code() == Code::kMismatch ||
             status.code() == Code::kInvalidArgument) {
    // On all ranks alike; the tensor that it is about says so itself, and the others are whole.
    go_alone(lock, tickets);
  } else {
    end(lock, tickets, State::kDone, explained(status, tickets));
  }
  --landing_;
  wake_driver(lock);
}

/// The bucket that this ticket is in; null where in none that is under way.
std::shared_ptr<Fusion::Impl::Flight> Fusion::Impl::flight_of(Ticket ticket) const {
  const auto has_it = [&](const std::shared_ptr<Flight>& flight) {
    return std::ranges::any_of(flight->batch.items, [&](const Batch::Item& item) { return item.ticket == ticket; });
  };
  const auto found = std::ranges::find_if(flights_, has_it);
  return found == flights_.end() ? nullptr : *found;
}

/// Moves the bucket of this ticket, and lands it. Where it is in none, it may be a name's later use, which waits for
/// one that is: what is under way lands by itself then. False where there was nothing to do.
bool Fusion::Impl::help(Lock& lock, Ticket ticket, Instant until) {
  const std::shared_ptr<Flight> mine = flight_of(ticket);
  if (!mine) return watch_all(lock);
  if (mine->is_taken) return false;
  // Meanwhile the background thread drives: what is in no bucket yet need not wait for this one.
  engine_.flush();
  ++helpers_;
  if (--waiters_ == 0) wake_driver(lock);
  ++mine->waiters;
  lock.unlock();
  mine->work->wait(until);
  --mine->waiters;
  if (mine->work->is_done()) land(mine);
  lock.lock();
  --helpers_;
  ++waiters_;
  return true;
}

// --- ends ------------------------------------------------------------------------------------------------------------

void Fusion::Impl::go_alone(Lock& lock, std::span<const Ticket> tickets) {
  for (const Ticket ticket : tickets) {
    const auto found = records_.find(ticket);
    if (found == records_.end() || found->second.state != State::kPending) continue;
    free_name(found->second);
    found->second.lease.reset();
    if (settings_.queues_names) engine_.went_outside(found->second.name, now());
    std::shared_ptr<void> owner = found->second.owner;
    going_alone_.push_back(ticket);
    lock.unlock();
    const Status status = go_alone_(ticket, owner);
    owner.reset();  // The record keeps it until end(), which drops it without the lock: it may ask for what is its.
    lock.lock();
    std::erase(going_alone_, ticket);
    end(lock, {&ticket, 1}, status.is_ok() ? State::kAlone : State::kDone, status);
  }
}

void Fusion::Impl::end(Lock& lock, std::span<const Ticket> tickets, State state, const Status& status) {
  std::vector<std::function<void(State)>> callbacks;
  std::vector<std::shared_ptr<void>> owners;
  std::vector<std::shared_ptr<void>> leases;
  for (const Ticket ticket : tickets) {
    const auto found = records_.find(ticket);
    if (found == records_.end() || found->second.state != State::kPending) continue;
    Record& record = found->second;
    record.state = state;
    record.status = status;
    if (record.lease) leases.push_back(std::move(record.lease));
    if (record.owner) owners.push_back(std::move(record.owner));
    std::ranges::move(record.on_end, std::back_inserter(callbacks));
    record.on_end.clear();
    if (!settings_.queues_names) continue;
    Ticket* const slot = std::exchange(record.slot, nullptr);
    if (slot == nullptr) continue;
    if (record.next == 0) {
      *slot = 0;
    } else {
      next_ones_.push_back(record.next);
    }
  }
  // Tensors often come in the order of their addresses, and what is lent is kept in it: the last one goes at least
  // cost.
  while (!leases.empty()) leases.pop_back();
  ended_.notify_all();
  if (!callbacks.empty() || !owners.empty()) {
    // Owners go here, where they may ask for what is theirs.
    lock.unlock();
    for (const auto& callback : callbacks) callback(state);
    callbacks.clear();
    owners.clear();
    lock.lock();
  }
  begin_next(lock);
}

/// Rounds have ended for this rank: what waits for one fails (nobody knows what others make of it), and later tensors
/// go alone.
void Fusion::Impl::break_down(Lock& lock, const Status& status) {
  const std::vector<Ticket> waiting = engine_.give_up();
  end(lock, waiting, State::kDone, explained(status, waiting));
}

/// This rank closes, and nobody else will have what it has in no bucket: nor the uses of these names that follow.
void Fusion::Impl::end_pending(Lock& lock) {
  std::vector<Ticket> tickets;
  for (const Ticket first : engine_.give_up()) {
    for (Ticket each = first; each != 0; each = std::exchange(records_.at(each).next, 0)) tickets.push_back(each);
  }
  for (const Ticket& ticket : tickets) {
    end(lock, {&ticket, 1}, State::kDone, explained(closed(), {&ticket, 1}));
  }
}

Status Fusion::Impl::closed() const {
  if (leaving_ == Leaving::kGroup) return {Code::kCancelled, "its group was closed before all ranks had called it"};
  return {Code::kShutdown, "herring has been shut down before all ranks had called it"};
}

std::string Fusion::Impl::names_of(std::span<const Ticket> tickets) const {
  std::string names;
  std::size_t shown = 0;
  for (const Ticket ticket : tickets) {
    const auto found = records_.find(ticket);
    if (found == records_.end()) continue;
    if (shown == kMostNamesInText) break;
    names += (shown++ == 0 ? "'" : ", '") + found->second.name + "'";
  }
  if (tickets.size() > shown) names += " and " + std::to_string(tickets.size() - shown) + " more";
  return names;
}

Status Fusion::Impl::explained(const Status& status, std::span<const Ticket> tickets) const {
  return {status.code(), names_of(tickets) + ": " + status.message()};
}

}  // namespace herring::collectives
