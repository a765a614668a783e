#include "staging/pump.h"

#include <string>
#include <utility>

namespace herring::staging {
namespace {

constexpr std::size_t kBatch = 16;

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

}  // namespace

Pump::Pump(Device& device, StreamHandle out, StreamHandle back, Options options, std::span<std::byte> memory,
           Owner& owner)
    : device_(device), out_(out), back_(back), options_(options), memory_(memory), owner_(owner), engine_(options) {
  if (memory.size() < options.slots * options.part_bytes) {
    throw Error(Code::kInvalidArgument, "staging: " + std::to_string(options.slots) + " slots of " +
                                            std::to_string(options.part_bytes) + " bytes do not fit " +
                                            std::to_string(memory.size()));
  }
}

Status Pump::submit(Instant now, OperationId id, const Job& job) {
  if (job.input.bytes != job.output.bytes) {
    return {Code::kInvalidArgument, "staging: input of " + std::to_string(job.input.bytes) + " and output of " +
                                        std::to_string(job.output.bytes) + " bytes"};
  }
  check_device(now);
  Status status = engine_.submit(now, id, job.input.bytes, job.deadline, job.until, asked_);
  if (!status.is_ok()) {
    act(now);
    return status;
  }
  jobs_[id] = job;
  if (job.ready.value != 0) {
    // Before the operation's first copy, which the engine asked for already: not yet carried out.
    status = device_.wait_event(out_, job.ready);
    if (!status.is_ok()) engine_.cancel(now, id, status, asked_);
  }
  act(now);
  return Status::ok();
}

void Pump::reduced(Instant now, OperationId id, std::uint32_t part, const Status& status) {
  engine_.on_reduced(now, id, part, status, asked_);
  act(now);
}

void Pump::cancel(Instant now, OperationId id, const Status& reason) {
  engine_.cancel(now, id, reason, asked_);
  act(now);
}

bool Pump::run(Instant now) {
  bool moved = record_waiting();
  TicketDone done[kBatch];
  std::size_t count = 0;
  do {
    count = has_copies() ? device_.poll(done) : 0;
    for (std::size_t i = 0; i < count; ++i) {
      const auto found = copies_.find(done[i].ticket);
      if (found == copies_.end()) continue;
      const Copy copy = found->second;
      copies_.erase(found);
      if (!done[i].status.is_ok()) {
        engine_.lose_device(now, done[i].status, asked_);
      } else if (copy.is_back) {
        engine_.on_copied_back(now, copy.part.operation, copy.part.index, Status::ok(), asked_);
      } else {
        engine_.on_copied_out(now, copy.part.operation, copy.part.index, Status::ok(), asked_);
      }
    }
    moved |= count > 0;
  } while (count == kBatch);
  check_device(now);
  if (now >= engine_.next_deadline()) engine_.advance(now, asked_);
  moved |= !asked_.empty();
  act(now);
  return moved;
}

void Pump::check_device(Instant now) {
  if (device_.health().is_ok()) return;
  engine_.lose_device(now, device_.health(), asked_);
  copies_.clear();
  unrecorded_.clear();
}

void Pump::act(Instant now) {
  const auto take = [this] {
    queue_.insert(queue_.end(), asked_.begin(), asked_.end());
    asked_.clear();
  };
  take();
  if (is_acting_) return;  // The owner answered from within a call of ours.
  is_acting_ = true;
  while (!queue_.empty()) {
    const Action action = std::move(queue_.front());
    queue_.pop_front();
    perform(now, action);
    take();
  }
  is_acting_ = false;
}

void Pump::perform(Instant now, const Action& action) {
  std::visit(Overloaded{
                 [&](const Grow&) { grown_.push_back(std::make_unique<std::byte[]>(options_.part_bytes)); },
                 [&](const CopyOut& asked) { copy_out(now, asked.part); },
                 [&](const Reduce& asked) { owner_.reduce(asked.part, slot(asked.part)); },
                 [&](const Abandon& asked) { owner_.abandon(asked.part); },
                 [&](const CopyBack& asked) { copy_back(now, asked.part); },
                 [&](const Complete& asked) { owner_.complete(asked.operation, asked.status); },
                 [&](const Release& asked) {
                   jobs_.erase(asked.operation);
                   owner_.release(asked.operation);
                 },
             },
             action);
}

void Pump::copy_out(Instant now, const Part& part) {
  const DeviceSpan from = jobs_.at(part.operation).input.subspan(part.offset, part.bytes);
  const Status status = device_.copy_to_host(out_, slot(part), from);
  if (status.is_ok()) return watch({part, false});
  check_device(now);
  engine_.on_copied_out(now, part.operation, part.index, status, asked_);
}

void Pump::copy_back(Instant now, const Part& part) {
  const DeviceSpan to = jobs_.at(part.operation).output.subspan(part.offset, part.bytes);
  const Status status = device_.copy_to_device(back_, to, slot(part));
  if (!status.is_ok()) check_device(now);
  engine_.on_back_submitted(now, part.operation, part.index, status, asked_);
  if (status.is_ok()) watch({part, true});
}

void Pump::watch(const Copy& copy) {
  unrecorded_.push_back(copy);
  record_waiting();
}

bool Pump::record_waiting() {
  bool moved = false;
  while (!unrecorded_.empty()) {
    const Copy copy = unrecorded_.front();
    Ticket ticket;
    // Not ok otherwise: the device is lost, which the next look at it finds.
    if (!device_.record(copy.is_back ? back_ : out_, ticket).is_ok()) return moved;
    copies_[ticket] = copy;
    unrecorded_.pop_front();
    moved = true;
  }
  return moved;
}

std::span<std::byte> Pump::slot(const Part& part) const {
  std::byte* const memory = part.slot.value < options_.slots ? memory_.data() + part.slot.value * options_.part_bytes
                                                             : grown_[part.slot.value - options_.slots].get();
  return {memory, part.bytes};
}

}  // namespace herring::staging
