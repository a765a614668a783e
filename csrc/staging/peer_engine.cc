#include "staging/peer_engine.h"

#include <algorithm>
#include <utility>

namespace herring::staging {

PieceRange range_of(std::uint64_t piece_bytes, std::uint32_t member, std::uint32_t members) {
  const std::uint64_t units = (piece_bytes + kRangeAlignment - 1) / kRangeAlignment;
  const auto begin_of = [&](std::uint64_t index) {
    return std::min(units * index / members * kRangeAlignment, piece_bytes);
  };
  return {begin_of(member), begin_of(member + 1) - begin_of(member)};
}

PeerEngine::PeerEngine(PeerOptions options) : options_(options) {
  if (options.members < 2 || options.slot_bytes == 0 || options.slot_bytes % kRangeAlignment != 0) {
    throw Error(Code::kInvalidArgument, "peer engine: " + std::to_string(options.members) + " members, slots of " +
                                            std::to_string(options.slot_bytes) + " bytes");
  }
}

Status PeerEngine::submit(PeerOperationId id, std::uint64_t bytes, Instant deadline, PeerActions& actions) {
  if (!failure_.is_ok()) return failure_;
  if (bytes == 0 || operations_.contains(id)) {
    return {Code::kInvalidArgument, "peer engine: operation " + std::to_string(id.value) + " of " +
                                        std::to_string(bytes) + " bytes, or one that is there already"};
  }
  Operation& operation = operations_[id];
  operation.deadline = deadline;
  for (std::uint64_t offset = 0; offset < bytes; offset += options_.slot_bytes) {
    const std::uint64_t number = next_number_++;
    pieces_.push_back({.piece = {number, id, offset, std::min(options_.slot_bytes, bytes - offset),
                                 number % kSlots * options_.slot_bytes}});
    ++operation.left;
  }
  go_on(actions);
  return Status::ok();
}

bool PeerEngine::is_together(const Piece& piece) const {
  // Two ranks read as many bytes of each other either way.
  return !options_.has_network && (options_.members == 2 || piece.bytes <= options_.together_bytes);
}

PeerEngine::PieceState* PeerEngine::find(std::uint64_t piece) {
  if (pieces_.empty() || piece < pieces_.front().piece.number || piece > pieces_.back().piece.number) return nullptr;
  return &pieces_[piece - pieces_.front().piece.number];
}

PeerEngine::PieceState* PeerEngine::answered(std::uint64_t piece, State state, const Status& status,
                                             PeerActions& actions) {
  PieceState* const found = find(piece);
  if (found == nullptr || found->state != state) return nullptr;
  if (!status.is_ok()) close(status, actions);
  return found;
}

void PeerEngine::on_copied_in(std::uint64_t piece, const Status& status, PeerActions& actions) {
  PieceState* const state = answered(piece, State::kCopyingIn, status, actions);
  if (state == nullptr) return;
  state->state = State::kIsIn;
  let_go(*state, actions);
  go_on(actions);
}

void PeerEngine::on_met(std::uint64_t piece, const Status& status, PeerActions& actions) {
  PieceState* const state = answered(piece, State::kMeeting, status, actions);
  if (state == nullptr || !failure_.is_ok()) return;
  state->state = State::kMet;
  go_on(actions);
}

void PeerEngine::on_summed(std::uint64_t piece, const Status& status, PeerActions& actions) {
  PieceState* const state = answered(piece, State::kSumming, status, actions);
  if (state == nullptr || !failure_.is_ok()) return;
  if (options_.has_network) {
    state->state = State::kExchanging;
    actions.push_back(Exchange{state->piece});
    return;
  }
  state->state = State::kIsSummed;
  go_on(actions);
}

void PeerEngine::on_exchanged(std::uint64_t piece, const Status& status, PeerActions& actions) {
  PieceState* const state = answered(piece, State::kExchanging, status, actions);
  if (state == nullptr || !failure_.is_ok()) return;
  state->state = State::kIsSummed;
  go_on(actions);
}

void PeerEngine::on_shared(std::uint64_t piece, const Status& status, PeerActions& actions) {
  PieceState* const state = answered(piece, State::kSharing, status, actions);
  if (state == nullptr || !failure_.is_ok()) return;
  state->state = State::kShared;
  go_on(actions);
}

void PeerEngine::start_sum(PieceState& state, PeerActions& actions) {
  if (is_together(state.piece)) return start_result(state, actions);
  state.state = State::kSumming;
  actions.push_back(SumOwn{state.piece});
}

void PeerEngine::start_result(PieceState& state, PeerActions& actions) {
  state.state = State::kSubmitting;
  ++operations_.at(state.piece.operation).under_way;
  if (is_together(state.piece)) {
    actions.push_back(SumAll{state.piece});
  } else {
    actions.push_back(CopyResult{state.piece});
  }
}

void PeerEngine::on_result_submitted(std::uint64_t piece, const Status& status, PeerActions& actions) {
  PieceState* const state = answered(piece, State::kSubmitting, status, actions);
  if (state == nullptr) return;
  state->state = status.is_ok() ? State::kResult : State::kDone;
  if (!status.is_ok()) let_go(*state, actions);
  if (!failure_.is_ok()) return;
  Operation& operation = operations_.at(state->piece.operation);
  if (--operation.left > 0) return;
  operation.is_completed = true;
  actions.push_back(PeerComplete{state->piece.operation, Status::ok()});
}

void PeerEngine::on_result(std::uint64_t piece, const Status& status, PeerActions& actions) {
  PieceState* const state = answered(piece, State::kResult, status, actions);
  if (state == nullptr) return;
  state->state = State::kDone;
  let_go(*state, actions);
  go_on(actions);
}

void PeerEngine::let_go(PieceState& state, PeerActions& actions) {
  const PeerOperationId id = state.piece.operation;
  if (const auto place = operations_.find(id); place != operations_.end()) --place->second.under_way;
  try_release(id, actions);
}

void PeerEngine::try_release(PeerOperationId id, PeerActions& actions) {
  const auto place = operations_.find(id);
  if (place == operations_.end() || !place->second.is_completed || (place->second.under_way > 0 && !is_lost_)) return;
  operations_.erase(place);
  actions.push_back(PeerRelease{id});
}

/// All ranks have met for a piece that is late enough: nobody reads what was in the slot before.
bool PeerEngine::may_copy_in(const PieceState& state) const {
  const std::uint64_t number = state.piece.number;
  if (number < kSlots) return true;
  const std::uint64_t before = number - kSlots + kAhead;
  const std::uint64_t first = pieces_.front().piece.number;
  return before < first || pieces_[before - first].state > State::kMeeting;
}

bool PeerEngine::may_meet(const PieceState& state) const {
  const std::uint64_t number = state.piece.number;
  if (number < kAhead) return true;
  const std::uint64_t first = pieces_.front().piece.number;
  return number - kAhead < first || pieces_[number - kAhead - first].state == State::kDone;
}

void PeerEngine::go_on(PeerActions& actions) {
  if (!failure_.is_ok()) return;
  while (!pieces_.empty() && pieces_.front().state == State::kDone) pieces_.pop_front();
  // In the order of the pieces, as all ranks do.
  bool may_be_met = true, may_be_summed = true, may_be_shared = true, may_be_copied = true;
  for (PieceState& state : pieces_) {
    if (state.state == State::kWaiting) {
      if (!may_copy_in(state)) return;
      state.state = State::kCopyingIn;
      ++operations_.at(state.piece.operation).under_way;
      actions.push_back(CopyIn{state.piece});
    }
    if (state.state == State::kIsIn && may_be_met && may_meet(state)) {
      state.state = State::kMeeting;
      actions.push_back(Meet{state.piece});
    }
    if (state.state == State::kMet && may_be_summed) start_sum(state, actions);
    if (state.state == State::kIsSummed && may_be_shared) {
      state.state = State::kSharing;
      actions.push_back(Share{state.piece});
    }
    if (state.state == State::kShared && may_be_copied) start_result(state, actions);
    may_be_met = may_be_met && state.state >= State::kMeeting;
    may_be_summed = may_be_summed && state.state > State::kMet;
    may_be_shared = may_be_shared && (is_together(state.piece) || state.state >= State::kSharing);
    may_be_copied = may_be_copied && (is_together(state.piece) || state.state > State::kShared);
  }
}

void PeerEngine::close(const Status& why, PeerActions& actions) {
  if (!failure_.is_ok()) return;
  failure_ = why;
  actions.push_back(Close{why});
  for (auto& [id, operation] : operations_) {
    if (!std::exchange(operation.is_completed, true)) actions.push_back(PeerComplete{id, why});
  }
  release_all(actions);
}

void PeerEngine::lose_device(const Status& why, PeerActions& actions) {
  is_lost_ = true;
  close(why, actions);
  release_all(actions);
}

void PeerEngine::release_all(PeerActions& actions) {
  for (auto place = operations_.begin(); place != operations_.end();) {
    const PeerOperationId id = place->first;
    ++place;
    try_release(id, actions);
  }
}

void PeerEngine::advance(Instant now, PeerActions& actions) {
  if (!failure_.is_ok()) return;
  for (const PieceState& state : pieces_) {
    if (state.state != State::kCopyingIn || operations_.at(state.piece.operation).deadline > now) continue;
    close({Code::kTimeout, "the tensor was not ready in time: a kernel that writes it has not ended"}, actions);
    return;
  }
}

}  // namespace herring::staging
