#include "server/engine.h"

#include <algorithm>
#include <utility>

#include "server/delivery.h"
#include "server/grant_plan.h"

namespace herring::server {
namespace {

constexpr std::uint32_t kMaxRetries = 8;

}  // namespace

Engine::Engine(const EngineConfig& config, std::span<std::byte> slots) : impl_(std::make_unique<Impl>(config, slots)) {}
Engine::~Engine() = default;

bool Engine::on_control(Instant now, const wire::Header& header, std::span<std::byte> body, Token token) {
  return impl_->on_control(now, header, body, token);
}
void Engine::on_received(Instant now, Token token, const Status& status, const wire::Header& header,
                         const std::shared_ptr<Loan>& loan) {
  impl_->on_received(now, token, status, header, loan);
}
void Engine::on_reduced(Instant now, Token token, std::span<const NotFiniteInput> found) {
  impl_->on_reduced(now, token, found);
}
void Engine::on_sent(Instant now, Token token, const Status& status) { impl_->on_sent(now, token, status); }
void Engine::on_withdrawn(Instant now, Token token) { impl_->on_withdrawn(now, token); }
void Engine::on_peer_lost(Instant now, PeerId worker, const std::string& why) { impl_->on_peer_lost(now, worker, why); }
void Engine::on_peer_left(Instant now, PeerId worker, const std::string& why) { impl_->on_peer_left(now, worker, why); }
void Engine::on_tick(Instant now) { impl_->on_tick(now); }
void Engine::on_core_wait(double share) { impl_->on_core_wait(share); }
Instant Engine::next_deadline() const { return impl_->next_deadline(); }
std::string Engine::take_warning() { return impl_->take_warning(); }
void Engine::take_actions(Actions& out) { impl_->take_actions(out); }
bool Engine::is_idle() const { return impl_->is_idle(); }
bool Engine::is_quiet() const { return impl_->is_quiet(); }
const EngineStats& Engine::stats() const { return impl_->stats(); }
const std::vector<Lateness>& Engine::lateness() const { return impl_->lateness(); }

Engine::Impl::Impl(const EngineConfig& config, std::span<std::byte> slots)
    : config_(config),
      slots_(slots),
      window_(config.are_lanes_apart, config.window, config.max_window),
      run_(std::min({config.max_run, wire::kMaxRun, 1u << SlotPool::kMaxOrder}), config.run_time) {
  if (config.workers == 0 || config.max_chunk_bytes == 0 || config.window == 0) {
    throw Error(Code::kInvalidArgument, "server engine: workers, max_chunk_bytes and window must be at least 1");
  }
  if (config.backup_workers > 0 && (config.failover || config.lanes == 0)) {
    throw Error(Code::kInvalidArgument, "server engine: backup workers do not go together with failover");
  }
  const std::size_t count = slots.size() / config.max_chunk_bytes;
  if (count < config.workers) {
    throw Error(Code::kInvalidArgument, "server engine: " + std::to_string(slots.size()) + " bytes hold " +
                                            std::to_string(count) + " chunks of " +
                                            std::to_string(config.max_chunk_bytes) + "; " +
                                            std::to_string(config.workers) + " workers need one each");
  }
  pool_ = SlotPool(static_cast<std::uint32_t>(std::min<std::size_t>(count, kNone - 1)));
  workers_.resize(config.workers);
  lateness_.resize(config.workers);
  plan_ = std::make_unique<GrantPlan>(*this);
  if (config.failover) {
    delivery_ = std::make_unique<RecoverableDelivery>(*this);
  } else {
    delivery_ = std::make_unique<PlainDelivery>(*this);
  }
}

Engine::Impl::~Impl() = default;

Instant Engine::Impl::next_deadline() const {
  return std::min(
      {delivery_->next_deadline(), one_way_due_, timers_.empty() ? Instant::max() : timers_.begin()->first});
}

bool Engine::Impl::is_from_job(const wire::Header& header) const {
  return header.job_id == config_.job_id && header.epoch == config_.epoch.value && header.sender < config_.workers &&
         !workers_[header.sender].lost;
}

bool Engine::Impl::on_control(Instant now, const wire::Header& header, std::span<std::byte> body, Token token) {
  if (!is_from_job(header) || header.payload_bytes != body.size()) {
    ++stats_.messages_rejected;
    return false;
  }
  Arrival arrival{header, body, token};
  switch (header.type) {
    case wire::MessageType::kAnnounce:
      handle_announce(now, arrival);
      break;
    case wire::MessageType::kCancel:
      handle_cancel(now, header, body);
      break;
    case wire::MessageType::kReady:
      delivery_->handle_ready(now, header);
      break;
    case wire::MessageType::kReceipt:
      delivery_->handle_receipt(now, header, body);
      break;
    case wire::MessageType::kMoved:
      delivery_->handle_moved(now, header);
      break;
    default:
      ++stats_.messages_rejected;
      return false;
  }
  follow_up(now);
  return arrival.is_kept;
}

bool Engine::Impl::is_quiet() const {
  if (is_idle()) return true;
  if (!config_.near_worker || !receives_.empty() || !sends_.empty() || !reducing_.empty()) return false;
  // Of the whole job's operations everybody is a part; of another group's it is not known here.
  return std::ranges::all_of(ops_, [](const auto& known) {
    const Op& op = *known.second;
    if (op.drained) return true;
    return op.state == OpState::kGathering && !op.has_near && (op.is_one_hop || op.key.op.group == GroupId{0});
  });
}

/// What became possible: announces that had to wait for an earlier operation of their key, then grants.
void Engine::Impl::follow_up(Instant now) {
  while (!replay_.empty()) {
    Deferred next = std::move(replay_.front());
    replay_.pop_front();
    undefer(next);
    Arrival& arrival = next.arrival;
    arrival.is_kept = false;
    if (!next.body.empty()) arrival.body = next.body;
    if (!workers_[arrival.header.sender].lost) process_announce(now, arrival);
    if (next.body.empty() && !arrival.is_kept) actions_.emplace_back(ReleaseAction{arrival.token});
  }
  if (room_changed_) look_for_room();
  schedule(now);
}

void Engine::Impl::on_reduced(Instant now, Token token, std::span<const NotFiniteInput> found) {
  const auto known = reducing_.find(token.value);
  if (known == reducing_.end()) return;
  const auto [id, number] = known->second;
  reducing_.erase(known);
  Op& op = *find_op(id);
  Chunk& chunk = op.in_flight.at(number);
  chunk.is_reducing = false;
  if (op.state == OpState::kFailed) {
    drain(now, op, false);
  } else if (!found.empty()) {
    fail(now, op, not_finite(op, number, found));  // Its results are never sent.
  } else {
    for (Input& input : chunk.inputs) {
      if (&input != &chunk.output()) release_slots(chunk, input);
    }
    send_results(now, op, number);
  }
  follow_up(now);
}

void Engine::Impl::on_received(Instant now, Token token, const Status& status, const wire::Header& header,
                               const std::shared_ptr<Loan>& loan) {
  const auto found = receives_.find(token.value);
  if (found == receives_.end() || found->second.is_withdrawn) return;
  const Receive receive = found->second;
  receives_.erase(found);
  Op& op = *find_op(receive.op);
  Participant& participant = op.participants[receive.participant];
  Chunk& chunk = op.in_flight.at(receive.chunk);
  Input& input = chunk.inputs[receive.input];
  const bool good =
      status.is_ok() && is_from_job(header) && header.type == wire::MessageType::kPush && key_of(header) == op.key &&
      header.sender == participant.peer.value && header.tag == participant.push_tag + receive.chunk &&
      header.chunk == receive.chunk && header.offset == op.chunk_offset(receive.chunk) &&
      header.payload_bytes == op.run_bytes(receive.chunk, chunk.count) && input.is_loan == (loan != nullptr);
  if (!good) {
    ++stats_.messages_rejected;
    Receive again = receive;
    const bool is_enough = status.code() == Code::kCorrupted || ++again.retries > kMaxRetries;
    // What was granted has to meet a receive, or its memory there is never free again.
    if (has_arrived(status) || !is_enough) {
      post(op, again, input.data);
    } else {
      // The network does not take receives any more; posting for ever would be a loop without an end.
      input.token = 0;
      --participant.outstanding;
      workers_[participant.peer.value].granted -= chunk.count;
    }
    if (!is_enough) return;
    if (op.state == OpState::kFailed) {
      drain(now, op, false);
    } else {
      fail(now, op,
           Status(status.code() == Code::kCorrupted ? Code::kCorrupted : Code::kTransport,
                  to_string(op.shape.descriptor) + ": a server could not receive " + std::to_string(input.data.size()) +
                      " bytes (chunk " + std::to_string(receive.chunk) + ") from rank " +
                      std::to_string(participant.peer.value) + ": " +
                      (status.is_ok() ? "the messages that arrived were not Herring's" : status.message())));
    }
    follow_up(now);
    return;
  }
  input.token = 0;
  if (loan != nullptr) input.data = loan->memory();
  input.loan = loan;
  --participant.outstanding;
  participant.pushed += chunk.count;
  workers_[participant.peer.value].granted -= chunk.count;
  stats_.bytes_received += header.payload_bytes;
  if (op.state == OpState::kFailed) {
    drain(now, op, false);
  } else if (--chunk.missing == 0) {
    window_.on_complete(now - chunk.granted, chunk.count);
    run_.on_complete(now, chunk.granted, chunk.count);
    finish_chunk(now, op, receive.chunk);
  }
  follow_up(now);
}

void Engine::Impl::on_sent(Instant now, Token token, const Status& status) {
  const auto found = sends_.find(token.value);
  if (found == sends_.end()) return;
  const Send sent = found->second;
  sends_.erase(found);
  if (sent.is_credit) {
    workers_[sent.peer.value].credit_on_way = false;
    credit(sent.peer, workers_[sent.peer.value], one_way_due_ == Instant::max());
  }
  if (sent.is_answer) {
    --workers_[sent.peer.value].answers_on_way;
    answer_cancels(sent.peer, workers_[sent.peer.value]);
  }
  if (sent.is_settled) delivery_->on_sent_settled(sent.peer);
  Op* op = find_op(sent.op);
  if (op == nullptr) return;
  if (sent.is_result) {
    --op->sends;
    if (sent.chunk != kNone) {
      const auto chunk = op->in_flight.find(sent.chunk);
      if (--chunk->second.sends == 0) {
        for (Input& input : chunk->second.inputs) release_slots(chunk->second, input);
        op->in_flight.erase(chunk);
      }
    }
  }
  if (!status.is_ok() && op->is_live() && !workers_[sent.peer.value].lost) {
    fail(now, *op,
         Status(status.code(),
                "a server could not reach rank " + std::to_string(sent.peer.value) + ": " + status.message()));
  } else if (op->state == OpState::kFailed) {
    drain(now, *op, false);
  } else if (op->state == OpState::kFinishing && op->sends == 0) {
    delivery_->after_sends(now, *op);
  } else if (op->state == OpState::kKept && op->sends == 0) {
    drop_eager_data(*op);  // Results wait for those who are late, maybe for long.
  }
  follow_up(now);
}

void Engine::Impl::on_tick(Instant now) {
  delivery_->on_tick(now);
  if (now >= one_way_due_) {
    one_way_due_ = Instant::max();
    for (std::uint32_t worker = 0; worker < config_.workers; ++worker) credit(PeerId{worker}, workers_[worker], true);
  }
  while (!timers_.empty() && timers_.begin()->first <= now) {
    const std::uint64_t id = timers_.begin()->second;
    Op& op = *find_op(id);
    if (op.state == OpState::kFinishing) {
      set_timer(op, Instant::max());
      delivery_->on_timer(now, op);
    } else if (op.state == OpState::kFailed) {
      if (op.drained) {
        erase_op(op.id);
      } else {
        // A worker that should have said how many pushes it sent did not: its receives are withdrawn.
        drain(now, op, true);
        if (Op* left = find_op(id); left != nullptr && !left->drained) set_timer(*left, Instant::max());
      }
    } else if (now >= op.stalls_at && now < op.deadline) {
      note_stall(now, op);
    } else if (op.disagreed) {
      fail(now, op, Status(Code::kMismatch, mismatch_text(op)));
    } else if (op.is_join() && op.state == OpState::kGathering && now < op.deadline) {
      try_to_decide(now, op);
    } else {
      fail(now, op, Status(Code::kTimeout, timeout_text(op)));
    }
  }
  follow_up(now);
}

/// Of the workers that have announced, this lane's is the first.
bool Engine::Impl::has_first(const Op& op) const {
  const auto is_before = [](const Participant& a, const Participant& b) { return a.peer.value < b.peer.value; };
  const auto first = std::ranges::min_element(op.participants, is_before);
  return first != op.participants.end() && config_.near_worker == first->peer;
}

void Engine::Impl::note_stall(Instant now, Op& op) {
  op.stalls_at = Instant::max();
  // Of the lanes that have a part of it, one says it. What waits behind it mostly waits for the same: its turn is
  // later.
  const bool is_said_here = op.key.op.part == 0 && op.shape.shard_offset == 0 && (!op.is_one_hop || has_first(op));
  if (is_said_here && op.state == OpState::kGathering && !op.disagreed) {
    if (now < next_warning_) {
      op.stalls_at = next_warning_;
    } else {
      warning_ = stall_text(now, op);
      next_warning_ = now + config_.stall_warning;
    }
  }
  if (op.disagreed) {
    set_timer(op, std::min(op.deadline, now + config_.mismatch_grace));
  } else if (op.is_join() && op.state == OpState::kGathering && !op.backup->waits_for_all) {
    try_to_decide(now, op);
  } else {
    set_timer(op, op.due());
  }
}

void Engine::Impl::set_timer(Op& op, Instant when) {
  if (op.timer != Instant::max()) timers_.erase({op.timer, op.id});
  op.timer = when;
  if (when != Instant::max()) timers_.insert({when, op.id});
}

Op& Engine::Impl::create_op(const Key& key, Instant now) {
  auto op = std::make_unique<Op>();
  op->id = next_op_++;
  op->key = key;
  op->first_announce = now;
  ++undrained_;
  return *ops_.emplace(op->id, std::move(op)).first->second;
}

void Engine::Impl::erase_op(std::uint64_t id) {
  const auto found = ops_.find(id);
  set_timer(*found->second, Instant::max());
  if (const auto failed = failed_.find(found->second->key); failed != failed_.end()) {
    if (std::erase(failed->second, id) > 0) std::erase(failed_order_, id);
    if (failed->second.empty()) failed_.erase(failed);
  }
  delivery_->forget(*found->second);
  give_back_room(*found->second);
  for (Participant& participant : found->second->participants) {
    drop_records(participant.peer, participant.record_bytes);
  }
  drop_eager_data(*found->second);
  ops_.erase(found);
}

/// What came with the announces is not needed any more.
void Engine::Impl::drop_eager_data(Op& op) {
  for (Participant& participant : op.participants) {
    if (std::exchange(participant.data, {}).empty()) continue;
    actions_.emplace_back(ReleaseAction{participant.data_token});
  }
}

Op* Engine::Impl::find_op(std::uint64_t id) {
  const auto found = ops_.find(id);
  return found == ops_.end() ? nullptr : found->second.get();
}

Op* Engine::Impl::find_live(const Key& key) {
  const auto found = live_.find(key);
  return found == live_.end() ? nullptr : find_op(found->second);
}

/// Its key is free again; another operation that has the key by now keeps it.
void Engine::Impl::end_live(const Op& op) {
  const auto found = live_.find(op.key);
  if (found != live_.end() && found->second == op.id) live_.erase(found);
}

wire::Header Engine::Impl::header_to(const Key& key, wire::MessageType type) const {
  wire::Header header;
  header.type = type;
  header.job_id = config_.job_id;
  header.epoch = config_.epoch.value;
  header.sender = config_.self.value;
  header.op = key.op.op;
  header.group = key.op.group.value;
  header.part = key.op.part;
  header.shard = key.shard;
  return header;
}

void Engine::Impl::send(PeerId to, Tag tag, const wire::Header& header, std::vector<std::byte> body,
                        std::span<const std::byte> payload, const Send& record) {
  SendAction action{to, tag, header, std::move(body), payload, Token{next_token_++}};
  action.header.payload_bytes = static_cast<std::uint32_t>(action.body.size() + payload.size());
  sends_.emplace(action.token.value, record);
  actions_.emplace_back(std::move(action));
}

void Engine::Impl::send_error(PeerId to, const Key& key, std::uint64_t tag, std::uint32_t results, const Status& status,
                              bool is_answer) {
  wire::Header header = header_to(key, wire::MessageType::kError);
  header.tag = tag;
  header.count = results;
  send(to, kControlTag, header, wire::encode_reason(status), {}, {0, kNone, to, false, false, false, is_answer});
}

void Engine::Impl::take_actions(Actions& out) {
  out.insert(out.end(), std::make_move_iterator(actions_.begin()), std::make_move_iterator(actions_.end()));
  actions_.clear();
}

}  // namespace herring::server
