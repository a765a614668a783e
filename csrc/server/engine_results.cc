// A chunk whose data is there: its sum, the results, and the end of an operation.

#include <algorithm>
#include <utility>
#include <vector>

#include "core/finite.h"
#include "server/delivery.h"

namespace herring::server {

/// All data of a chunk is there: reduce, and then send the result to everybody who owns the chunk.
void Engine::Impl::finish_chunk(Instant now, Op& op, std::uint32_t number) {
  Chunk& chunk = op.in_flight.at(number);
  const bool is_checked = config_.check_finite && reduces(op.shape.descriptor.collective);
  if (chunk.source == kNone && (chunk.inputs.size() > 1 || op.shape.average_over > 1 || is_checked)) {
    reduce_chunk(op, chunk, number);
  } else {
    send_results(now, op, number);
  }
}

void Engine::Impl::send_results(Instant now, Op& op, std::uint32_t number) {
  Chunk& chunk = op.in_flight.at(number);
  const std::span<std::byte> output = chunk.output().data;
  if (op.absentees() > 0) keep(op, number, output);
  for (std::size_t contributor = 0; contributor < op.owners.size(); ++contributor) {
    if (op.owners[contributor].empty()) continue;  // It gets what is kept.
    Participant& owner = op.participants[op.owner_of(static_cast<std::uint32_t>(contributor), number)];
    if (owner.is_one_way) continue;
    if (config_.near_worker == owner.peer && chunk.is_lent()) {
      stats_.bytes_sent += output.size();
      send_result(op, owner, number, {}, wire::kFlagInPlace);
      continue;
    }
    const bool has_it = contributor == chunk.source || owner.holds(number);
    send_result(op, owner, number, has_it ? std::span<std::byte>{} : output);
  }
  if (op.any_held && chunk.source != kNone && !op.has_one_pusher()) ++stats_.chunks_copied;
  op.chunks_done += chunk.count;
  if (op.chunks_done == op.chunks) finish_op(now, op);
}

/// Into what is sent, and to where a worker in this process has its share.
void Engine::Impl::reduce_chunk(const Op& op, Chunk& chunk, std::uint32_t number) {
  ReduceAction reduce;
  reduce.token = Token{next_token_++};
  reduce.spec = {op.shape.descriptor.dtype, op.shape.descriptor.reduce, op.shape.average_over};
  reduce.check_finite = config_.check_finite && reduces(op.shape.descriptor.collective);
  // In one hop nobody else gets it.
  const bool stays_here = op.is_one_hop && chunk.is_lent();
  if (!stays_here) reduce.outputs.push_back(chunk.output().data);
  for (Input& input : chunk.inputs) {
    reduce.inputs.emplace_back(input.data);
    if (!input.loan) continue;
    reduce.outputs.push_back(input.data);
    reduce.loan = std::move(input.loan);
    ++stats_.lent;
  }
  chunk.is_reducing = true;
  reducing_.emplace(reduce.token.value, std::pair{op.id, number});
  actions_.emplace_back(std::move(reduce));
}

Status Engine::Impl::not_finite(const Op& op, std::uint32_t number, std::span<const NotFiniteInput> found) const {
  const std::uint64_t before = op.chunk_offset(number) / element_bytes(op.shape.descriptor.dtype);
  std::vector<NotFinite> named;
  for (const NotFiniteInput& one : found) {
    const std::uint32_t contributor = op.backup == nullptr ? one.input : op.backup->in[one.input];
    const Participant& owner = op.owner(contributor, number);
    named.push_back({rank_list(ranks_of(owner)), before + one.element});
  }
  return not_finite_status(op.shape.descriptor, op.key.op, named);
}

void Engine::Impl::send_result(Op& op, Participant& participant, std::uint32_t chunk,
                               std::span<const std::byte> payload, std::uint16_t flag) {
  wire::Header header = header_to(op.key, wire::MessageType::kResult);
  if (payload.empty()) header.flags = flag;
  std::uint32_t chunks = 1;
  if (chunk != kNone) {
    Chunk& sent = op.in_flight.at(chunk);
    header.chunk = chunk;
    header.offset = op.chunk_offset(chunk);
    ++sent.sends;
    chunks = sent.count;
  }
  header.tag = participant.tag + header.chunk;
  header.count = participant.late;
  participant.results += chunks;
  if (participant.has_everything()) retire(participant);
  ++op.sends;
  stats_.bytes_sent += payload.size();
  send(participant.peer, Tag{header.tag}, header, {}, payload, {op.id, chunk, participant.peer, true});
  if (participant.is_apart && !payload.empty()) std::get<SendAction>(actions_.back()).is_apart = true;
}

/// All Results are handed out: the key is free again; the memory stays until they are sent.
void Engine::Impl::finish_op(Instant now, Op& op) {
  if (op.absentees() > 0) {
    op.state = OpState::kKept;
    return;
  }
  op.state = OpState::kFinishing;
  end_live(op);
  delivery_->finish(now, op);
  ++stats_.ops_completed;
  if (op.is_one_hop) {
    ++stats_.one_hop;
    retire_one_way(now, op);
  }
  for (Deferred& deferred : op.deferred) replay_.push_back(std::move(deferred));
  op.deferred.clear();
}

/// The worker may count this announce as finished from now on, so the lane must not count it any longer.
void Engine::Impl::retire(Participant& participant) {
  if (!participant.counted) return;
  participant.counted = false;
  WorkerState& worker = workers_[participant.peer.value];
  --worker.ops;
  if (participant.eager) --worker.eager;
}

void Engine::Impl::release_slots(const Chunk& chunk, Input& input) {
  const std::uint32_t slot = std::exchange(input.slot, kNone);
  if (slot == kNone) return;
  pool_.give_back(slot, chunk.order);
  stats_.slots_in_use -= std::uint64_t{1} << chunk.order;
}

}  // namespace herring::server
