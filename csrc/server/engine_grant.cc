// Lets workers send: first come first served, by what GrantPlan finds room for.

#include <algorithm>
#include <utility>
#include <vector>

#include "server/delivery.h"
#include "server/grant_plan.h"

namespace herring::server {
namespace {

/// Ready operations of one group looked at in one pass; the first ones in line matter, the rest comes with the next
/// event. Whoever waits for a slow worker is in nobody else's way.
constexpr std::size_t kMaxLook = 16;

}  // namespace

/// It is granted when its turn comes.
void Engine::Impl::line_up(const Op& op) {
  if (op.chunks > 1) window_.on_ready(op.chunks, !ready_.empty() || !receives_.empty());
  ready_.emplace_back(op.id, op.key.op.group);
}

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
  const std::uint32_t run = plan_->run_length(op);
  const auto outcome = [&op] { return op.obstacle->slots > 0 ? Grant::kNoSlots : Grant::kNoWindow; };
  if (plan_->is_blocked(op, run)) return outcome();
  const std::uint32_t order = SlotPool::order_for(run);
  const std::uint32_t count = plan_->count(op, run);
  const std::uint32_t remaining = op.chunks - op.next_chunk;
  // One grant for several chunks: it waits until half of what could ever be granted at once is there. With nothing of
  // anybody in flight that is always the case, so waiting ends. A run is long enough for a grant of its own.
  const std::uint32_t half_window = std::max(1u, window_.size(op.chunks) / 2);
  const std::uint32_t half_slots = std::max(1u, pool_.most(0) / op.pushers() / 2);
  const std::uint32_t least = run > 1 ? op.run_at(op.next_chunk, run) : std::min({remaining, half_window, half_slots});
  if (count < least) return outcome();
  for (const std::uint32_t end = op.next_chunk + count; op.next_chunk < end;) {
    const std::uint32_t together = op.run_at(op.next_chunk, run);
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

void Engine::Impl::grant_chunk(Instant now, Op& op, std::uint32_t number, std::uint32_t count, std::uint32_t order) {
  using Role = GrantPlan::Role;
  Chunk& chunk = op.in_flight[number];
  ++grants_;
  chunk.count = count;
  chunk.order = order;
  if (count > 1) ++stats_.runs;
  chunk.granted = now;
  chunk.source = op.source_of(number);
  const std::uint32_t bytes = op.run_bytes(number, count);
  chunk.inputs.resize(chunk.source == kNone ? op.pushers() : 1);
  std::uint32_t place = 0;  // Among those who are in.
  const bool is_held = op.is_held_by_all(number);
  for (std::uint32_t k = 0; k < op.owners.size() && !is_held; ++k) {
    if (!op.sums(k)) continue;
    const std::uint32_t input = chunk.source == kNone ? place++ : 0;
    const std::uint32_t index = op.owner_of(k, number);
    Participant& owner = op.participants[index];
    const Role role = plan_->role_of(k, owner, number, chunk.source);
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

void Engine::Impl::give_slot(Op& op, std::uint32_t index, std::uint32_t number, std::uint32_t input,
                             std::uint32_t bytes) {
  const Chunk& chunk = op.in_flight.at(number);
  Input& place = op.in_flight.at(number).inputs[input];
  place.is_loan = plan_->lends(op, op.participants[index], bytes);
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
  PostReceiveAction action{Tag{from.push_tag + receive.chunk}, memory, Token{token}, std::nullopt, from.peer};
  action.is_loan = input.is_loan;
  action.is_apart = from.is_apart && !memory.empty();
  actions_.emplace_back(std::move(action));
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

}  // namespace herring::server
