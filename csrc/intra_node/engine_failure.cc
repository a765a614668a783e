#include <algorithm>
#include <utility>

#include "intra_node/engine_impl.h"

namespace herring::intra_node {

/// False where the operation is over because its members disagree, or will be when the last of them has spoken.
bool Engine::Impl::check_agreement(Instant now, Exchange& exchange) {
  bool agree = true;
  for (std::uint32_t i = 0; i < exchange.size(); ++i) {
    const Said& said = exchange.of(i);
    if (i == exchange.me || !said.ready) continue;
    agree = agree && said.layout == exchange.layout && said.descriptor == exchange.operation.descriptor;
  }
  if (agree) return true;
  if (exchange.mismatch_deadline == Instant::max()) {
    exchange.mismatch_deadline = now + kMismatchWait;
    wake_at(exchange.mismatch_deadline);
  }
  if (!exchange.everybody_is_ready() && now < exchange.mismatch_deadline) return false;
  // No member can have found all equal, so none has touched another's memory, and each finds out by itself.
  const Status status(Code::kMismatch, mismatch_text(exchange));
  remember_failure(exchange.key, status);
  for (Said& said : exchange.said) said.released = true;
  complete(exchange, status);
  return false;
}

void Engine::Impl::fail(Instant now, Exchange& exchange, const Status& status, bool relayed) {
  if (!exchange.is_active() || exchange.stage == Stage::kFailing) return;
  exchange.failure = status;
  remember_failure(exchange.key, status);
  std::string text = status.message();
  if (!relayed && status.code() != Code::kTimeout && status.code() != Code::kPeerLost &&
      status.code() != Code::kNotFinite) {
    // A time-out and what is not finite say whose they are, and a loss is everybody's.
    text = "rank " + std::to_string(exchange.operation.world_ranks[exchange.me]) + " gave up: " + text;
  }
  const bool exposed = exchange.location == Location::kInPlace || exchange.location == Location::kStaged;
  for (const std::uint32_t rank : exchange.operation.members) {
    if (rank == config_.local_rank) continue;
    if (!exposed || lost_[rank]) exchange.said[rank].released = true;
    if (!lost_[rank]) send_error(rank, exchange.key, Status(status.code(), text), false);
  }
  if (exchange.network_pending) actions_.push_back(AbandonNetwork{exchange.key, status});
  exchange.stage = Stage::kFailing;
  exchange.mismatch_deadline = Instant::max();
  exchange.deadline = now + kLetGoWait;
  wake_at(exchange.deadline);
  try_fail(exchange);
}

void Engine::Impl::try_fail(Exchange& exchange) {
  if (exchange.stage == Stage::kFailing && !exchange.network_pending && exchange.everybody_let_go()) {
    report_failure(exchange);
  }
}

void Engine::Impl::report_failure(Exchange& exchange) {
  if (exchange.everybody_let_go()) return complete(exchange, exchange.failure);
  const auto holds_on = [&](std::uint32_t i) { return i != exchange.me && !exchange.of(i).released; };
  std::string text = exchange.failure.message() + " (" + name_ranks(exchange, holds_on) +
                     " did not confirm to have stopped, and may still write to this operation's shared memory)";
  complete(exchange, Status(exchange.failure.code(), std::move(text)));
  if (exchange.staging.empty()) return retire(exchange);
  exchange.stage = Stage::kQuarantined;
  ++quarantined_;
}

/// `rank` will not touch our memory for this operation any more.
void Engine::Impl::let_go(Exchange& exchange, std::uint32_t rank) {
  exchange.said[rank].released = true;
  if (exchange.stage == Stage::kFailing) return try_fail(exchange);
  if (exchange.stage == Stage::kSharing) return try_finish(exchange);
  try_retire(exchange);
}

void Engine::Impl::abort(Instant now, const OpKey& key, const Status& why) {
  Exchange* exchange = find_active(key);
  if (exchange != nullptr && exchange->is_active()) fail(now, *exchange, why);
}

void Engine::Impl::on_peer_lost(Instant now, std::uint32_t local_rank, const std::string& why) {
  if (local_rank >= config_.local_size || local_rank == config_.local_rank || lost_[local_rank]) return;
  lost_[local_rank] = why;
  pending_dones_[local_rank].clear();
  std::vector<OpKey> keys;
  for (const auto& [key, exchange] : exchanges_) {
    if (exchange->stage != Stage::kEarly && is_member(*exchange, local_rank)) keys.push_back(key);
  }
  for (const OpKey& key : keys) {
    Exchange* exchange = find(key);
    if (exchange == nullptr) continue;
    const auto member = static_cast<std::uint32_t>(std::ranges::find(exchange->operation.members, local_rank) -
                                                   exchange->operation.members.begin());
    if (!exchange->can_do_without(member)) {
      exchange->said[local_rank].released = true;
      fail(now, *exchange, Status(Code::kPeerLost, to_string(exchange->operation.descriptor) + ": " + why));
    } else {
      let_go(*exchange, local_rank);
    }
  }
}

void Engine::Impl::on_peer_left(Instant now, std::uint32_t local_rank, const std::string& why) {
  if (local_rank >= config_.local_size || local_rank == config_.local_rank) return;
  std::vector<OpKey> keys;
  for (const auto& [key, exchange] : exchanges_) {
    // Where members disagree, that is what their users should hear.
    const bool waits = exchange->stage == Stage::kGathering && exchange->mismatch_deadline == Instant::max();
    if (waits && is_member(*exchange, local_rank) && !exchange->said[local_rank].ready) keys.push_back(key);
  }
  for (const OpKey& key : keys) {
    Exchange* exchange = find(key);
    if (exchange == nullptr || exchange->stage != Stage::kGathering) continue;
    exchange->said[local_rank].released = true;
    fail(now, *exchange, Status(Code::kPeerLost, to_string(exchange->operation.descriptor) + ": " + why));
  }
}

void Engine::Impl::on_tick(Instant now) {
  if (now < next_deadline_) return;
  std::vector<std::pair<Instant, OpKey>> due;
  for (const auto& [key, exchange] : exchanges_) {
    if (exchange->is_active() && now >= exchange->due()) due.emplace_back(exchange->begun, key);
  }
  // Of what waits, the first one is what the rest waits behind.
  std::ranges::sort(due, {}, [](const auto& one) { return one.first; });
  for (const auto& [begun, key] : due) {
    if (Exchange* exchange = find(key)) expire(now, *exchange);
  }
  next_deadline_ = Instant::max();
  for (const auto& [key, exchange] : exchanges_) {
    // Failing for want of the network's word only: that one has its own deadline.
    if (!exchange->is_active() || (exchange->stage == Stage::kFailing && now >= exchange->deadline)) continue;
    wake_at(exchange->due());
  }
}

void Engine::Impl::expire(Instant now, Exchange& exchange) {
  if (now >= exchange.stalls_at) note_stall(now, exchange);
  if (now < exchange.due()) return;
  if (exchange.stage == Stage::kFailing) {
    if (!exchange.network_pending) report_failure(exchange);
    return;
  }
  if (now >= exchange.mismatch_deadline) {
    (void)check_agreement(now, exchange);
    return;
  }
  fail(now, exchange, Status(Code::kTimeout, timeout_text(exchange)));
}

void Engine::Impl::note_stall(Instant now, Exchange& exchange) {
  exchange.stalls_at = Instant::max();
  if (exchange.stage != Stage::kGathering || exchange.mismatch_deadline != Instant::max()) return;
  if (exchange.key.part != 0) return;
  if (now < next_warning_) {  // What waits behind another mostly waits for the same: its turn is later.
    exchange.stalls_at = next_warning_;
    return;
  }
  std::string text = stall_text(exchange, config_.stall_warning, now - exchange.begun);
  if (text.empty()) return;
  warning_ = StallWarning{exchange.key, std::move(text)};
  next_warning_ = now + config_.stall_warning;
}

/// What others have said of an operation that this rank has not called.
void Engine::Impl::drop_early(const OpKey& key) {
  const Exchange* exchange = find(key);
  if (exchange == nullptr || exchange->stage != Stage::kEarly) return;
  --early_;
  for (std::uint32_t rank = 0; rank < config_.local_size; ++rank) {
    early_bytes_[rank] -= exchange->said[rank].data.size();
  }
  exchanges_.erase(key);
}

void Engine::Impl::forget(const OpKey& key) {
  if (tombstones_.erase(key) > 0) std::erase(tombstone_order_, key);
  drop_early(key);
  if (!forgotten_.insert(key).second) return;
  forgotten_order_.push_back(key);
  if (forgotten_order_.size() <= kMaxForgotten) return;
  forgotten_.erase(forgotten_order_.front());
  forgotten_order_.pop_front();
}

void Engine::Impl::remember_failure(const OpKey& key, const Status& status) {
  if (!tombstones_.emplace(key, status).second) return;
  tombstone_order_.push_back(key);
  if (tombstone_order_.size() <= kMaxTombstones) return;
  tombstones_.erase(tombstone_order_.front());
  tombstone_order_.pop_front();
}

}  // namespace herring::intra_node
