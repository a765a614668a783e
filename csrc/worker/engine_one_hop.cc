// In one hop every lane gets all of it, and the one in this process puts the sum where the input is. So a chunk goes to
// the others first, and to that one when it has left.
#include <algorithm>
#include <utility>

#include "worker/delivery.h"

namespace herring::worker {
namespace {

/// How long the lane in this process waits for others before they get a copy. Usually they ask in time. But each of two
/// lanes may have given all its room to what the other one has no room for.
constexpr Duration kPatience = std::chrono::milliseconds(5);

}  // namespace

/// The announce is on its way.
void Engine::Impl::sent_one_way(Op& op, LanePart& part) {
  if (part.is_eager || !op.pushes() || part.owned.count == 0) return finish_part(part, op);
  part.is_sent.resize(part.owned.count);
  if (is_small(config_, part.shard.bytes)) copy_unsent(op);
}

/// Of what is small, where the result lands on the input: the lane in this process may have it before the others have
/// the input. Posts its receive once nothing that is on its way, or has yet to be sent, reads that memory.
void Engine::Impl::post_held_back(Op& op) {
  if (!delivery_->lands_on_input(op) || is_empty(op.operation) || op.payload_sends > 0) return;
  const auto waits = [](const LanePart& part) { return !part.is_announced && !part.is_done; };
  if (std::ranges::any_of(op.parts, waits)) return;
  for (LanePart& part : op.parts) {
    if (part.is_one_way || part.is_closing || part.is_done || waits_for_others(op, part)) continue;
    if (!part.is_eager && part.pushed < part.owned.count) continue;
    if (std::exchange(part.has_receives, true)) continue;
    for (std::uint32_t i = 0; i < part.owned.count; ++i) post(op, {op.id, part.index, part.owned.first + i, 0});
  }
}

/// Whether somebody has yet to get these chunks from where the lane in this process would put their sum.
bool Engine::Impl::is_held_back(const Op& op, std::uint32_t chunk, std::uint32_t run) const {
  return std::ranges::any_of(op.parts, [&](const LanePart& part) {
    if (!part.is_one_way || part.is_done) return false;
    if (!part.is_announced) return true;
    const auto first = part.is_sent.begin() + (chunk - part.owned.first);
    return std::find(first, first + run, false) != first + run;
  });
}

void Engine::Impl::note_sent(Op& op, LanePart& part, const IndexRange& chunks) {
  for (std::uint32_t i = chunks.first - part.owned.first; i < chunks.first + chunks.count - part.owned.first; ++i) {
    if (part.is_sent[i]) continue;
    part.is_sent[i] = true;
    ++part.sent;
  }
  finish_if_sent(op, part);
}

void Engine::Impl::finish_if_sent(Op& op, LanePart& part) {
  if (part.pushed == part.owned.count && part.sent == part.owned.count) finish_part(part, op);
}

/// What the lane in this process may have now.
void Engine::Impl::push_waiting(Op& op) {
  if (op.copies_at == Instant::max() || op.has_failed) return;
  bool waits = false;
  for (LanePart& part : op.parts) {
    if (part.is_one_way || part.is_closing || part.is_done) continue;
    std::erase_if(part.waiting, [&](const ChunkPush& chunks) {
      if (is_held_back(op, chunks.chunk, chunks.run)) return false;
      push(op, part, chunks);
      return true;
    });
    waits |= !part.waiting.empty();
  }
  if (!waits) op.copies_at = Instant::max();
}

/// What no lane has asked for yet goes from a copy when it does.
void Engine::Impl::copy_unsent(Op& op) {
  if (op.outgoing == nullptr) {
    op.outgoing = std::make_shared_for_overwrite<std::byte[]>(op.operation.memory.size());
  }
  for (LanePart& part : op.parts) {
    if (!part.is_one_way || !part.is_announced || part.is_done) continue;
    for (std::uint32_t i = 0; i < part.owned.count; ++i) {
      if (part.is_pushed[i] || part.is_sent[i]) continue;
      // One copy for all lanes of the rail.
      const std::uint64_t start = run_range(part, part.owned.first + i, 1).offset;
      const auto place = std::ranges::lower_bound(op.copied, start);
      if (place == op.copied.end() || *place != start) {
        const std::span<const std::byte> memory = chunk_memory(op, part, part.owned.first + i);
        actions_.emplace_back(CopyAction{memory, outgoing_of(op, memory), op.outgoing});
        op.copied.insert(place, start);
        ++stats_.copied;
      }
      note_sent(op, part, {part.owned.first + i, 1});
    }
  }
}

std::span<std::byte> Engine::Impl::outgoing_of(const Op& op, std::span<const std::byte> memory) const {
  return {op.outgoing.get() + (memory.data() - op.operation.memory.data()), memory.size()};
}

/// Others have had their time to ask.
void Engine::Impl::hold_no_longer(Op& op) {
  if (op.copies_at <= now_) copy_unsent(op);
  push_waiting(op);
  if (op.copies_at <= now_) op.copies_at = now_ + kPatience;
  set_timer(op, std::min(op.copies_at, deadline_of(op)));
}

/// What the lane in this process asks for while others need it waits.
void Engine::Impl::hold_back(Op& op, LanePart& part, const ChunkPush& push) {
  std::fill_n(part.is_pushed.begin() + (push.chunk - part.owned.first), push.run, true);
  part.waiting.push_back(push);
  if (op.copies_at != Instant::max()) return;
  op.copies_at = now_ + kPatience;
  set_timer(op, std::min(op.timer, op.copies_at));
}

}  // namespace herring::worker
