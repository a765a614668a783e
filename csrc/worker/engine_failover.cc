#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "worker/engine_impl.h"

/// What keeps operations going when a lane dies (docs/adr/0005-server-failover.md): Results that land in slots,
/// receipts, and the moving of items to other lanes.
namespace herring::worker {
namespace {

constexpr std::uint64_t kSlotAlignment = 64;
/// How far ahead of the oldest missing grant one may arrive; more is not reordering.
constexpr std::uint64_t kMaxGrantsAhead = 65536;
/// Receipts that nobody waits for are sent so many at once, or after so long.
constexpr std::size_t kReceiptBatch = 32;
constexpr Duration kReceiptDelay = std::chrono::milliseconds(10);
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

std::uint32_t run_of(std::uint64_t said) {
  return said > 1 && said <= wire::kMaxRun ? static_cast<std::uint32_t>(said) : 0;
}

void add_bitmap(std::vector<std::byte>& out, const std::vector<bool>& bits) {
  const std::size_t start = out.size();
  out.resize(start + (bits.size() + 7) / 8);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) out[start + i / 8] |= static_cast<std::byte>(1u << (i % 8));
  }
}

void Engine::Impl::share_bounce() {
  const auto wrong = [](const std::string& what) { throw Error(Code::kInvalidArgument, "worker engine: " + what); };
  if (lanes_.size() > kMaxFailoverLanes) wrong("too many lanes for failover");
  if (config_.lane_slots.size() != lanes_.size()) wrong("lane_slots has not one entry for each lane");
  if (config_.bounce.size() < bounce_bytes(config_)) wrong("the bounce memory is too small");
  std::size_t at = 0;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (config_.lane_slots[i] == 0) wrong("a lane without a slot");
    lanes_[i].slots_at = at;
    at += lane_bytes(config_, i);
    lanes_[i].slots = SlotPool(config_.lane_slots[i]);
    if (config_.max_eager_bytes == 0) continue;
    for (std::uint32_t slot = config_.eager_window; slot > 0; --slot) lanes_[i].free_eager.push_back(slot - 1);
  }
}

bool Engine::Impl::may_move(std::uint32_t lane) const {
  if (!config_.failover) return false;
  for (std::uint32_t other = 0; other < lanes_.size(); ++other) {
    if (other != lane && !lanes_[other].lost) return true;
  }
  return false;
}

/// Where a Result is received: in place, or with failover in a slot, so that its source stays whole until it is.
std::span<std::byte> Engine::Impl::landing(const Op& op, const LanePart& part, const Receive& receive) const {
  if (part.owned.count == 0 || !op.pulls_data()) return {};
  if (!config_.failover) return chunk_memory(op, part, receive.chunk, receive.run);
  if (is_held(part, receive.chunk)) return {};
  const std::uint64_t bytes = run_range(part, receive.chunk, receive.run).bytes;
  std::uint64_t at = lanes_[part.lane].slots_at;
  if (part.eager_slot == kNone) {
    at += std::uint64_t{receive.slot} * config_.chunk_bytes;
  } else {
    at += std::uint64_t{config_.lane_slots[part.lane]} * config_.chunk_bytes + part.eager_slot * eager_stride(config_);
    at += std::uint64_t{receive.chunk - part.owned.first} * config_.chunk_bytes;
  }
  return config_.bounce.subspan(at, bytes);
}

/// What an announce needs beforehand.
void Engine::Impl::reserve(Op& op, LanePart& part) {
  Lane& lane = lanes_[part.lane];
  by_tag_.emplace(part.tag, std::pair{op.id, part.index});
  const bool is_small = part.owned.count > 0 && part.shard.bytes <= config_.max_eager_bytes && part.moved_by == 0;
  if (!is_small || lane.free_eager.empty()) return;
  part.eager_slot = lane.free_eager.back();
  lane.free_eager.pop_back();
}

void Engine::Impl::release(Lane& lane, Receive& receive) {
  const std::uint32_t slot = std::exchange(receive.slot, kNone);
  if (slot != kNone && !lane.lost) lane.slots.give_back(slot, SlotPool::order_for(receive.run));
}

/// Grants are served in the order in which the lane gave them: then the oldest unfinished chunk of the lane has, or
/// gets, a slot on every worker, however few there are.
void Engine::Impl::take_grant(const wire::Header& header, std::span<const std::byte> body) {
  Lane& lane = *lane_of(header.sender);
  const auto said = wire::decode_list(body, 2);
  const std::uint64_t number = said ? said->front() : 0;
  if (!said || number < lane.next_grant || number - lane.next_grant > kMaxGrantsAhead ||
      !lane.early_grants.emplace(number, Grant{header, said->size() > 1 ? run_of(said->back()) : 1, 0}).second) {
    ++stats_.messages_rejected;
    return;
  }
  while (!lane.early_grants.empty() && lane.early_grants.begin()->first == lane.next_grant) {
    lane.grants.push_back(lane.early_grants.begin()->second);
    lane.early_grants.erase(lane.early_grants.begin());
    ++lane.next_grant;
  }
  serve_grants(lane);
}

void Engine::Impl::serve_grants(Lane& lane) {
  while (!lane.grants.empty() && serve_grant(lane, lane.grants.front())) lane.grants.pop_front();
}

/// False where it has to wait for slots.
bool Engine::Impl::serve_grant(Lane& lane, Grant& grant) {
  const wire::Header& header = grant.header;
  Op* op = find_op(header.key());
  LanePart* part = op == nullptr ? nullptr : find_part(*op, header.sender, header.offset);
  if (part == nullptr || header.shard != shard_of(*part)) {
    ++stats_.messages_rejected;  // Given up meanwhile, most likely.
    return true;
  }
  if (op->has_failed || part->is_closing || part->is_done) return true;
  const std::uint64_t end = std::uint64_t{header.chunk} + header.count;
  if (part->eager_slot != kNone || header.count == 0 || header.chunk < part->owned.first ||
      end > std::uint64_t{part->owned.first} + part->owned.count || grant.run == 0 || header.count % grant.run != 0 ||
      lane.slots.most(SlotPool::order_for(grant.run)) == 0) {
    ++stats_.messages_rejected;
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
bool Engine::Impl::may_serve(const Op& op, const LanePart& part, const Grant& grant, std::uint32_t chunk) const {
  const bool pulls = (grant.header.flags & wire::kFlagPull) != 0;
  for (std::uint32_t i = chunk - part.owned.first, end = i + grant.run; i < end; ++i) {
    if (part.is_pushed[i] || (grant.run > 1 && (pulls || part.held[i]))) return false;
    if (pulls ? part.held[i] : !part.held[i] && !op.pushes()) return false;
  }
  return true;
}

bool Engine::Impl::serve_run(Lane& lane, Op& op, LanePart& part, const Grant& grant, std::uint32_t chunk) {
  if (!may_serve(op, part, grant, chunk)) {
    ++stats_.messages_rejected;
    return true;
  }
  const auto first = static_cast<std::ptrdiff_t>(chunk - part.owned.first);
  Receive result{op.id, part.index, chunk, 0, kNone, grant.run};
  if (!is_held(part, chunk)) {
    if (op.pulls_data()) {
      const std::uint32_t order = SlotPool::order_for(grant.run);
      if (lane.slots.free(order) == 0) return false;
      result.slot = lane.slots.take(order);
    }
    post(op, result);
  }
  if ((grant.header.flags & wire::kFlagPull) != 0) {
    std::fill_n(part.is_pushed.begin() + first, grant.run, true);
  } else {
    push(op, part, {chunk, grant.run, Tag{grant.header.tag + (chunk - grant.header.chunk)}});
  }
  return true;
}

void Engine::Impl::send_ready(const Op& op, const LanePart& part, std::uint32_t chunk, std::uint32_t count) {
  wire::Header header = header_to(op.operation.key, wire::MessageType::kReady);
  header.shard = shard_of(part);
  header.offset = part.tag;
  header.chunk = chunk;
  header.count = count;
  send(lanes_[part.lane].peer, kControlTag, header, {}, {}, {op.id, part.index, false, true});
}

/// Everything that the lane had for this process is here: the lane wants to know.
void Engine::Impl::report(LanePart& part, const Op& op) {
  Lane& lane = lanes_[part.lane];
  lane.receipts.push_back(part.tag);
  // Before what may be retained runs out, so that small operations never wait for the delays.
  if (!may_retain(op) || stats_.bytes_retained * 2 > config_.retain_bytes) lane.receipts_urgent = true;
  if (lane.receipts_due == Instant::max()) lane.receipts_due = now_ + kReceiptDelay;
  flush_receipts(now_, part.lane, false);
}

/// One Receipt at a time: what comes meanwhile goes with the next.
void Engine::Impl::flush_receipts(Instant now, std::uint32_t index, bool is_due) {
  Lane& lane = lanes_[index];
  if (lane.receipt_on_way || lane.receipts.empty()) {
    lane.receipts_due = Instant::max();
    return;
  }
  if (!is_due && !lane.receipts_urgent && lane.receipts.size() < kReceiptBatch && now < lane.receipts_due) return;
  const std::size_t count = std::min(lane.receipts.size(), wire::kMaxTagList);
  wire::Header header = header_to({}, wire::MessageType::kReceipt);
  header.count = static_cast<std::uint32_t>(count);
  if (lane.receipts_urgent) header.flags = wire::kFlagUrgent;
  Send record;
  record.receipt_lane = index;
  send(lane.peer, kControlTag, header, wire::encode_list(std::span(lane.receipts).first(count)), {}, record);
  lane.receipts.erase(lane.receipts.begin(), lane.receipts.begin() + static_cast<std::ptrdiff_t>(count));
  lane.receipt_on_way = true;
  lane.receipts_due = Instant::max();
  if (lane.receipts.empty()) lane.receipts_urgent = false;
}

void Engine::Impl::handle_settled(Instant now, const wire::Header& header, std::span<const std::byte> body) {
  const auto tags = wire::decode_list(body, wire::kMaxTagList);
  if (!config_.failover || !tags) {
    ++stats_.messages_rejected;
    return;
  }
  for (const std::uint64_t tag : *tags) {
    const auto found = by_tag_.find(tag);
    if (found == by_tag_.end()) continue;  // Of an operation that failed here.
    Op& op = *find_op(found->second.first);
    LanePart& part = op.parts[found->second.second];
    if (lanes_[part.lane].peer.value != header.sender) {
      ++stats_.messages_rejected;
      continue;
    }
    settle(now, op, part);
  }
}

void Engine::Impl::settle(Instant now, Op& op, LanePart& part) {
  if (part.is_settled || op.has_failed) return;
  const bool has_all = std::find(part.held.begin(), part.held.end(), false) == part.held.end();
  if (!part.is_done && !has_all) {
    fail(now, op,
         Status(Code::kPeerLost, to_string(op.operation.descriptor) +
                                     ": a server is lost, no rank has all of the result, and another rank has given "
                                     "the operation up, so it cannot be summed again"));
    return;
  }
  part.is_settled = true;
  --op.unsettled;
  drain_part(op, part, true);  // Acknowledgements that it need not wait for any more.
  complete_if_done(op);
}

bool Engine::Impl::may_retain(const Op& op) const {
  const std::uint64_t bytes = op.operation.memory.size();
  return bytes <= config_.retain_part_bytes &&
         stats_.bytes_retained + std::max(bytes, kMinRetained) <= config_.retain_bytes;
}

/// All Results are here, but somebody may still need them. True where the user has to wait for that (or did not have
/// to); false where a copy stands in from now on.
bool Engine::Impl::wait_for_settled(Op& op) {
  if (op.is_over) return true;
  if (!may_retain(op)) {
    for (const LanePart& part : op.parts) {
      if (part.is_settled) continue;
      lanes_[part.lane].receipts_urgent = !lanes_[part.lane].receipts.empty();
      flush_receipts(now_, part.lane, false);
    }
    return true;
  }
  const std::span<std::byte> memory = op.operation.memory;
  op.retained = std::make_shared_for_overwrite<std::byte[]>(memory.size());
  op.retained_bytes = std::max<std::uint64_t>(memory.size(), kMinRetained);
  stats_.bytes_retained += op.retained_bytes;
  if (!memory.empty()) actions_.emplace_back(CopyAction{memory, {op.retained.get(), memory.size()}, op.retained});
  return false;
}

/// A lane has died and others live: what it had goes to them.
void Engine::Impl::move_lane(Instant now, std::uint32_t index) {
  Lane& dead = lanes_[index];
  dead.queue.clear();
  dead.grants.clear();
  dead.early_grants.clear();
  dead.receipts.clear();
  dead.receipts_due = Instant::max();
  write_off_sends(index);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, op] : ops_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const std::uint64_t id : ids) {
    Op& op = *find_op(id);
    if (!op.suspicion.is_ok() && !op.has_failed) {
      op.suspicion = Status::ok();
      if (!op.is_over) set_timer(op, std::max(now, op.submitted + op.operation.timeout) + config_.lane_grace);
    }
    move_parts(op, index);
    complete_if_done(op);
  }
  for (Lane& lane : lanes_) {
    if (lane.lost) continue;
    lane.queue.emplace_back(0, losses_.size() - 1);
    serve_queue(lane);
  }
}

void Engine::Impl::move_parts(Op& op, std::uint32_t lane) {
  const std::size_t count = op.parts.size();
  std::vector<ByteRange> plan;
  for (std::size_t i = 0; i < count; ++i) {
    LanePart& part = op.parts[i];
    if (part.lane != lane) continue;
    if (!op.has_failed && !part.is_settled) {
      if (plan.empty()) plan = plan_part(config_, op.operation);
      const ByteRange shard = plan[part.item.origin];
      for (const Item& item : make_items(part.item.origin, chunk_count(shard.bytes, config_.chunk_bytes), losses_,
                                         config_.lane_weights, heir_seed(op.operation.key))) {
        if (item.parent != part.item.id || item.id == part.item.id) continue;
        op.parts.push_back(inherit(op, part, item, shard));
        ++op.open_parts;
        ++op.unsettled;
        ++stats_.items_moved;
      }
    }
    abandon(op, part);
  }
  for (std::size_t i = count; i < op.parts.size(); ++i) announce_or_queue(op, i);
}

LanePart Engine::Impl::inherit(const Op& op, const LanePart& part, const Item& item, ByteRange shard) const {
  LanePart piece = make_part(op, item, shard, item.origin == home_lane(config_, op.operation.key, op.operation.rails));
  piece.index = static_cast<std::uint32_t>(op.parts.size());
  piece.moved_by = static_cast<std::uint32_t>(losses_.size());
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
void Engine::Impl::abandon(Op& op, LanePart& part) {
  for (std::uint64_t& token : part.receives) {
    if (token != 0) receives_.erase(token);
    token = 0;
  }
  if (part.is_announced) by_tag_.erase(part.tag);
  finish_part(part, op);
  if (part.is_settled) return;
  part.is_settled = true;
  --op.unsettled;
}

/// What is on its way to a lost lane reads memory of no matter to anybody.
void Engine::Impl::write_off_sends(std::uint32_t lane) {
  for (auto& [token, send] : sends_) {
    Op* op = find_op(send.op);
    // What reads the operation's memory has to be over first: the endpoint says so soon, the peer being removed.
    if (op == nullptr || send.borrows || op->parts[send.part].lane != lane) continue;
    send.op = 0;
  }
}

void Engine::Impl::say_moved(Lane& lane, std::size_t loss) {
  wire::Header header = header_to({}, wire::MessageType::kMoved);
  header.chunk = static_cast<std::uint32_t>(loss);
  header.offset = lane.next_sequence;
  send(lane.peer, kControlTag, header, {}, {}, {});
}

}  // namespace herring::worker
