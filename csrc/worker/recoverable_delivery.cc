#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "worker/delivery.h"

namespace herring::worker {
namespace {

constexpr std::uint64_t kSlotAlignment = 64;
/// How far ahead of the oldest missing grant one may arrive; more is not reordering.
constexpr std::uint64_t kMaxGrantsAhead = 65536;
/// What a retained result counts at least: its records take memory too.
constexpr std::uint64_t kMinRetained = 1024;

std::uint64_t eager_stride(const EngineConfig& config) {
  return (config.max_eager_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

std::uint64_t lane_bytes(const EngineConfig& config, std::size_t lane) {
  return std::uint64_t{config.lane_slots[lane]} * config.chunk_bytes + config.eager_window * eager_stride(config);
}

}  // namespace

std::uint64_t bounce_bytes(const EngineConfig& config) {
  std::uint64_t bytes = 0;
  for (std::size_t lane = 0; config.failover && lane < config.lane_slots.size(); ++lane) {
    bytes += lane_bytes(config, lane);
  }
  return bytes;
}

Engine::Impl::RecoverableDelivery::RecoverableDelivery(Impl& engine) : Delivery(engine), lanes_(engine.lanes_.size()) {
  const EngineConfig& config = engine_.config_;
  const auto wrong = [](const std::string& what) { throw Error(Code::kInvalidArgument, "worker engine: " + what); };
  if (lanes_.size() > kMaxFailoverLanes) wrong("too many lanes for failover");
  if (config.lane_slots.size() != lanes_.size()) wrong("lane_slots has not one entry for each lane");
  if (config.bounce.size() < bounce_bytes(config)) wrong("the bounce memory is too small");
  std::size_t at = 0;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (config.lane_slots[i] == 0) wrong("a lane without a slot");
    lanes_[i].slots_at = at;
    at += lane_bytes(config, i);
    lanes_[i].slots = SlotPool(config.lane_slots[i]);
    if (config.max_eager_bytes == 0) continue;
    for (std::uint32_t slot = config.eager_window; slot > 0; --slot) lanes_[i].free_eager.push_back(slot - 1);
  }
}

bool Engine::Impl::RecoverableDelivery::may_move(std::uint32_t lane) const {
  for (std::uint32_t other = 0; other < lanes_.size(); ++other) {
    if (other != lane && !engine_.lanes_[other].lost) return true;
  }
  return false;
}

/// In a slot, so that its source stays whole until it is here.
std::span<std::byte> Engine::Impl::RecoverableDelivery::landing(const Op& op, const LanePart& part,
                                                                const Receive& receive) const {
  if (part.owned.count == 0 || !brings_data(op, part, receive.chunk)) return {};
  const ByteRange range = engine_.run_range(part, receive.chunk, receive.run);
  if (op.operation.is_on_device) return op.operation.results.subspan(range.offset, range.bytes);
  const std::uint64_t bytes = range.bytes;
  std::uint64_t at = lanes_[part.lane].slots_at;
  if (part.eager_slot == kNone) {
    at += std::uint64_t{receive.slot} * engine_.config_.chunk_bytes;
  } else {
    at += std::uint64_t{engine_.config_.lane_slots[part.lane]} * engine_.config_.chunk_bytes +
          part.eager_slot * eager_stride(engine_.config_);
    at += std::uint64_t{receive.chunk - part.owned.first} * engine_.config_.chunk_bytes;
  }
  return engine_.config_.bounce.subspan(at, bytes);
}

/// In the host's memory a result lies where its source was.
std::span<const std::byte> Engine::Impl::RecoverableDelivery::source(const Op& op, const LanePart& part,
                                                                     std::uint32_t chunk, std::uint32_t run) const {
  if (!op.operation.is_on_device || !is_held(part, chunk)) return engine_.chunk_memory(op, part, chunk, run);
  const ByteRange range = engine_.run_range(part, chunk, run);
  return op.operation.results.subspan(range.offset, range.bytes);
}

void Engine::Impl::RecoverableDelivery::prepare(LanePart& part) const {
  part.is_settled = false;
  part.held.resize(part.expected());
}

void Engine::Impl::RecoverableDelivery::forget(const Op& op) {
  for (const LanePart& part : op.parts) {
    if (part.is_announced) by_tag_.erase(part.tag);
  }
}

std::uint16_t Engine::Impl::RecoverableDelivery::reserve(const Op& op, LanePart& part) {
  std::vector<std::uint32_t>& free = lanes_[part.lane].free_eager;
  by_tag_.emplace(part.tag, std::pair{op.id, part.index});
  if (part.owned.count == 0 || !is_small(engine_.config_, part.shard.bytes) || part.moved_by != 0) return 0;
  if (free.empty() || op.operation.is_on_device) return 0;
  part.eager_slot = free.back();
  free.pop_back();
  return wire::kFlagReady | (op.pushes() ? wire::kFlagEager : 0);
}

/// Where somebody has it already it only says so, and asks for no slot.
bool Engine::Impl::RecoverableDelivery::waits_for_grant(const Op&, const LanePart& part, std::uint32_t result) const {
  return part.eager_slot == kNone && !part.held[result];
}

void Engine::Impl::RecoverableDelivery::release(const LanePart& part, const Receive& receive) {
  if (receive.slot == kNone || engine_.lanes_[part.lane].lost) return;
  lanes_[part.lane].slots.give_back(receive.slot, SlotPool::order_for(receive.run));
}

void Engine::Impl::RecoverableDelivery::finish(LanePart& part) {
  if (part.eager_slot == kNone || engine_.lanes_[part.lane].lost) return;
  lanes_[part.lane].free_eager.push_back(std::exchange(part.eager_slot, kNone));
}

void Engine::Impl::RecoverableDelivery::take(const Op& op, LanePart& part, const Receive& receive,
                                             std::uint64_t bytes) {
  if (bytes > 0 && !op.operation.is_on_device) {
    const std::span<std::byte> memory = engine_.chunk_memory(op, part, receive.chunk, receive.run);
    engine_.actions_.emplace_back(CopyAction{landing(op, part, receive), memory, op.retained});
  }
  std::fill_n(part.held.begin() + (receive.chunk - part.owned.first), receive.run, true);
  release(part, receive);
}

/// Grants are served in the order in which the lane gave them: then the oldest unfinished chunk of the lane has, or
/// gets, a slot on every worker, however few there are.
void Engine::Impl::RecoverableDelivery::take_grant(const wire::Header& header, std::span<const std::byte> body) {
  const std::uint32_t index = engine_.lane_index_.at(PeerId{header.sender});
  LaneState& lane = lanes_[index];
  const auto said = wire::decode_list(body, 2);
  const std::uint64_t number = said ? said->front() : 0;
  if (!said || number < lane.next_grant || number - lane.next_grant > kMaxGrantsAhead ||
      !lane.early_grants.emplace(number, Grant{header, said->size() > 1 ? run_of(said->back()) : 1, 0}).second) {
    ++engine_.stats_.messages_rejected;
    return;
  }
  while (!lane.early_grants.empty() && lane.early_grants.begin()->first == lane.next_grant) {
    lane.grants.push_back(lane.early_grants.begin()->second);
    lane.early_grants.erase(lane.early_grants.begin());
    ++lane.next_grant;
  }
  serve_grants(index);
}

void Engine::Impl::RecoverableDelivery::serve_grants(std::uint32_t index) {
  LaneState& lane = lanes_[index];
  while (!lane.grants.empty() && serve_grant(lane, lane.grants.front())) lane.grants.pop_front();
}

/// False where it has to wait for slots.
bool Engine::Impl::RecoverableDelivery::serve_grant(LaneState& lane, Grant& grant) {
  const wire::Header& header = grant.header;
  Op* op = engine_.find_op(header.key());
  LanePart* part = op == nullptr ? nullptr : engine_.find_part(*op, header.sender, header.offset);
  if (part == nullptr || header.shard != engine_.shard_of(*part)) {
    ++engine_.stats_.messages_rejected;  // Given up meanwhile, most likely.
    return true;
  }
  if (op->has_failed || part->is_closing || part->is_done) return true;
  const std::uint64_t end = std::uint64_t{header.chunk} + header.count;
  if (part->eager_slot != kNone || header.count == 0 || header.chunk < part->owned.first ||
      end > std::uint64_t{part->owned.first} + part->owned.count || grant.run == 0 || header.count % grant.run != 0 ||
      lane.slots.most(SlotPool::order_for(grant.run)) == 0) {
    ++engine_.stats_.messages_rejected;
    return true;
  }
  const std::uint32_t before = grant.served;
  while (grant.served < header.count && serve_run(lane, *op, *part, grant, header.chunk + grant.served)) {
    grant.served += grant.run;
  }
  const bool pulls = (header.flags & wire::kFlagPull) != 0;
  if (pulls && grant.served > before) send_ready(*op, *part, header.chunk + before, grant.served - before);
  return grant.served == header.count;
}

/// Whether this process can do for these chunks what the lane asks, and has not done it before.
bool Engine::Impl::RecoverableDelivery::may_serve(const Op& op, const LanePart& part, const Grant& grant,
                                                  std::uint32_t chunk) const {
  const bool pulls = (grant.header.flags & wire::kFlagPull) != 0;
  for (std::uint32_t i = chunk - part.owned.first, end = i + grant.run; i < end; ++i) {
    if (part.is_pushed[i] || (grant.run > 1 && (pulls || part.held[i]))) return false;
    if (pulls ? part.held[i] : !part.held[i] && !op.pushes()) return false;
  }
  return true;
}

bool Engine::Impl::RecoverableDelivery::serve_run(LaneState& lane, Op& op, LanePart& part, const Grant& grant,
                                                  std::uint32_t chunk) {
  if (!may_serve(op, part, grant, chunk)) {
    ++engine_.stats_.messages_rejected;
    return true;
  }
  const auto first = static_cast<std::ptrdiff_t>(chunk - part.owned.first);
  Receive result{op.id, part.index, chunk, 0, kNone, grant.run};
  if (!is_held(part, chunk)) {
    if (op.pulls_data() && !op.operation.is_on_device) {
      const std::uint32_t order = SlotPool::order_for(grant.run);
      if (lane.slots.free(order) == 0) return false;
      result.slot = lane.slots.take(order);
    }
    engine_.post(op, result);
  }
  if ((grant.header.flags & wire::kFlagPull) != 0) {
    std::fill_n(part.is_pushed.begin() + first, grant.run, true);
  } else {
    engine_.push(op, part, {chunk, grant.run, Tag{grant.header.tag + (chunk - grant.header.chunk)}});
  }
  return true;
}

void Engine::Impl::RecoverableDelivery::send_ready(const Op& op, const LanePart& part, std::uint32_t chunk,
                                                   std::uint32_t count) {
  wire::Header header = engine_.header_to(op.operation.key, wire::MessageType::kReady);
  header.shard = engine_.shard_of(part);
  header.offset = part.tag;
  header.chunk = chunk;
  header.count = count;
  engine_.send(engine_.lanes_[part.lane].peer, kControlTag, header, {}, {}, {op.id, part.index, false, true});
}

/// Everything that the lane had for this process is here: the lane wants to know.
void Engine::Impl::RecoverableDelivery::report(const Op& op, LanePart& part) {
  LaneState& lane = lanes_[part.lane];
  lane.receipts.add(part.tag);
  // Before what may be retained runs out, so that small operations never wait for the delays.
  if (!may_retain(op) || engine_.stats_.bytes_retained * 2 > engine_.config_.retain_bytes) lane.receipts.hurry();
  if (lane.receipts_due == Instant::max()) lane.receipts_due = engine_.now_ + wire::TagBatch::kDelay;
  flush_receipts(engine_.now_, part.lane, false);
}

void Engine::Impl::RecoverableDelivery::flush_receipts(Instant now, std::uint32_t index, bool is_due) {
  LaneState& lane = lanes_[index];
  if (lane.receipts.has_to_wait()) {
    lane.receipts_due = Instant::max();
    return;
  }
  if (!lane.receipts.is_ready(is_due || now >= lane.receipts_due)) return;
  wire::Header header = engine_.header_to({}, wire::MessageType::kReceipt);
  if (lane.receipts.is_urgent()) header.flags = wire::kFlagUrgent;
  std::vector<std::byte> body = lane.receipts.take(header);
  Send record;
  record.receipt_lane = index;
  engine_.send(engine_.lanes_[index].peer, kControlTag, header, std::move(body), {}, record);
  lane.receipts_due = Instant::max();
}

void Engine::Impl::RecoverableDelivery::handle_settled(Instant now, const wire::Header& header,
                                                       std::span<const std::byte> body) {
  const auto tags = wire::decode_list(body, wire::kMaxTagList);
  if (!tags) {
    ++engine_.stats_.messages_rejected;
    return;
  }
  for (const std::uint64_t tag : *tags) {
    const auto found = by_tag_.find(tag);
    if (found == by_tag_.end()) continue;  // Of an operation that failed here.
    Op& op = *engine_.find_op(found->second.first);
    LanePart& part = op.parts[found->second.second];
    if (engine_.lanes_[part.lane].peer.value != header.sender) {
      ++engine_.stats_.messages_rejected;
      continue;
    }
    settle(now, op, part);
  }
}

void Engine::Impl::RecoverableDelivery::settle(Instant now, Op& op, LanePart& part) {
  if (part.is_settled || op.has_failed) return;
  const bool has_all = std::find(part.held.begin(), part.held.end(), false) == part.held.end();
  if (!part.is_done && !has_all) {
    engine_.fail(
        now, op,
        Status(Code::kPeerLost, to_string(op.operation.descriptor) +
                                    ": a server is lost, no rank has all of the result, and another rank has given "
                                    "the operation up, so it cannot be summed again"));
    return;
  }
  part.is_settled = true;
  --op.unsettled;
  engine_.drain_part(op, part, true);  // Acknowledgements that it need not wait for any more.
  engine_.complete_if_done(op);
}

bool Engine::Impl::RecoverableDelivery::may_retain(const Op& op) const {
  const std::uint64_t bytes = op.operation.memory.size();
  return !op.operation.is_on_device && bytes <= engine_.config_.retain_part_bytes &&
         engine_.stats_.bytes_retained + std::max(bytes, kMinRetained) <= engine_.config_.retain_bytes;
}

/// Somebody may still need what is here: the user waits for that, or a copy stands in from now on.
bool Engine::Impl::RecoverableDelivery::may_complete(Op& op) {
  if (op.unsettled == 0) return true;
  if (op.is_over) return false;
  if (!may_retain(op)) {
    for (const LanePart& part : op.parts) {
      if (part.is_settled) continue;
      lanes_[part.lane].receipts.hurry();
      flush_receipts(engine_.now_, part.lane, false);
    }
    return false;
  }
  const std::span<std::byte> memory = op.operation.memory;
  op.retained = std::make_shared_for_overwrite<std::byte[]>(memory.size());
  op.retained_bytes = std::max<std::uint64_t>(memory.size(), kMinRetained);
  engine_.stats_.bytes_retained += op.retained_bytes;
  if (!memory.empty())
    engine_.actions_.emplace_back(CopyAction{memory, {op.retained.get(), memory.size()}, op.retained});
  return true;
}

/// A lane has died and others live: what it had goes to them.
void Engine::Impl::RecoverableDelivery::move_lane(Instant now, std::uint32_t index) {
  LaneState& dead = lanes_[index];
  engine_.lanes_[index].queue.clear();
  dead.grants.clear();
  dead.early_grants.clear();
  dead.receipts.clear();
  dead.receipts_due = Instant::max();
  write_off_sends(index);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : engine_.ops_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const std::uint64_t id : ids) {
    Op& op = *engine_.find_op(id);
    if (!op.suspicion.is_ok() && !op.has_failed) {
      op.suspicion = Status::ok();
      if (!op.is_over)
        engine_.set_timer(op, std::max(now, op.submitted + op.operation.timeout) + engine_.config_.lane_grace);
    }
    move_parts(op, index);
    engine_.complete_if_done(op);
  }
  for (Lane& lane : engine_.lanes_) {
    if (lane.lost) continue;
    lane.queue.emplace_back(0, engine_.losses_.size() - 1);
    engine_.serve_queue(lane);
  }
}

void Engine::Impl::RecoverableDelivery::move_parts(Op& op, std::uint32_t lane) {
  const std::size_t count = op.parts.size();
  std::vector<ByteRange> plan;
  for (std::size_t i = 0; i < count; ++i) {
    LanePart& part = op.parts[i];
    if (part.lane != lane) continue;
    if (!op.has_failed && !part.is_settled) {
      if (plan.empty()) plan = plan_part(engine_.config_, op.operation);
      const ByteRange shard = plan[part.item.origin];
      for (const Item& item : make_items(part.item.origin, chunk_count(shard.bytes, engine_.config_.chunk_bytes),
                                         engine_.losses_, engine_.config_.lane_weights, heir_seed(op.operation.key))) {
        if (item.parent != part.item.id || item.id == part.item.id) continue;
        op.parts.push_back(inherit(op, part, item, shard));
        ++op.open_parts;
        ++op.unsettled;
        ++engine_.stats_.items_moved;
      }
    }
    abandon(op, part);
  }
  for (std::size_t i = count; i < op.parts.size(); ++i) engine_.announce_or_queue(op, i);
}

LanePart Engine::Impl::RecoverableDelivery::inherit(const Op& op, const LanePart& part, const Item& item,
                                                    ByteRange shard) const {
  LanePart piece = engine_.make_part(op, item, shard,
                                     item.origin == home_lane(engine_.config_, op.operation.key, op.operation.rails));
  piece.index = static_cast<std::uint32_t>(op.parts.size());
  piece.moved_by = static_cast<std::uint32_t>(engine_.losses_.size());
  if (piece.owned.count == 0) {
    // Any Result says that everybody had announced.
    piece.held[0] = std::find(part.held.begin(), part.held.end(), true) != part.held.end();
    return piece;
  }
  const std::uint32_t ahead = piece.item.first + piece.owned.first - (part.item.first + part.owned.first);
  for (std::uint32_t i = 0; i < piece.owned.count; ++i) piece.held[i] = part.held[ahead + i];
  return piece;
}

/// Its receives stay posted, for slots that nobody uses any more: to withdraw what a stopped process has sent half of
/// may take for ever.
void Engine::Impl::RecoverableDelivery::abandon(Op& op, LanePart& part) {
  for (std::uint64_t& token : part.receives) {
    if (token != 0) engine_.receives_.erase(token);
    token = 0;
  }
  if (part.is_announced) by_tag_.erase(part.tag);
  engine_.finish_part(part, op);
  if (part.is_settled) return;
  part.is_settled = true;
  --op.unsettled;
}

/// What is on its way to a lost lane reads memory of no matter to anybody.
void Engine::Impl::RecoverableDelivery::write_off_sends(std::uint32_t lane) {
  for (auto& [token, send] : engine_.sends_) {
    Op* op = engine_.find_op(send.op);
    // What reads the operation's memory has to be over first: the endpoint says so soon, the peer being removed.
    if (op == nullptr || send.borrows || op->parts[send.part].lane != lane) continue;
    send.op = 0;
  }
}

void Engine::Impl::RecoverableDelivery::say_moved(Lane& lane, std::size_t loss) {
  wire::Header header = engine_.header_to({}, wire::MessageType::kMoved);
  header.chunk = static_cast<std::uint32_t>(loss);
  header.offset = lane.next_sequence;
  engine_.send(lane.peer, kControlTag, header, {}, {}, {});
}

bool Engine::Impl::RecoverableDelivery::abandon_lost(Op& op, LanePart& part) {
  abandon(op, part);
  return true;
}

void Engine::Impl::RecoverableDelivery::note_loss(std::uint32_t lane) { engine_.losses_.push_back(lane); }

Instant Engine::Impl::RecoverableDelivery::next_deadline() const {
  Instant next = Instant::max();
  for (const LaneState& lane : lanes_) next = std::min(next, lane.receipts_due);
  return next;
}

void Engine::Impl::RecoverableDelivery::on_sent_receipt(Instant now, std::uint32_t lane) {
  lanes_[lane].receipts.sent();
  flush_receipts(now, lane, true);
}

void Engine::Impl::RecoverableDelivery::on_tick(Instant now) {
  for (std::uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    if (lanes_[lane].receipts_due <= now) flush_receipts(now, lane, true);
  }
}

}  // namespace herring::worker
