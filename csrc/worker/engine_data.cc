#include <algorithm>
#include <string>

#include "worker/delivery.h"

namespace herring::worker {
namespace {

constexpr std::uint32_t kMaxRetries = 8;

}  // namespace

bool Engine::Impl::is_from_job(const wire::Header& header) const {
  return header.job_id == config_.job_id && header.epoch == config_.epoch.value;
}

Lane* Engine::Impl::lane_of(std::uint32_t peer) {
  const auto found = lane_index_.find(PeerId{peer});
  return found == lane_index_.end() || lanes_[found->second].lost ? nullptr : &lanes_[found->second];
}

void Engine::Impl::on_control(Instant now, const wire::Header& header, std::span<const std::byte> body) {
  if (!is_from_job(header) || lane_of(header.sender) == nullptr || header.payload_bytes != body.size()) {
    ++stats_.messages_rejected;
    return;
  }
  now_ = now;
  switch (header.type) {
    case wire::MessageType::kCredit:
      return handle_credit(header);
    case wire::MessageType::kGrant:
      return delivery_->take_grant(header, body);
    case wire::MessageType::kSettled:
      return delivery_->handle_settled(now, header, body);
    case wire::MessageType::kError:
      return handle_error(now, header, body);
    default:
      ++stats_.messages_rejected;
  }
}

void Engine::Impl::handle_credit(const wire::Header& header) {
  Lane& lane = *lane_of(header.sender);
  const std::uint32_t given = config_.announce_credits == 0 ? 0 : config_.announce_credits - lane.credits;
  if ((header.count == 0 && header.offset == 0) || header.count > given || header.offset > lane.one_way) {
    ++stats_.messages_rejected;
    return;
  }
  lane.credits += header.count;
  lane.one_way -= static_cast<std::uint32_t>(header.offset);
  one_way_ -= header.offset;
  serve_queue(lane);
}

void Engine::Impl::serve_queue(Lane& lane) {
  while (!lane.queue.empty()) {
    const auto [id, index] = lane.queue.front();
    if (id != 0 && lane.credits == 0) return;
    lane.queue.pop_front();
    if (id == 0) {
      delivery_->say_moved(lane, index);
    } else {
      Op& op = *find_op(id);
      announce(op, index);
      complete_if_done(op);
    }
  }
}

LanePart* Engine::Impl::find_part(Op& op, std::uint32_t peer, std::uint64_t tag) {
  for (LanePart& part : op.parts) {
    if (part.is_announced && part.tag == tag && lanes_[part.lane].peer.value == peer) return &part;
  }
  return nullptr;
}

/// Its Results are received when its pushes are over: they land on what is pushed.
bool Engine::Impl::is_answered_later(const Op& op, const LanePart& part) const {
  if (!delivery_->lands_on_input(op)) return false;
  return !op.is_one_hop || waits_for_others(op, part);
}

void Engine::Impl::push(Op& op, LanePart& part, const ChunkPush& push) {
  const auto [chunk, run, tag] = push;
  std::span<const std::byte> memory = delivery_->source(op, part, chunk, run);
  std::fill_n(part.is_pushed.begin() + (chunk - part.owned.first), run, true);
  part.pushed += run;
  stats_.bytes_sent += memory.size();
  wire::Header header = header_to(op.operation.key, wire::MessageType::kPush);
  header.shard = shard_of(part);
  header.tag = tag.value;
  header.chunk = chunk;
  header.offset = chunk_range(part.shard, config_.chunk_bytes, chunk).offset;
  Send record{op.id, part.index, true, true};
  if (part.is_one_way && part.is_sent[chunk - part.owned.first]) {
    memory = outgoing_of(op, memory);
    record.borrows = false;
    record.keep = op.outgoing;
  } else if (part.is_one_way) {
    record.one_way = {chunk, run};
  } else if (is_answered_later(op, part) && !config_.sealed_sends) {
    record.answered = {chunk, record.run = run};
  }
  send(lanes_[part.lane].peer, tag, header, {}, memory, record);
  if (part.is_one_way) return finish_if_sent(op, part);
  if (is_answered_later(op, part) && config_.sealed_sends) post(op, {op.id, part.index, chunk, 0, kNone, run});
}

/// Nobody needs the input any more: now the Results may land on it. Also of an operation that has failed: what is on
/// its way has to meet a receive.
void Engine::Impl::post_answered(Op& op, const Send& sent) {
  if (sent.answered.count == 0 || op.parts[sent.part].is_closing || op.parts[sent.part].is_done) return;
  for (std::uint32_t i = 0; i < sent.answered.count; i += sent.run) {
    post(op, {op.id, sent.part, sent.answered.first + i, 0, kNone, sent.run});
  }
}

void Engine::Impl::handle_error(Instant now, const wire::Header& header, std::span<const std::byte> body) {
  Op* op = find_op(header.key());
  LanePart* part = op == nullptr ? nullptr : find_part(*op, header.sender, header.tag);
  if (part == nullptr) {
    ++stats_.messages_rejected;  // Of an operation that is over here.
    return;
  }
  if (part->has_error) return;
  part->has_error = true;
  part->results_sent = std::min(header.count, part->expected());
  if (op->has_failed) {
    drain_part(*op, *part, false);
    complete_if_done(*op);
  } else {
    fail(now, *op, wire::decode_reason(body));
  }
}

void Engine::Impl::on_received(Instant now, Token token, const Status& status, const wire::Header& header) {
  now_ = now;
  const auto found = receives_.find(token.value);
  if (found == receives_.end() || found->second.is_withdrawn) return;
  Receive receive = found->second;
  receives_.erase(found);
  Op& op = *find_op(receive.op);
  LanePart& part = op.parts[receive.part];
  const bool has_chunk = part.owned.count > 0;
  const ByteRange range = has_chunk ? run_range(part, receive.chunk, receive.run) : ByteRange{};
  const bool has_data = has_chunk && delivery_->brings_data(op, part, receive.chunk);
  const bool is_in_place =
      has_data && (header.flags & wire::kFlagInPlace) != 0 && may_be_in_place(op, part, receive.chunk);
  const std::uint64_t bytes = has_data && !is_in_place ? range.bytes : 0;
  if (!status.is_ok() || !is_expected(op, part, receive, header, bytes)) {
    ++stats_.messages_rejected;
    const bool is_enough = status.code() == Code::kCorrupted || ++receive.retries > kMaxRetries;
    // What the lane has sent, or will, has to meet a receive, or its memory there is never free again.
    if (has_arrived(status) || !is_enough) {
      post(op, receive);
    } else {
      part.receives[receive.chunk - part.owned.first] = 0;
      delivery_->release(part, receive);
    }
    if (!is_enough) return;
    fail(now, op,
         Status(status.code() == Code::kCorrupted ? Code::kCorrupted : Code::kTransport,
                to_string(op.operation.descriptor) + ": no receive from server lane " + std::to_string(part.lane) +
                    " works (chunk " + std::to_string(receive.chunk) +
                    "): " + (status.is_ok() ? "the messages that arrived were not Herring's" : status.message())));
    return;
  }
  if (op.operation.is_join) op.answer[receive.chunk] = header.offset;
  if (receive.chunk == part.owned.first && part.moved_by == 0 && !part.has_roster) {
    ++stats_.announces;
    stats_.came_last += (header.count & wire::kWasLast) != 0 ? 1 : 0;
    stats_.late_us += header.count & ~wire::kWasLast;
  }
  take_result(op, part, receive, has_data ? range.bytes : 0);
}

/// Whether this owned chunk was lent to the lane, so that it could put the sum there.
bool Engine::Impl::may_be_in_place(const Op& op, const LanePart& part, std::uint32_t chunk) const {
  return lanes_[part.lane].is_near && delivery_->lands_on_input(op) && part.is_pushed[chunk - part.owned.first];
}

bool Engine::Impl::is_expected(const Op& op, const LanePart& part, const Receive& receive, const wire::Header& header,
                               std::uint64_t bytes) const {
  const bool is_mine = is_from_job(header) && header.sender == lanes_[part.lane].peer.value &&
                       header.key() == op.operation.key && header.shard == shard_of(part) &&
                       header.tag == part.tag + receive.chunk && header.payload_bytes == bytes;
  if (op.operation.is_join) {
    return is_mine && header.type == wire::MessageType::kRoster && header.chunk == receive.chunk;
  }
  if (!is_mine || header.type != wire::MessageType::kResult) return false;
  if (part.owned.count == 0) return header.chunk == 0 && header.offset == 0;
  return header.chunk == receive.chunk &&
         header.offset == chunk_range(part.shard, config_.chunk_bytes, receive.chunk).offset;
}

void Engine::Impl::take_result(Op& op, LanePart& part, const Receive& receive, std::uint64_t bytes) {
  const std::uint32_t lane = part.lane;
  part.receives[receive.chunk - part.owned.first] = 0;
  part.received += receive.run;
  stats_.bytes_received += bytes;
  delivery_->take(op, part, receive, bytes);
  const bool is_all = part.received == part.expected();
  if (is_all && op.operation.is_join && !is_sane(op.answer, op.operation.contributor_count)) {
    op.has_failed = true;
    op.failure =
        Status(Code::kProtocol, to_string(op.operation.descriptor) + ": a server sent an invalid list of contributors");
  }
  if (is_all) {
    finish_part(part, op);
    delivery_->report(op, part);
  } else if (op.has_failed) {
    drain_part(op, part, false);
  }
  complete_if_done(op);
  delivery_->serve_grants(lane);
}

void Engine::Impl::on_sent(Instant now, Token token, const Status& status) {
  const auto found = sends_.find(token.value);
  if (found == sends_.end()) return;
  now_ = now;
  const Send sent = std::move(found->second);
  sends_.erase(found);
  if (sent.receipt_lane != kNone) delivery_->on_sent_receipt(now, sent.receipt_lane);
  Op* op = find_op(sent.op);
  if (op == nullptr) return;
  if (sent.borrows) --op->payload_sends;
  post_answered(*op, sent);
  if (op->is_one_hop) {
    if (sent.one_way.count > 0) note_sent(*op, op->parts[sent.part], sent.one_way);
    push_waiting(*op);
    post_held_back(*op);
  }
  if (!status.is_ok() && sent.matters && !op->has_failed) {
    const std::uint32_t lane = op->parts[sent.part].lane;
    if (lanes_[lane].lost) return complete_if_done(*op);
    if (delivery_->may_move(lane)) {
      // A dying server breaks its connections before its death is known. If it lives, the operation fails a little
      // later.
      if (op->suspicion.is_ok()) {
        op->suspicion = status;
        set_timer(*op, std::min(op->timer, now + 2 * config_.lane_grace));
      }
      return complete_if_done(*op);
    }
    fail(now, *op,
         Status(status.code(), to_string(op->operation.descriptor) + ": could not send to server lane " +
                                   std::to_string(op->parts[sent.part].lane) + ": " + status.message()));
    return;
  }
  complete_if_done(*op);
}

}  // namespace herring::worker
