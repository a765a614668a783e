#include "worker/engine.h"

#include <algorithm>
#include <limits>

#include "worker/delivery.h"

namespace herring::worker {

Engine::Engine(EngineConfig config) : impl_(std::make_unique<Impl>(std::move(config))) {}
Engine::~Engine() = default;

void Engine::submit(Instant now, const Operation& operation) { impl_->submit(now, operation); }
void Engine::abort(Instant now, const Operation& operation, const Status& why) { impl_->abort(now, operation, why); }
void Engine::on_control(Instant now, const wire::Header& header, std::span<const std::byte> body) {
  impl_->on_control(now, header, body);
}
void Engine::on_received(Instant now, Token token, const Status& status, const wire::Header& header) {
  impl_->on_received(now, token, status, header);
}
void Engine::on_sent(Instant now, Token token, const Status& status) { impl_->on_sent(now, token, status); }
void Engine::on_withdrawn(Instant now, Token token) { impl_->on_withdrawn(now, token); }
void Engine::on_peer_lost(Instant now, PeerId peer, const std::string& why) { impl_->on_peer_lost(now, peer, why); }
void Engine::on_tick(Instant now) { impl_->on_tick(now); }
Instant Engine::next_deadline() const { return impl_->next_deadline(); }
void Engine::take_actions(Actions& out) { impl_->take_actions(out); }
bool Engine::is_idle() const { return impl_->is_idle(); }
bool Engine::has_operations() const { return impl_->has_operations(); }
bool Engine::is_needed() const { return impl_->is_needed(); }
void Engine::add_awaited(std::vector<PeerId>& lanes) const { impl_->add_awaited(lanes); }
const EngineStats& Engine::stats() const { return impl_->stats(); }

Engine::Impl::Impl(EngineConfig config) : config_(std::move(config)) {
  if (config_.lanes.empty() || config_.lanes.size() != config_.lane_weights.size()) {
    throw Error(Code::kInvalidArgument, "worker engine: " + std::to_string(config_.lanes.size()) + " lanes and " +
                                            std::to_string(config_.lane_weights.size()) + " weights");
  }
  if (config_.chunk_bytes == 0 || config_.chunk_bytes % 64 != 0) {
    throw Error(Code::kInvalidArgument,
                "worker engine: chunk_bytes " + std::to_string(config_.chunk_bytes) + " is not a multiple of 64");
  }
  for (std::uint32_t i = 0; i < config_.lanes.size(); ++i) {
    Lane lane;
    lane.peer = config_.lanes[i];
    lane.is_near = std::ranges::find(config_.near_lanes, lane.peer) != config_.near_lanes.end();
    lane.credits = config_.announce_credits == 0 ? std::numeric_limits<std::uint32_t>::max() : config_.announce_credits;
    lane_index_.emplace(lane.peer, i);
    lanes_.push_back(std::move(lane));
  }
  if (config_.failover) {
    delivery_ = std::make_unique<RecoverableDelivery>(*this);
  } else {
    delivery_ = std::make_unique<PlainDelivery>(*this);
  }
}

Engine::Impl::~Impl() = default;

void Engine::Impl::submit(Instant now, const Operation& operation) {
  now_ = now;
  Status status = check_operation(config_, operation);
  if (status.is_ok() && by_key_.contains(operation.key)) {
    status = Status(Code::kInvalidArgument, to_string(operation.descriptor) + " of rank " +
                                                std::to_string(config_.self.value) +
                                                ": an operation of this key is in flight already");
  }
  if (status.is_ok() && operation.key.group == GroupId{0} && !lost_workers_.empty()) {
    status = Status(Code::kPeerLost, lost_workers_.begin()->second);
  }
  auto owned = std::make_unique<Op>();
  Op& op = *owned;
  op.id = next_op_++;
  op.operation = operation;
  op.is_one_hop = goes_in_one_hop(config_, operation);
  op.submitted = now;
  if (status.is_ok() && !losses_.empty() && losses_.size() == lanes_.size()) {
    status = Status(Code::kPeerLost, lanes_[losses_.back()].why_lost);
  }
  if (status.is_ok()) {
    make_parts(op);
    for (const LanePart& part : op.parts) {
      if (lanes_[part.lane].lost) status = Status(Code::kPeerLost, lanes_[part.lane].why_lost);
    }
  }
  if (!status.is_ok()) {
    ++stats_.ops_failed;
    actions_.emplace_back(CompleteAction{operation.key, std::move(status)});
    return;
  }
  op.open_parts = static_cast<std::uint32_t>(op.parts.size());
  if (operation.is_join) op.answer.resize(roster_words(operation.contributor_count));
  delivery_->begin(op);
  by_key_.emplace(operation.key, op.id);
  ops_.emplace(op.id, std::move(owned));
  set_timer(op, deadline_of(op));
  for (std::size_t i = 0; i < op.parts.size(); ++i) announce_or_queue(op, i);
  complete_if_done(op);
}

std::uint32_t Engine::Impl::shard_of(const LanePart& part) const {
  return part.has_roster ? wire::kRosterShard : delivery_->shard_of(part.item);
}

/// The lanes of an operation, from one that depends on the worker, so that no lane hears all workers at once.
void Engine::Impl::make_parts(Op& op) const {
  const Operation& operation = op.operation;
  const std::vector<ByteRange> plan = plan_part(config_, operation);
  const std::uint32_t home = home_lane(config_, operation.key, operation.rails);
  const auto lanes = static_cast<std::uint32_t>(lanes_.size());
  for (std::uint32_t i = 0; i < lanes; ++i) {
    const std::uint32_t origin = (i + config_.self.value) % lanes;
    const std::uint32_t chunks = chunk_count(plan[origin].bytes, config_.chunk_bytes);
    // Owners without a chunk of a shard stay away. All contributors meet at the home lane, which may have none: then
    // one of each is enough, but where nobody has anything: an owner hears from nobody else that all have come.
    const bool is_meeting = origin == home || (op.is_one_hop && are_on_one_rail(config_, origin, home));
    const bool meets = is_meeting && chunks == 0 && (operation.owner == 0 || is_empty(operation));
    if (owned_chunks(config_, origin, chunks, operation).count == 0 && !meets) continue;
    add_parts(op, origin, plan[origin], origin == home);
  }
}

/// Of one lane's shard, by the items that it has become.
void Engine::Impl::add_parts(Op& op, std::uint32_t origin, ByteRange shard, bool is_home_shard) const {
  const std::uint32_t chunks = chunk_count(shard.bytes, config_.chunk_bytes);
  const std::uint64_t seed = heir_seed(op.operation.key);
  for (const Item& item : make_items(origin, chunks, losses_, config_.lane_weights, seed)) {
    LanePart part = make_part(op, item, shard, is_home_shard);
    part.index = static_cast<std::uint32_t>(op.parts.size());
    op.parts.push_back(std::move(part));
  }
}

/// `shard`: all of the origin's.
LanePart Engine::Impl::make_part(const Op& op, const Item& item, ByteRange shard, bool is_home_shard) const {
  const Operation& operation = op.operation;
  LanePart part;
  part.item = item;
  part.lane = item.lane;
  part.is_home = is_home_shard && item.first == 0;
  part.is_one_way = op.is_one_hop && !lanes_[item.lane].is_near;
  part.chunks = item.chunks;
  part.has_roster = !operation.roster.empty();
  if (operation.is_join) part.answers = roster_words(operation.contributor_count);
  const std::uint64_t start = std::uint64_t{item.first} * config_.chunk_bytes;
  part.shard.bytes = std::min(std::uint64_t{item.chunks} * config_.chunk_bytes, shard.bytes - start);
  part.shard.offset = shard.offset + start;
  const std::uint32_t chunks = chunk_count(shard.bytes, config_.chunk_bytes);
  if (chunks > 0) {
    const IndexRange owned = owned_chunks(config_, item.origin, chunks, operation);
    const std::uint32_t first = std::max(owned.first, item.first);
    const std::uint32_t end = std::min(owned.first + owned.count, item.first + item.chunks);
    if (first < end) part.owned = {first - item.first, end - first};
  }
  // Who takes part in a shard takes part in each of its pieces.
  part.announcers = announcers_of(config_, item.origin, chunks, operation);
  delivery_->prepare(part);
  return part;
}

void Engine::Impl::announce_or_queue(Op& op, std::size_t index) {
  Lane& lane = lanes_[op.parts[index].lane];
  if (lane.credits == 0 || !lane.queue.empty()) {
    lane.queue.emplace_back(op.id, index);
  } else {
    announce(op, index);
  }
}

wire::Announce Engine::Impl::announce_of(const Op& op, const LanePart& part) const {
  const Operation& operation = op.operation;
  wire::Announce announce;
  announce.descriptor = operation.descriptor;
  announce.contributor = operation.contributor;
  announce.contributor_count = operation.contributor_count;
  announce.first_rank = operation.first_rank;
  announce.rank_count = operation.rank_count;
  announce.rank_stride = operation.rank_stride;
  announce.rank_mask = operation.rank_mask;
  announce.pusher = op.has_one_pusher() ? op.pusher() : 0;
  announce.average_over = operation.average_over;
  announce.shard_offset = part.shard.bytes == 0 ? 0 : part.shard.offset;
  announce.shard_bytes = part.shard.bytes;
  announce.chunk_bytes = config_.chunk_bytes;
  announce.owned_first = part.owned.first;
  announce.owned_count = part.owned.count;
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(operation.timeout).count();
  announce.timeout_ms =
      static_cast<std::uint32_t>(std::clamp<std::int64_t>(milliseconds, 1, std::numeric_limits<std::uint32_t>::max()));
  return announce;
}

void Engine::Impl::announce(Op& op, std::size_t index) {
  LanePart& part = op.parts[index];
  Lane& lane = lanes_[part.lane];
  const Operation& operation = op.operation;
  if (config_.announce_credits != 0) --lane.credits;
  part.is_announced = true;
  part.sequence = lane.next_sequence++;
  part.tag = next_tag_;
  next_tag_ += std::max(part.chunks, part.answers);
  wire::Header header = header_to(operation.key, wire::MessageType::kAnnounce);
  header.flags = delivery_->reserve(op, part);
  part.is_eager = (header.flags & wire::kFlagEager) != 0;
  part.receives.resize(part.expected());
  part.is_pushed.resize(part.owned.count);
  const bool lands_on_input = part.is_eager && delivery_->lands_on_input(op);
  if (!lands_on_input) post_results(op, index);
  if (part.is_one_way) {
    ++lane.one_way;
    ++one_way_;
  }

  header.shard = shard_of(part);
  header.tag = part.tag;
  header.offset = part.sequence;
  header.count = part.announcers;
  std::span<const std::byte> data;
  if (part.is_eager) {
    const std::span<std::byte> first = chunk_memory(op, part, part.owned.first);
    const std::span<std::byte> last = chunk_memory(op, part, part.owned.first + part.owned.count - 1);
    data = {first.data(), last.data() + last.size()};
    stats_.bytes_sent += data.size();
  }
  const auto fixed = wire::encode(announce_of(op, part));
  std::vector<std::byte> body(fixed.begin(), fixed.end());
  if (op.is_one_hop) header.flags |= wire::kFlagOneHop;
  if (operation.is_on_device) header.flags |= wire::kFlagApart;
  if (operation.is_join) header.flags |= wire::kFlagJoin;
  if (part.has_roster) {
    header.flags |= wire::kFlagRoster;
    const std::vector<std::byte> roster = wire::encode_list(operation.roster);
    body.insert(body.end(), roster.begin(), roster.end());
  }
  if (part.moved_by != 0) {
    header.flags |= wire::kFlagHeld;
    header.chunk = part.moved_by;
    add_bitmap(body, part.held);
  }
  Send record{op.id, index, !data.empty(), true};
  if (lands_on_input && !config_.sealed_sends && !op.is_one_hop) record.answered = part.owned;
  send(lane.peer, kControlTag, header, std::move(body), data, record);
  if (op.is_one_hop) {
    if (part.is_one_way) sent_one_way(op, part);
    post_held_back(op);
  } else if (lands_on_input && config_.sealed_sends) {
    post_results(op, index);
  }
}

/// Receives for what the lane may send back without a grant; posted before the announce, so nothing arrives unexpected.
/// Those of other chunks are posted when these are granted: providers look for a message's receive among all. What
/// lands on the announce's own data waits until that is sent: anybody's message can take a receive.
void Engine::Impl::post_results(Op& op, std::size_t index) {
  LanePart& part = op.parts[index];
  for (std::uint32_t i = 0; i < part.expected(); ++i) {
    if (part.owned.count > 0 && delivery_->waits_for_grant(op, part, i)) continue;
    post(op, {op.id, index, part.owned.first + i, 0});
  }
}

void Engine::Impl::post(Op& op, const Receive& receive) {
  LanePart& part = op.parts[receive.part];
  const std::span<std::byte> memory = delivery_->landing(op, part, receive);
  const Token token{next_token_++};
  part.receives[receive.chunk - part.owned.first] = token.value;
  receives_.emplace(token.value, receive);
  PostReceiveAction action{Tag{part.tag + receive.chunk}, memory, token};
  // A post seals what it sends (EngineConfig::sealed_sends): only then may anything land there.
  if (config_.sealed_sends && delivery_->lands_on_input(op)) action.behind = lanes_[part.lane].peer;
  action.from = lanes_[part.lane].peer;
  action.is_apart = op.operation.is_on_device && !memory.empty();
  actions_.emplace_back(std::move(action));
}

/// The bytes of so many chunks.
ByteRange Engine::Impl::run_range(const LanePart& part, std::uint32_t chunk, std::uint32_t run) const {
  const ByteRange first = chunk_range(part.shard, config_.chunk_bytes, chunk);
  if (run == 1) return first;
  const ByteRange last = chunk_range(part.shard, config_.chunk_bytes, chunk + run - 1);
  return {first.offset, last.offset + last.bytes - first.offset};
}

std::span<std::byte> Engine::Impl::chunk_memory(const Op& op, const LanePart& part, std::uint32_t chunk,
                                                std::uint32_t run) const {
  const ByteRange range = run_range(part, chunk, run);
  std::byte* const start = op.is_over ? op.retained.get() : op.operation.memory.data();
  return {start + range.offset, range.bytes};
}

wire::Header Engine::Impl::header_to(const OpKey& key, wire::MessageType type) const {
  wire::Header header;
  header.type = type;
  header.job_id = config_.job_id;
  header.epoch = config_.epoch.value;
  header.sender = config_.self.value;
  header.op = key.op;
  header.group = key.group.value;
  header.part = key.part;
  return header;
}

void Engine::Impl::send(PeerId to, Tag tag, const wire::Header& header, std::vector<std::byte> body,
                        std::span<const std::byte> payload, const Send& record) {
  SendAction action{to, tag, header, std::move(body), payload, Token{next_token_++}};
  action.header.payload_bytes = static_cast<std::uint32_t>(action.body.size() + payload.size());
  sends_.emplace(action.token.value, record);
  if (record.borrows) {
    Op& op = *find_op(record.op);
    ++op.payload_sends;
    action.is_unregistered = op.is_over;
    action.is_apart = op.operation.is_on_device && !payload.empty();
    if (op.is_over) sends_.at(action.token.value).keep = op.retained;
  } else {
    action.is_unregistered = record.keep != nullptr;
  }
  actions_.emplace_back(std::move(action));
}

void Engine::Impl::set_timer(Op& op, Instant when) {
  if (op.timer != Instant::max()) timers_.erase({op.timer, op.id});
  op.timer = when;
  if (when != Instant::max()) timers_.insert({when, op.id});
}

void Engine::Impl::finish_part(LanePart& part, Op& op) {
  if (part.is_done) return;
  part.is_done = true;
  --op.open_parts;
  delivery_->finish(part);
}

/// The one place where an operation ends: every lane is done with it and no send reads its memory any more.
void Engine::Impl::complete_if_done(Op& op) {
  if (op.open_parts > 0 || op.payload_sends > 0) return;
  if (!op.has_failed && !delivery_->may_complete(op)) return;
  if (!op.is_over) {
    ++(op.has_failed ? stats_.ops_failed : stats_.ops_completed);
    actions_.emplace_back(CompleteAction{op.operation.key, op.failure, op.has_failed ? Roster{} : op.answer});
  }
  if (op.has_failed || op.unsettled == 0) {
    forget(op);
  } else {
    op.is_over = true;
    set_timer(op, Instant::max());
  }
}

void Engine::Impl::forget(Op& op) {
  set_timer(op, Instant::max());
  stats_.bytes_retained -= op.retained_bytes;
  delivery_->forget(op);
  by_key_.erase(op.operation.key);
  ops_.erase(op.id);
}

void Engine::Impl::add_awaited(std::vector<PeerId>& lanes) const {
  std::vector<bool> is_awaited(lanes_.size(), false);
  for (const auto& [id, op] : ops_) {
    for (const LanePart& part : op->parts) {
      if (!part.is_done || !part.is_settled) is_awaited[part.lane] = true;
    }
  }
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    if ((is_awaited[lane] || lanes_[lane].one_way > 0) && !lanes_[lane].lost) lanes.push_back(lanes_[lane].peer);
  }
}

Op* Engine::Impl::find_op(std::uint64_t id) {
  const auto found = ops_.find(id);
  return found == ops_.end() ? nullptr : found->second.get();
}

Op* Engine::Impl::find_op(const OpKey& key) {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : find_op(found->second);
}

void Engine::Impl::take_actions(Actions& out) {
  out.insert(out.end(), std::make_move_iterator(actions_.begin()), std::make_move_iterator(actions_.end()));
  actions_.clear();
}

}  // namespace herring::worker
