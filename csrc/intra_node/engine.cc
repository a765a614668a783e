#include "intra_node/engine.h"

#include <algorithm>
#include <utility>

#include "core/clock.h"
#include "intra_node/engine_impl.h"

namespace herring::intra_node {
namespace {

std::optional<std::uint64_t> offset_in(std::span<const std::byte> memory, std::span<const std::byte> arena) {
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  const auto base = reinterpret_cast<std::uintptr_t>(arena.data());
  if (at < base || at - base >= arena.size() || memory.size() > arena.size() - (at - base)) return std::nullopt;
  return at - base;
}

}  // namespace

Engine::Impl::Impl(EngineConfig config)
    : config_(std::move(config)),
      early_bytes_(config_.local_size),
      lost_(config_.local_size),
      pending_dones_(config_.local_size) {
  if (config_.local_rank >= config_.local_size || config_.arenas.size() != config_.local_size || !config_.allocate ||
      !config_.deallocate) {
    throw Error(Code::kInvalidArgument, "intra-node engine: local rank " + std::to_string(config_.local_rank) + " of " +
                                            std::to_string(config_.local_size) + " with " +
                                            std::to_string(config_.arenas.size()) + " arenas");
  }
}

Engine::Impl::~Impl() {
  const auto give_back = [this](const Exchange& exchange) {
    if (!exchange.staging.empty()) config_.deallocate(exchange.staging);
  };
  for (const auto& [key, exchange] : exchanges_) give_back(*exchange);
  for (const auto& exchange : retired_) give_back(*exchange);
  for (const auto& exchange : retired_and_taken_) give_back(*exchange);
}

void Engine::Impl::submit(Instant now, const LocalOperation& operation) {
  const auto refuse = [&](Status status) {
    ++stats_.ops_failed;
    actions_.push_back(CompleteLocal{operation.key, std::move(status)});
  };
  const Status good = check(operation, config_);
  if (find_active(operation.key) != nullptr) {
    return refuse(Status(Code::kInvalidArgument, to_string(operation.descriptor) + ": operation " +
                                                     std::to_string(operation.key.op) + " is in use already"));
  }
  const OpKey key = operation.key;
  if (!good.is_ok()) return refuse(good);
  if (const auto dead = tombstones_.find(key); dead != tombstones_.end()) return refuse(dead->second);

  auto& slot = exchanges_[key];
  if (!slot) {
    slot = std::make_unique<Exchange>();
    slot->said.resize(config_.local_size);
  } else {
    --early_;
    for (std::uint32_t rank = 0; rank < config_.local_size; ++rank) early_bytes_[rank] -= slot->said[rank].data.size();
  }
  slot->key = key;
  slot->operation = operation;
  begin(now, *slot);
}

void Engine::Impl::begin(Instant now, Exchange& exchange) {
  LocalOperation& operation = exchange.operation;
  ++active_;
  exchange.stage = Stage::kGathering;
  exchange.me =
      static_cast<std::uint32_t>(std::ranges::find(operation.members, config_.local_rank) - operation.members.begin());
  const Duration patience = std::min(operation.timeout, Duration::max() - operation.grace) + operation.grace;
  exchange.deadline = deadline_after(now, patience);
  exchange.begun = now;
  const bool may_stall = config_.stall_warning < operation.timeout && operation.timeout < kNoHaste;
  if (may_stall) exchange.stalls_at = now + config_.stall_warning;
  wake_at(std::min(exchange.deadline, exchange.stalls_at));
  exchange.way = choose_way(operation, config_);
  exchange.layout = layout_hash(operation, exchange.way);
  for (const std::uint32_t rank : operation.members) {
    if (!lost_[rank]) continue;
    exchange.said[rank].released = true;
    return fail(now, exchange, Status(Code::kPeerLost, to_string(operation.descriptor) + ": " + *lost_[rank]));
  }
  if (!place(now, exchange)) return;
  if (!operation.announced) announce(exchange);
  advance(now, exchange);
}

/// Decides where the others find our bytes, and puts them there. False where there is no room.
bool Engine::Impl::place(Instant now, Exchange& exchange) {
  const bool has_bytes = exchange.way != Way::kNothing && (!exchange.is_rooted() || exchange.is_root());
  if (!has_bytes) return true;
  if (exchange.way == Way::kInline) {
    exchange.location = Location::kInline;
    return true;
  }
  const std::span<std::byte> memory = exchange.operation.memory;
  if (offset_in(memory, config_.arenas[config_.local_rank])) {
    exchange.location = Location::kInPlace;
    return true;
  }
  exchange.staging = config_.allocate(memory.size());
  if (exchange.staging.size() != memory.size()) {
    exchange.staging = {};
    fail(now, exchange,
         Status(Code::kUnavailable, to_string(exchange.operation.descriptor) + ": no room for " +
                                        std::to_string(memory.size()) + " bytes in the shared memory of rank " +
                                        std::to_string(exchange.operation.world_ranks[exchange.me]) +
                                        "; raise HERRING_ARENA_BYTES"));
    return false;
  }
  stats_.staging_bytes += memory.size();
  exchange.location = Location::kStaged;
  const std::size_t first = actions_.size();
  copy_in(exchange, actions_);
  emit(first);
  return true;
}

void Engine::Impl::announce(Exchange& exchange) {
  LocalMessage ready;
  ready.kind = MessageKind::kReady;
  ready.key = exchange.key;
  ready.descriptor = exchange.operation.descriptor;
  ready.layout = exchange.layout;
  ready.location = exchange.location;
  ready.is_patient = exchange.operation.timeout >= kNoHaste;
  if (exchange.location == Location::kInline) {
    ready.data = exchange.operation.memory;
  } else if (exchange.location != Location::kNone) {
    ready.offset = *offset_in(slot_of(exchange, exchange.me, config_), config_.arenas[config_.local_rank]);
  }
  // What nothing follows may come in any order.
  const bool says_all = exchange.way == Way::kInline || exchange.way == Way::kNothing;
  if (says_all && exchange.size() == config_.local_size) {
    ready.kind = MessageKind::kReadyToAll;
    return send_to_all(ready);
  }
  for (const std::uint32_t rank : exchange.operation.members) {
    if (rank != config_.local_rank) send(rank, ready);
  }
}

void Engine::Impl::advance(Instant now, Exchange& exchange) {
  if (exchange.stage != Stage::kGathering || !check_agreement(now, exchange)) return;
  if (exchange.everybody_is_ready()) gathered(now, exchange);
}

void Engine::Impl::gathered(Instant now, Exchange& exchange) {
  for (std::uint32_t i = 0; i < exchange.size(); ++i) {
    if (i == exchange.me || location_fits(exchange, i, config_)) continue;
    return fail(now, exchange,
                Status(Code::kProtocol, "rank " + std::to_string(exchange.operation.world_ranks[i]) +
                                            " gave a place outside its shared memory"));
  }
  if (config_.check_finite) {
    const Status status = check_finite(exchange, config_);
    if (!status.is_ok()) return fail(now, exchange, status);
  }
  const std::size_t first = actions_.size();
  switch (exchange.way) {
    case Way::kNothing:
      if (exchange.operation.network) return reduce(exchange);
      return complete(exchange, Status::ok());
    case Way::kInline:
      reduce_inline(exchange, actions_);
      emit(first);
      return complete(exchange, Status::ok());
    case Way::kSlots:
      return reduce(exchange);
    case Way::kFromRoot:
      exchange.stage = Stage::kSharing;
      if (exchange.is_root()) return try_finish(exchange);
      copy_from_root(exchange, config_, actions_);
      emit(first);
      return complete(exchange, Status::ok());
  }
}

void Engine::Impl::reduce(Exchange& exchange) {
  if (exchange.way == Way::kSlots) {
    const std::size_t first = actions_.size();
    reduce_own(exchange, config_, actions_);
    emit(first);
  }
  if (!exchange.operation.network) return share(exchange);
  exchange.stage = Stage::kNetwork;
  exchange.network_pending = true;
  const std::span<std::byte> slot =
      exchange.way == Way::kSlots ? slot_of(exchange, exchange.me, config_) : std::span<std::byte>();
  actions_.push_back(NetworkAction{exchange.key, slot});
}

void Engine::Impl::share(Exchange& exchange) {
  exchange.stage = Stage::kSharing;
  if (exchange.way == Way::kSlots && exchange.owns_bytes(exchange.me)) {
    LocalMessage reduced;
    reduced.kind = MessageKind::kReduced;
    reduced.key = exchange.key;
    for (const std::uint32_t rank : exchange.operation.members) {
      if (rank != config_.local_rank) send(rank, reduced);
    }
  }
  try_finish(exchange);
}

void Engine::Impl::on_network_done(Instant now, const OpKey& key, const Status& status) {
  Exchange* exchange = find_active(key);
  if (exchange == nullptr || !exchange->network_pending) return;
  exchange->network_pending = false;
  if (exchange->stage == Stage::kFailing) {
    if (now >= exchange->deadline) return report_failure(*exchange);
    wake_at(exchange->deadline);
    return try_fail(*exchange);
  }
  if (!status.is_ok()) return fail(now, *exchange, status);
  const std::size_t first = actions_.size();
  if (exchange->way == Way::kSlots) spread_own(*exchange, config_, actions_);
  emit(first);
  share(*exchange);
}

void Engine::Impl::try_finish(Exchange& exchange) {
  if (exchange.stage != Stage::kSharing) return;
  if (exchange.way == Way::kFromRoot) {
    // A staged root's caller may go on at once; in place, the others must have copied.
    if (exchange.location == Location::kStaged || exchange.everybody_let_go()) complete(exchange, Status::ok());
    return;
  }
  for (std::uint32_t i = 0; i < exchange.size(); ++i) {
    if (i != exchange.me && !exchange.can_do_without(i)) return;
  }
  complete(exchange, Status::ok());
}

void Engine::Impl::complete(Exchange& exchange, const Status& status) {
  --active_;
  ++(status.is_ok() ? stats_.ops_completed : stats_.ops_failed);
  exchange.stage = Stage::kReleasing;
  if (status.is_ok()) {
    for (std::uint32_t i = 0; i < exchange.size(); ++i) {
      if (i == exchange.me) continue;
      const std::uint32_t rank = exchange.rank_of(i);
      if (reads_staging_of(exchange, i)) {
        pending_dones_[rank].push_back(exchange.key);
        // A root in place waits for it.
        if (exchange.way == Way::kFromRoot || pending_dones_[rank].size() >= kMaxPendingDones) send_dones(rank);
      }
      if (!is_read_by(exchange, i)) exchange.said[rank].released = true;
    }
  }
  if (active_ == 0) {
    for (std::uint32_t rank = 0; rank < config_.local_size; ++rank) send_dones(rank);
  }
  // Last: what others wait for is on its way when the caller hears of it, and may leave.
  actions_.push_back(CompleteLocal{exchange.key, status});
  try_retire(exchange);
}

void Engine::Impl::try_retire(Exchange& exchange) {
  if ((exchange.stage == Stage::kReleasing || exchange.stage == Stage::kQuarantined) && exchange.everybody_let_go()) {
    retire(exchange);
  }
}

/// `exchange` lives on until its actions have been carried out.
void Engine::Impl::retire(Exchange& exchange) {
  if (exchange.stage == Stage::kQuarantined) --quarantined_;
  auto node = exchanges_.extract(exchange.key);
  retired_.push_back(std::move(node.mapped()));
}

void Engine::Impl::take_actions(LocalActions& out) {
  const auto free_all = [this](std::vector<std::unique_ptr<Exchange>>& exchanges) {
    for (const auto& exchange : exchanges) {
      if (exchange->staging.empty()) continue;
      stats_.staging_bytes -= exchange->staging.size();
      config_.deallocate(exchange->staging);
    }
    exchanges.clear();
  };
  free_all(retired_and_taken_);
  if (actions_.empty()) return free_all(retired_);
  retired_and_taken_.swap(retired_);
  if (out.empty()) {
    out.swap(actions_);
  } else {
    std::ranges::move(actions_, std::back_inserter(out));
    actions_.clear();
  }
}

bool Engine::Impl::is_idle() const {
  return exchanges_.size() == quarantined_ && actions_.empty() && retired_.empty() && retired_and_taken_.empty();
}

bool Engine::Impl::is_untroubled() const {
  return exchanges_.empty() && is_idle() && tombstones_.empty() &&
         std::ranges::none_of(lost_, [](const auto& why) { return why.has_value(); });
}

Exchange* Engine::Impl::find(const OpKey& key) {
  const auto found = exchanges_.find(key);
  return found == exchanges_.end() ? nullptr : found->second.get();
}

Exchange* Engine::Impl::find_active(const OpKey& key) {
  Exchange* exchange = find(key);
  return exchange == nullptr || exchange->stage == Stage::kEarly ? nullptr : exchange;
}

bool Engine::Impl::is_member(const Exchange& exchange, std::uint32_t rank) const {
  return std::ranges::find(exchange.operation.members, rank) != exchange.operation.members.end();
}

/// Counts the actions from `first` on.
void Engine::Impl::emit(std::size_t first) {
  for (std::size_t i = first; i < actions_.size(); ++i) {
    if (const auto* copy = std::get_if<CopyAction>(&actions_[i])) stats_.bytes_copied += copy->from.size();
    if (const auto* reduce = std::get_if<ReduceLocal>(&actions_[i])) {
      stats_.bytes_reduced += reduce->inputs.size() * reduce->inputs.front().size();
    }
  }
}

Engine::Engine(EngineConfig config) : impl_(std::make_unique<Impl>(std::move(config))) {}
Engine::~Engine() = default;

void Engine::submit(Instant now, const LocalOperation& operation) { impl_->submit(now, operation); }
void Engine::on_network_done(Instant now, const OpKey& key, const Status& status) {
  impl_->on_network_done(now, key, status);
}
void Engine::forget(const OpKey& key) { impl_->forget(key); }
void Engine::abort(Instant now, const OpKey& key, const Status& why) { impl_->abort(now, key, why); }
void Engine::on_message(Instant now, std::uint32_t from, std::span<const std::byte> bytes) {
  impl_->on_message(now, from, bytes);
}
void Engine::on_peer_lost(Instant now, std::uint32_t local_rank, const std::string& why) {
  impl_->on_peer_lost(now, local_rank, why);
}
void Engine::on_peer_left(Instant now, std::uint32_t local_rank, const std::string& why) {
  impl_->on_peer_left(now, local_rank, why);
}
void Engine::on_tick(Instant now) { impl_->on_tick(now); }
Instant Engine::next_deadline() const { return impl_->next_deadline(); }
std::optional<StallWarning> Engine::take_warning() { return impl_->take_warning(); }
void Engine::take_actions(LocalActions& out) { impl_->take_actions(out); }
bool Engine::is_idle() const { return impl_->is_idle(); }
bool Engine::is_untroubled() const { return impl_->is_untroubled(); }
const EngineStats& Engine::stats() const { return impl_->stats(); }

}  // namespace herring::intra_node
