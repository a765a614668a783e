#include "server/grant_plan.h"

#include <algorithm>
#include <bit>

#include "server/delivery.h"

namespace herring::server {

/// Not more than leave two messages of each pusher on their way, as to slots and the window, so that one is summed
/// while the next one comes. One by one where somebody posts its receives without regard to runs, where a result may
/// come from a lane that died, or where somebody may be missing.
std::uint32_t Engine::Impl::GrantPlan::run_length(const Op& op) const {
  if (op.any_eager || op.any_held || op.has_one_pusher() || op.may_lack_some() || is_small_one_hop(op)) return 1;
  std::uint32_t run =
      std::bit_floor(std::max(std::min(engine_.run_.size(op.chunks), engine_.window_.size(op.chunks) / 2), 1u));
  while (run > 1 && engine_.pool_.most(SlotPool::order_for(run)) / op.pushers() < 2) run /= 2;
  return run;
}

Engine::Impl::GrantPlan::Role Engine::Impl::GrantPlan::role_of(std::uint32_t contributor, const Participant& owner,
                                                               std::uint32_t chunk, std::uint32_t source) const {
  if (source == kNone || contributor == source) return Role::kPush;
  return engine_.delivery_->has_to_post(owner, chunk) ? Role::kPull : Role::kNothing;
}

std::uint32_t Engine::Impl::GrantPlan::count(Op& op, std::uint32_t run) {
  op.obstacle.reset();
  std::size_t free = engine_.pool_.free(SlotPool::order_for(run));
  std::uint32_t number = op.next_chunk;
  while (number < op.chunks) {
    op.obstacle = obstacle_to(op, number, run, free);
    if (op.obstacle) break;
    number += op.run_at(number, run);
  }
  return number - op.next_chunk;
}

/// To the chunks from `number` on that go in one message, behind those before them. `free`: slots that these leave;
/// what this message takes is taken of them.
std::optional<Obstacle> Engine::Impl::GrantPlan::obstacle_to(const Op& op, std::uint32_t number, std::uint32_t run,
                                                             std::size_t& free) {
  if (op.is_held_by_all(number)) return std::nullopt;
  const std::uint32_t together = op.run_at(number, run);
  const std::uint32_t source = op.source_of(number);
  const std::uint32_t window = engine_.window_.size(op.chunks);
  std::size_t wanted = 0;
  for (std::uint32_t k = 0; k < op.owners.size(); ++k) {
    ++engine_.stats_.looks;
    if (!op.sums(k)) continue;
    const Participant& owner = op.owner(k, number);
    const Role role = role_of(k, owner, number, source);
    if (role == Role::kNothing || (role == Role::kPush && owner.eager)) continue;
    if (role == Role::kPush && !lends(op, owner, op.run_bytes(number, together))) ++wanted;
    // With the chunks before it that this one owns.
    const std::uint32_t room = number - std::max(op.next_chunk, owner.announce.owned_first) + together;
    if (engine_.workers_[owner.peer.value].granted + room > window) {
      return Obstacle{run, window, 0, owner.peer, room, 0};
    }
  }
  if (wanted > free) {
    const std::size_t taken = engine_.pool_.free(SlotPool::order_for(run)) - free;
    return Obstacle{run, window, taken + wanted, {}, 0, engine_.grants_};
  }
  free -= wanted;
  return std::nullopt;
}

/// Where another operation has taken slots since, or the window has another size, it may be another one.
bool Engine::Impl::GrantPlan::is_blocked(const Op& op, std::uint32_t run) const {
  if (!op.obstacle || op.obstacle->run != run) return false;
  const Obstacle& obstacle = *op.obstacle;
  if (obstacle.window != engine_.window_.size(op.chunks)) return false;
  if (obstacle.slots == 0) {
    return engine_.workers_[obstacle.worker.value].granted + obstacle.room > obstacle.window;
  }
  return obstacle.grants == engine_.grants_ && engine_.pool_.free(SlotPool::order_for(run)) < obstacle.slots;
}

/// Only where others push too, so that the sum has a slot to be sent from: whoever lends may use its memory as soon as
/// it has its own result. Small data in one hop is not: it may be on its way to other lanes; of the rest its worker
/// lends what these have.
bool Engine::Impl::GrantPlan::lends(const Op& op, const Participant& participant, std::uint32_t bytes) const {
  const EngineConfig& config = engine_.config_;
  return config.near_worker == participant.peer && bytes >= config.min_loan_bytes && op.pushers() > 1 &&
         !op.may_lack_some() && !is_small_one_hop(op) && engine_.delivery_->may_lend() && !config.check_finite;
}

bool Engine::Impl::GrantPlan::is_small_one_hop(const Op& op) const {
  return op.is_one_hop && op.shape.shard_bytes <= engine_.config_.max_eager_bytes;
}

}  // namespace herring::server
