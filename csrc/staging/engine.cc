#include "staging/engine.h"

#include <algorithm>
#include <utility>

namespace herring::staging {

Engine::Engine(Options options) : options_(options) {
  if (options_.slots == 0 || options_.part_bytes == 0) {
    throw Error(Code::kInvalidArgument, "staging: needs at least one slot of at least one byte, got " +
                                            std::to_string(options_.slots) + " of " +
                                            std::to_string(options_.part_bytes));
  }
  for (std::uint32_t i = options_.slots; i > 0; --i) free_.push_back(SlotId{i - 1});
}

Part Engine::part_of(OperationId id, const Operation& operation, std::uint32_t index) const {
  const std::uint64_t offset = index * options_.part_bytes;
  return {id, index, offset, std::min(options_.part_bytes, operation.bytes - offset), operation.parts[index].slot};
}

Status Engine::submit(Instant now, OperationId id, std::uint64_t bytes, Instant deadline, Until until,
                      Actions& actions) {
  if (!lost_device_.is_ok()) return lost_device_;
  if (operations_.contains(id)) {
    return {Code::kInvalidArgument, "staging: operation " + std::to_string(id.value) + " is under way already"};
  }
  if (deadline <= now) return {Code::kInvalidArgument, "staging: the operation's timeout passed before its start"};
  if (operations_.size() >= options_.most_operations) return Status::again();
  const Place place = operations_.try_emplace(id).first;
  Operation& operation = place->second;
  operation.bytes = bytes;
  operation.deadline = deadline;
  operation.until = until;
  operation.parts.resize(std::max<std::uint64_t>(1, (bytes + options_.part_bytes - 1) / options_.part_bytes));
  waiting_.push_back(id);
  hand_out_slots(place, actions);
  return Status::ok();
}

SlotId Engine::take_slot() {
  const SlotId slot = free_.back();
  free_.pop_back();
  return slot;
}

void Engine::start_part(Place place, SlotId slot, Actions& actions) {
  Operation& operation = place->second;
  PartState& part = operation.parts[operation.next];
  part.state = State::kOut;
  part.slot = slot;
  ++operation.held;
  ++operation.copying;
  actions.push_back(CopyOut{part_of(place->first, operation, operation.next)});
  ++operation.next;
}

void Engine::hand_out_slots(Place place, Actions& actions) {
  if (place != operations_.end() && place->second.has_waiting_part() && place->second.held == 0) {
    if (free_.empty()) {
      free_.push_back(SlotId{options_.slots + grown_++});
      actions.push_back(Grow{free_.back()});
    }
    start_part(place, take_slot(), actions);
  }
  while (!waiting_.empty()) {
    const Place first = operations_.find(waiting_.front());
    if (first == operations_.end() || !first->second.has_waiting_part()) {
      waiting_.pop_front();
    } else if (free_.empty()) {
      return;
    } else {
      start_part(first, take_slot(), actions);
    }
  }
}

Engine::PartState* Engine::find(OperationId id, std::uint32_t index, State state, Place& place) {
  place = operations_.find(id);
  if (place == operations_.end() || index >= place->second.parts.size()) return nullptr;
  PartState& part = place->second.parts[index];
  return part.state == state ? &part : nullptr;
}

void Engine::end_part(Place place, PartState& part, Actions& actions) {
  part.state = State::kEnded;
  ++place->second.ended;
  --place->second.held;
  free_.push_back(part.slot);
  hand_out_slots(place, actions);
}

void Engine::on_copied_out(Instant now, OperationId id, std::uint32_t index, const Status& status, Actions& actions) {
  Place place;
  PartState* const part = find(id, index, State::kOut, place);
  if (part == nullptr) return;
  --place->second.copying;
  if (!status.is_ok()) fail(now, place, status, actions);
  if (place->second.failure.is_ok()) {
    part->state = State::kReducing;
    actions.push_back(Reduce{part_of(id, place->second, index)});
    return;
  }
  end_part(place, *part, actions);
  try_complete(place, actions);
}

void Engine::on_reduced(Instant now, OperationId id, std::uint32_t index, const Status& status, Actions& actions) {
  Place place;
  PartState* const part = find(id, index, State::kReducing, place);
  if (part == nullptr) return;
  if (!status.is_ok()) fail(now, place, status, actions);
  if (place->second.failure.is_ok()) {
    part->state = State::kSubmittingBack;
    ++place->second.copying;
    actions.push_back(CopyBack{part_of(id, place->second, index)});
    return;
  }
  // One whose device is lost holds no slot that could be used again, but its other parts' end is waited for.
  end_part(place, *part, actions);
  try_complete(place, actions);
}

void Engine::on_back_submitted(Instant now, OperationId id, std::uint32_t index, const Status& status,
                               Actions& actions) {
  Place place;
  PartState* const part = find(id, index, State::kSubmittingBack, place);
  if (part == nullptr) return;
  if (status.is_ok()) {
    part->state = State::kBack;
    ++place->second.submitted_back;
  } else {
    --place->second.copying;
    fail(now, place, status, actions);
    end_part(place, *part, actions);
  }
  try_complete(place, actions);
}

void Engine::on_copied_back(Instant now, OperationId id, std::uint32_t index, const Status& status, Actions& actions) {
  Place place;
  PartState* const part = find(id, index, State::kBack, place);
  if (part == nullptr) return;
  --place->second.copying;
  if (!status.is_ok()) fail(now, place, status, actions);
  end_part(place, *part, actions);
  try_complete(place, actions);
}

void Engine::fail(Instant now, Place place, const Status& reason, Actions& actions) {
  Operation& operation = place->second;
  if (!operation.failure.is_ok()) return;
  operation.failure = reason;
  operation.drain_deadline = now + options_.drain;
  operation.ended += static_cast<std::uint32_t>(operation.parts.size()) - operation.next;
  for (std::uint32_t i = 0; i < operation.next; ++i) {
    if (operation.parts[i].state == State::kReducing) {
      actions.push_back(Abandon{part_of(place->first, operation, i)});
    }
  }
}

void Engine::try_complete(Place place, Actions& actions) {
  Operation& operation = place->second;
  const bool is_over = operation.ended == operation.parts.size();
  if (!operation.is_completed) {
    bool is_due = is_over;
    if (!operation.failure.is_ok()) {
      is_due = operation.until == Until::kSubmitted || operation.copying == 0;
    } else if (operation.until == Until::kSubmitted) {
      is_due = operation.submitted_back == operation.parts.size();
    }
    if (is_due) {
      operation.is_completed = true;
      actions.push_back(Complete{place->first, operation.failure});
    }
  }
  if (!is_over) return;
  if (operation.lost == 0) actions.push_back(Release{place->first});
  operations_.erase(place);
}

void Engine::cancel(Instant now, OperationId id, const Status& reason, Actions& actions) {
  const Place place = operations_.find(id);
  if (place == operations_.end() || place->second.is_completed) return;
  fail(now, place, reason, actions);
  try_complete(place, actions);
}

void Engine::lose_device(Instant now, const Status& reason, Actions& actions) {
  if (!lost_device_.is_ok()) return;
  lost_device_ = reason;
  waiting_.clear();
  for (auto next = operations_.begin(); next != operations_.end();) {
    const Place place = next++;
    Operation& operation = place->second;
    fail(now, place, reason, actions);
    operation.copying = 0;
    for (PartState& part : operation.parts) {
      if (part.state != State::kOut && part.state != State::kSubmittingBack && part.state != State::kBack) continue;
      part.state = State::kEnded;
      ++operation.ended;
      ++operation.lost;
      ++lost_;
    }
    try_complete(place, actions);
  }
}

void Engine::advance(Instant now, Actions& actions) {
  for (auto next = operations_.begin(); next != operations_.end();) {
    const Place place = next++;
    Operation& operation = place->second;
    if (operation.is_completed) continue;
    if (operation.failure.is_ok() && now >= operation.deadline) {
      const auto back = std::ranges::count(operation.parts, State::kEnded, &PartState::state);
      fail(now, place,
           {Code::kTimeout, "timed out with " + std::to_string(back) + " of " + std::to_string(operation.parts.size()) +
                                " parts back on the device and " + std::to_string(operation.copying) +
                                " copies in flight"},
           actions);
      try_complete(place, actions);
    } else if (!operation.failure.is_ok() && now >= operation.drain_deadline) {
      operation.is_completed = true;
      const std::string text = operation.failure.message() + "; and " + std::to_string(operation.copying) +
                               " copies of it have not ended since: the device hangs, so its memory must not be reused";
      actions.push_back(Complete{place->first, {operation.failure.code(), text}});
    }
  }
}

Instant Engine::next_deadline() const {
  Instant next = Instant::max();
  for (const auto& [id, operation] : operations_) {
    if (operation.is_completed) continue;
    next = std::min(next, operation.failure.is_ok() ? operation.deadline : operation.drain_deadline);
  }
  return next;
}

}  // namespace herring::staging
