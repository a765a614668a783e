#include <algorithm>

#include "worker/delivery.h"

namespace herring::worker {

std::uint16_t Engine::Impl::PlainDelivery::reserve(const Op& op, LanePart& part) {
  Lane& lane = engine_.lanes_[part.lane];
  const bool has_room = lane.eager + lane.one_way < engine_.config_.eager_window;
  if (part.owned.count == 0 || !is_small(engine_.config_, part.shard.bytes) || !has_room || !op.pushes()) return 0;
  if (op.operation.is_on_device) return 0;
  if (!part.is_one_way) ++lane.eager;
  return wire::kFlagEager;
}

/// Providers look for a message's receive among all that are posted.
bool Engine::Impl::PlainDelivery::waits_for_grant(const Op& op, const LanePart& part, std::uint32_t) const {
  return op.pushes() && !part.is_eager;
}

std::span<std::byte> Engine::Impl::PlainDelivery::landing(const Op& op, const LanePart& part,
                                                          const Receive& receive) const {
  if (part.owned.count == 0 || !op.pulls_data()) return {};
  return engine_.chunk_memory(op, part, receive.chunk, receive.run);
}

void Engine::Impl::PlainDelivery::finish(LanePart& part) {
  if (!part.is_one_way && part.is_eager) --engine_.lanes_[part.lane].eager;
}

void Engine::Impl::PlainDelivery::handle_settled(Instant, const wire::Header&, std::span<const std::byte>) {
  ++engine_.stats_.messages_rejected;  // Of a job with failover.
}

void Engine::Impl::PlainDelivery::take_grant(const wire::Header& header, std::span<const std::byte> body) {
  Op* op = engine_.find_op(header.key());
  LanePart* part = op == nullptr ? nullptr : engine_.find_part(*op, header.sender, header.offset);
  if (part == nullptr) {
    // Given up meanwhile, most likely: the lane has been told how many pushes to expect.
    ++engine_.stats_.messages_rejected;
    return;
  }
  if (op->has_failed || part->is_closing || part->is_done) return;
  const std::uint64_t end = std::uint64_t{header.chunk} + header.count;
  const auto said = wire::decode_list(body, 1);
  const std::uint32_t run = body.empty() ? 1 : said ? run_of(said->front()) : 0;
  if (part->is_eager || !op->pushes() || header.count == 0 || header.chunk < part->owned.first ||
      end > std::uint64_t{part->owned.first} + part->owned.count || run == 0 || header.count % run != 0) {
    ++engine_.stats_.messages_rejected;
    return;
  }
  const bool lands_on_input = this->lands_on_input(*op);
  for (std::uint32_t i = 0; i < header.count; i += run) {
    const std::uint32_t chunk = header.chunk + i;
    const auto first = part->is_pushed.begin() + (chunk - part->owned.first);
    if (std::find(first, first + run, true) != first + run) {
      ++engine_.stats_.messages_rejected;
      continue;
    }
    // What takes the Result's receive may be anybody's message: it must not lie on what the push still reads.
    if (!lands_on_input && !part->is_one_way) engine_.post(*op, {op->id, part->index, chunk, 0, kNone, run});
    const ChunkPush granted{chunk, run, Tag{header.tag + i}};
    if (engine_.waits_for_others(*op, *part) && engine_.is_held_back(*op, chunk, run)) {
      engine_.hold_back(*op, *part, granted);
    } else {
      engine_.push(*op, *part, granted);
    }
  }
  engine_.complete_if_done(*op);
}

}  // namespace herring::worker
