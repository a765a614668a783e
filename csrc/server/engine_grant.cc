
#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "core/finite.h"
#include "server/delivery.h"

namespace herring::server {
namespace {

/// Ready operations of one group looked at in one pass; the first ones in line matter, the rest comes with the next
/// event. Whoever waits for a slow worker is in nobody else's way.
constexpr std::size_t kMaxLook = 16;

}  // namespace

/// Grants what there is room for, first come first served. An operation that lacks slots stops the line, so that the
/// slots which come free gather for it; one that only waits for its workers' windows lets later ones go by.
void Engine::Impl::schedule(Instant now) {
  looked_.clear();
  for (std::size_t i = 0; i < ready_.size();) {
    const auto [id, group] = ready_[i];
    if (looks_at(group) > kMaxLook) {
      ++i;
      continue;
    }
    const Grant grant = grant_chunks(now, *find_op(id));
    if (grant == Grant::kNoSlots) return;
    if (grant == Grant::kAll) {
      ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

/// How often this pass has looked at the group, this time included. A lane serves few groups at once.
std::size_t Engine::Impl::looks_at(GroupId group) {
  for (auto& [known, looks] : looked_) {
    if (known == group) return ++looks;
  }
  looked_.emplace_back(group, 1);
  return 1;
}

Engine::Impl::Grant Engine::Impl::grant_chunks(Instant now, Op& op) {
  const std::uint32_t run = run_length(op);
  const auto outcome = [&op] { return op.obstacle->slots > 0 ? Grant::kNoSlots : Grant::kNoWindow; };
  if (op.obstacle && still_stands(*op.obstacle, run)) return outcome();
  const std::uint32_t order = SlotPool::order_for(run);
  const std::uint32_t count = count_grantable(op, run);
  const std::uint32_t remaining = op.chunks - op.next_chunk;
  // One grant for several chunks: it waits until half of what could ever be granted at once is there. With nothing of
  // anybody in flight that is always the case, so waiting ends. A run is long enough for a grant of its own.
  const std::uint32_t half_window = std::max(1u, window_.size() / 2);
  const std::uint32_t half_slots = std::max(1u, pool_.most(0) / op.pushers() / 2);
  const std::uint32_t least = run > 1 ? run_at(op, op.next_chunk, run) : std::min({remaining, half_window, half_slots});
  if (count < least) return outcome();
  for (const std::uint32_t end = op.next_chunk + count; op.next_chunk < end;) {
    const std::uint32_t together = run_at(op, op.next_chunk, run);
    op.next_chunk += together;
    grant_chunk(now, op, op.next_chunk - together, together, order);
  }
  send_grants(op);
  if (op.next_chunk == op.chunks) return Grant::kAll;
  // What it counted on top of is granted now.
  const Grant result = outcome();
  op.obstacle.reset();
  return result;
}

/// How many chunks go in one message: not more than leave two messages of each pusher on their way, as to slots and the
/// window, so that one is summed while the next one comes. One by one where somebody posts its receives without regard
/// to runs, where a result may come from a lane that died, or where somebody may be missing.
std::uint32_t Engine::Impl::run_length(const Op& op) const {
  if (op.any_eager || op.any_held || op.has_one_pusher() || op.may_lack_some() || is_small_one_hop(op)) return 1;
  std::uint32_t run = std::bit_floor(std::max(std::min(run_.size(op.chunks), window_.size() / 2), 1u));
  while (run > 1 && pool_.most(SlotPool::order_for(run)) / op.pushers() < 2) run /= 2;
  return run;
}

/// What the run that begins at this chunk has of them: it ends where another process goes on for its contributor.
std::uint32_t Engine::Impl::run_at(const Op& op, std::uint32_t chunk, std::uint32_t run) const {
  std::uint32_t count = std::min(run, op.chunks - chunk);
  for (std::uint32_t k = 0; count > 1 && k < op.owners.size(); ++k) {
    const wire::Announce& owner = op.participants[owner_of(op, k, chunk)].announce;
    count = std::min(count, owner.owned_first + owner.owned_count - chunk);
  }
  return count;
}

/// The contributor whose data is the chunk's result: the single pusher, or one who has it from a lane that died. kNone
/// where it has to be summed.
std::uint32_t Engine::Impl::source_of(const Op& op, std::uint32_t chunk) const {
  if (op.has_one_pusher()) return op.shape.pusher;
  for (std::uint32_t k = 0; op.any_held && k < op.owners.size(); ++k) {
    if (op.participants[owner_of(op, k, chunk)].holds(chunk)) return k;
  }
  return kNone;
}

bool Engine::Impl::is_held_by_all(const Op& op, std::uint32_t chunk) const {
  for (std::uint32_t k = 0; k < op.owners.size(); ++k) {
    if (!op.participants[owner_of(op, k, chunk)].holds(chunk)) return false;
  }
  return true;
}

/// What a contributor's process has to do for a chunk once it is granted; not for one that all hold already.
Engine::Impl::Role Engine::Impl::role_of(std::uint32_t contributor, const Participant& owner, std::uint32_t chunk,
                                         std::uint32_t source) const {
  if (source == kNone || contributor == source) return Role::kPush;
  return delivery_->has_to_post(owner, chunk) ? Role::kPull : Role::kNothing;
}

/// How many of the next chunks find a slot for each pusher, within the windows of all concerned; and what is in the way
/// of the rest.
std::uint32_t Engine::Impl::count_grantable(Op& op, std::uint32_t run) {
  op.obstacle.reset();
  std::size_t free = pool_.free(SlotPool::order_for(run));
  std::uint32_t number = op.next_chunk;
  while (number < op.chunks) {
    op.obstacle = obstacle_to(op, number, run, free);
    if (op.obstacle) break;
    number += run_at(op, number, run);
  }
  return number - op.next_chunk;
}

/// To the chunks from `number` on that go in one message, behind those before them. `free`: slots that these leave;
/// what this message takes is taken of them.
std::optional<Obstacle> Engine::Impl::obstacle_to(const Op& op, std::uint32_t number, std::uint32_t run,
                                                  std::size_t& free) {
  if (op.any_held && is_held_by_all(op, number)) return std::nullopt;
  const std::uint32_t together = run_at(op, number, run);
  const std::uint32_t source = source_of(op, number);
  std::size_t wanted = 0;
  for (std::uint32_t k = 0; k < op.owners.size(); ++k) {
    ++stats_.looks;
    if (!op.sums(k)) continue;
    const Participant& owner = op.participants[owner_of(op, k, number)];
    const Role role = role_of(k, owner, number, source);
    if (role == Role::kNothing || (role == Role::kPush && owner.eager)) continue;
    if (role == Role::kPush && !lends(op, owner, op.run_bytes(number, together))) ++wanted;
    // With the chunks before it that this one owns.
    const std::uint32_t room = number - std::max(op.next_chunk, owner.announce.owned_first) + together;
    if (workers_[owner.peer.value].granted + room > window_.size()) return Obstacle{run, 0, owner.peer, room, 0};
  }
  if (wanted > free) {
    const std::size_t taken = pool_.free(SlotPool::order_for(run)) - free;
    return Obstacle{run, taken + wanted, {}, 0, grants_};
  }
  free -= wanted;
  return std::nullopt;
}

/// Where another operation has taken slots since, it may be another one.
bool Engine::Impl::still_stands(const Obstacle& obstacle, std::uint32_t run) const {
  if (obstacle.run != run) return false;
  if (obstacle.slots == 0) return workers_[obstacle.worker.value].granted + obstacle.room > window_.size();
  return obstacle.grants == grants_ && pool_.free(SlotPool::order_for(run)) < obstacle.slots;
}

std::uint32_t Engine::Impl::owner_of(const Op& op, std::uint32_t contributor, std::uint32_t chunk) const {
  const auto& owners = op.owners[contributor];
  if (owners.size() == 1) return owners.front();
  for (const std::uint32_t index : owners) {
    if (op.participants[index].owns(chunk)) return index;
  }
  return owners.front();  // Not reached: make_ready() checked that the chunks are covered.
}

void Engine::Impl::grant_chunk(Instant now, Op& op, std::uint32_t number, std::uint32_t count, std::uint32_t order) {
  Chunk& chunk = op.in_flight[number];
  ++grants_;
  chunk.count = count;
  chunk.order = order;
  if (count > 1) ++stats_.runs;
  chunk.granted = now;
  chunk.source = source_of(op, number);
  const std::uint32_t bytes = op.run_bytes(number, count);
  chunk.inputs.resize(chunk.source == kNone ? op.pushers() : 1);
  std::uint32_t place = 0;  // Among those who are in.
  const bool is_held = op.any_held && is_held_by_all(op, number);
  for (std::uint32_t k = 0; k < op.owners.size() && !is_held; ++k) {
    if (!op.sums(k)) continue;
    const std::uint32_t input = chunk.source == kNone ? place++ : 0;
    const std::uint32_t index = owner_of(op, k, number);
    Participant& owner = op.participants[index];
    const Role role = role_of(k, owner, number, chunk.source);
    if (role == Role::kNothing) continue;
    if (role == Role::kPush && owner.eager) {
      const std::size_t offset = std::size_t{number - owner.announce.owned_first} * op.shape.chunk_bytes;
      chunk.inputs[input].data = owner.data.subspan(offset, bytes);
      continue;
    }
    ++chunk.missing;
    workers_[owner.peer.value].granted += count;
    if (role == Role::kPush) {
      give_slot(op, index, number, input, bytes);
    } else {
      chunk.unready.push_back(index);
    }
    tell(op, owner, number, count, role == Role::kPull);
  }
  if (chunk.missing == 0) finish_chunk(now, op, number);
}

/// Whether what it pushes is summed where it lies. Only where others push too, so that the sum has a slot to be sent
/// from: whoever lends may use its memory as soon as it has its own result. Small data in one hop is not: it may be on
/// its way to other lanes; of the rest its worker lends what these have.
bool Engine::Impl::lends(const Op& op, const Participant& participant, std::uint32_t bytes) const {
  return config_.near_worker == participant.peer && bytes >= config_.min_loan_bytes && op.pushers() > 1 &&
         !op.may_lack_some() && !is_small_one_hop(op) && delivery_->may_lend() && !config_.check_finite;
}

void Engine::Impl::give_slot(Op& op, std::uint32_t index, std::uint32_t number, std::uint32_t input,
                             std::uint32_t bytes) {
  const Chunk& chunk = op.in_flight.at(number);
  Input& place = op.in_flight.at(number).inputs[input];
  place.is_loan = lends(op, op.participants[index], bytes);
  if (!place.is_loan) {
    place.slot = pool_.take(chunk.order);
    stats_.slots_in_use += std::uint64_t{1} << chunk.order;
    stats_.slots_peak = std::max(stats_.slots_peak, stats_.slots_in_use);
    place.data = slots_.subspan(std::size_t{place.slot} * config_.max_chunk_bytes, bytes);
  }
  ++op.participants[index].outstanding;
  post(op, {op.id, index, number, input, 0}, place.data);
}

void Engine::Impl::post(Op& op, Receive receive, std::span<std::byte> memory) {
  const std::uint64_t token = next_token_++;
  Input& input = op.in_flight.at(receive.chunk).inputs[receive.input];
  input.token = token;
  const Participant& from = op.participants[receive.participant];
  receives_.emplace(token, receive);
  actions_.emplace_back(PostReceiveAction{Tag{from.push_tag + receive.chunk}, memory, Token{token}, std::nullopt,
                                          from.peer, input.is_loan});
}

/// A Grant names consecutive chunks of one kind, in runs of one length.
void Engine::Impl::tell(Op& op, Participant& participant, std::uint32_t chunk, std::uint32_t run, bool pulls) {
  if (participant.told_count > 0 && (participant.told_pulls != pulls || participant.told_run != run ||
                                     participant.told_first + participant.told_count != chunk)) {
    send_grant(op, participant);
  }
  if (participant.told_count == 0) participant.told_first = chunk;
  participant.told_count += run;
  participant.told_run = run;
  participant.told_pulls = pulls;
}

void Engine::Impl::send_grants(Op& op) {
  for (Participant& participant : op.participants) {
    if (participant.told_count > 0) send_grant(op, participant);
  }
}

void Engine::Impl::send_grant(Op& op, Participant& participant) {
  wire::Header header = header_to(op.key, wire::MessageType::kGrant);
  header.chunk = participant.told_first;
  header.count = participant.told_count;
  header.tag = participant.push_tag + participant.told_first;
  header.offset = participant.tag;
  participant.told_count = 0;
  if (participant.told_pulls) header.flags = wire::kFlagPull;
  std::vector<std::uint64_t> said;
  delivery_->number(participant.peer, said);
  if (participant.told_run > 1) said.push_back(participant.told_run);
  send(participant.peer, kControlTag, header, wire::encode_list(said), {}, {op.id, kNone, participant.peer, false});
}

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
  const std::span<std::byte> output = output_of(chunk).data;
  if (op.absentees() > 0) keep(op, number, output);
  for (std::size_t contributor = 0; contributor < op.owners.size(); ++contributor) {
    if (op.owners[contributor].empty()) continue;  // It gets what is kept.
    Participant& owner = op.participants[owner_of(op, static_cast<std::uint32_t>(contributor), number)];
    if (owner.is_one_way) continue;
    if (config_.near_worker == owner.peer && is_lent(chunk)) {
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
  const bool stays_here = op.is_one_hop && is_lent(chunk);
  if (!stays_here) reduce.outputs.push_back(output_of(chunk).data);
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
    const Participant& owner = op.participants[owner_of(op, contributor, number)];
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
