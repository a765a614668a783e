#include <algorithm>
#include <utility>

#include "intra_node/engine_impl.h"

namespace herring::intra_node {

void Engine::Impl::on_message(Instant now, std::uint32_t from, std::span<const std::byte> bytes) {
  if (from >= config_.local_size || from == config_.local_rank) {
    ++stats_.messages_rejected;
    return;
  }
  const std::optional<LocalMessage> message = decode(bytes);
  if (!message) {
    ++stats_.messages_rejected;
    return;
  }
  // A late word from one that counts as lost changes nothing, but that it let go of our memory.
  if (lost_[from] && message->kind == MessageKind::kReady) return;
  switch (message->kind) {
    case MessageKind::kReady:
    case MessageKind::kReadyToAll:
      return on_ready(now, from, *message);
    case MessageKind::kReduced:
      return on_reduced(from, *message);
    case MessageKind::kDone:
      return on_done(from, *message);
    case MessageKind::kError:
      return on_error(now, from, *message);
  }
}

void Engine::Impl::on_ready(Instant now, std::uint32_t from, const LocalMessage& message) {
  if (tombstones_.contains(message.key) || forgotten_.contains(message.key)) return;
  Exchange* exchange = find(message.key);
  if (exchange == nullptr) exchange = open_early(from, message);
  if (exchange == nullptr) return;
  Said& said = exchange->said[from];
  if (said.ready || (exchange->stage != Stage::kEarly && !is_member(*exchange, from))) {
    ++stats_.messages_rejected;
    return;
  }
  said.ready = true;
  said.descriptor = message.descriptor;
  said.layout = message.layout;
  said.location = message.location;
  said.is_patient = message.is_patient;
  said.offset = message.offset;
  said.data.assign(message.data.begin(), message.data.end());
  if (exchange->stage == Stage::kEarly) {
    early_bytes_[from] += said.data.size();
  } else {
    advance(now, *exchange);
  }
}

/// Room for an operation that we have not called yet; nothing (and the sender is told) where there is too much of that.
Exchange* Engine::Impl::open_early(std::uint32_t from, const LocalMessage& message) {
  if (early_ >= kMaxEarly || early_bytes_[from] + message.data.size() > kMaxEarlyBytes) {
    ++stats_.messages_rejected;
    const Status status(Code::kUnavailable, to_string(message.descriptor) + ": local rank " +
                                                std::to_string(config_.local_rank) + " is " + std::to_string(early_) +
                                                " operations behind, and has no room for more; wait for it");
    remember_failure(message.key, status);
    send_error(from, message.key, status, false);
    return nullptr;
  }
  auto exchange = std::make_unique<Exchange>();
  exchange->key = message.key;
  exchange->said.resize(config_.local_size);
  ++early_;
  return (exchanges_[message.key] = std::move(exchange)).get();
}

void Engine::Impl::on_reduced(std::uint32_t from, const LocalMessage& message) {
  Exchange* exchange = find(message.key);
  const bool expected = exchange != nullptr && exchange->stage != Stage::kEarly && exchange->way == Way::kSlots &&
                        is_member(*exchange, from) && exchange->said[from].ready && !exchange->said[from].reduced;
  if (!expected) {
    // After a failure it may well come late.
    if (!tombstones_.contains(message.key)) ++stats_.messages_rejected;
    return;
  }
  const auto member = static_cast<std::uint32_t>(std::ranges::find(exchange->operation.members, from) -
                                                 exchange->operation.members.begin());
  const bool wanted =
      exchange->stage == Stage::kGathering || exchange->stage == Stage::kNetwork || exchange->stage == Stage::kSharing;
  // It has seen everybody's Ready and found them equal; so has ours been, and its location is checked here.
  if (!wanted || !location_fits(*exchange, member, config_)) return;
  exchange->said[from].reduced = true;
  const std::size_t first = actions_.size();
  copy_out(*exchange, member, config_, actions_);
  emit(first);
  try_finish(*exchange);
}

void Engine::Impl::on_done(std::uint32_t from, const LocalMessage& message) {
  for (const OpKey& key : message.keys) {
    Exchange* exchange = find(key);
    if (exchange != nullptr && exchange->stage != Stage::kEarly && is_member(*exchange, from)) {
      let_go(*exchange, from);
    } else if (!tombstones_.contains(key)) {
      ++stats_.messages_rejected;
    }
  }
}

void Engine::Impl::on_error(Instant now, std::uint32_t from, const LocalMessage& message) {
  Exchange* exchange = find(message.key);
  if (exchange != nullptr && exchange->stage != Stage::kEarly && !is_member(*exchange, from)) {
    ++stats_.messages_rejected;
    return;
  }
  if (message.reply) {
    if (exchange != nullptr && exchange->stage != Stage::kEarly) let_go(*exchange, from);
    return;
  }
  const Status status(message.code, message.text);
  if (exchange == nullptr || exchange->stage == Stage::kEarly) {
    // We hold nothing of it; when we come to call it, it has failed already.
    drop_early(message.key);
    if (!forgotten_.contains(message.key)) remember_failure(message.key, status);
    return send_error(from, message.key, status, true);
  }
  switch (exchange->stage) {
    case Stage::kGathering:
    case Stage::kNetwork:
    case Stage::kSharing:
      // Our own Error to it, which fail() sends, is the answer.
      exchange->said[from].released = true;
      return fail(now, *exchange, status, true);
    case Stage::kReleasing:
      send_error(from, message.key, status, true);
      return let_go(*exchange, from);
    case Stage::kFailing:
    case Stage::kQuarantined:
    case Stage::kEarly:
      return let_go(*exchange, from);
  }
}

void Engine::Impl::send(std::uint32_t to, const LocalMessage& message) {
  send_dones(to);
  actions_.push_back(SendLocal{to, encode(message)});
}

void Engine::Impl::send_to_all(const LocalMessage& message) {
  for (std::uint32_t rank = 0; rank < config_.local_size; ++rank) send_dones(rank);
  if (config_.local_size > 1) actions_.push_back(SendLocal{kEverybody, encode(message)});
}

/// Tells a rank whose staging memory we have read. That is not urgent, so it goes along with something that is.
void Engine::Impl::send_dones(std::uint32_t to) {
  if (pending_dones_[to].empty()) return;
  LocalMessage done;
  done.kind = MessageKind::kDone;
  done.keys = std::exchange(pending_dones_[to], {});
  if (!lost_[to]) actions_.push_back(SendLocal{to, encode(done)});
}

void Engine::Impl::send_error(std::uint32_t to, const OpKey& key, const Status& status, bool reply) {
  LocalMessage error;
  error.kind = MessageKind::kError;
  error.key = key;
  error.code = status.code();
  error.text = status.message();
  error.reply = reply;
  send(to, error);
}

}  // namespace herring::intra_node
