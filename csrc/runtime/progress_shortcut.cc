// Small operations inside a host, done by the thread that calls them: no allocation, no other thread.

#include "core/operation.h"
#include "core/relax.h"
#include "intra_node/shortcut.h"
#include "runtime/progress.h"
#include "runtime/progress_part.h"

namespace herring::runtime {
namespace {

using Channel = intra_node::Neighborhood::Channel;

std::uint32_t divisor(const SmallOperation& operation) {
  const bool averages = operation.descriptor.reduce == ReduceOp::kAverage;
  return averages ? static_cast<std::uint32_t>(operation.route->ranks.size()) : 1;
}

}  // namespace

SmallOperation small_operation(const Request& request, std::uint64_t op, const GroupRoute& route) {
  SmallOperation small{{request.group, op, 0}, request.descriptor, &route, request.input, request.output, Status::ok()};
  small.descriptor.op_bytes = small.descriptor.part_bytes = request.output.size();
  return small;
}

bool Progress::is_small(const SmallOperation& operation) const {
  if (options_.neighborhood == nullptr) return false;
  const Collective collective = operation.descriptor.collective;
  const std::uint64_t one_part = config_.local_part_bytes / kPartAlignment * kPartAlignment;
  const std::uint64_t one_message = intra_node::inline_limit(
      local_inline_bytes(options_.neighborhood->max_message_bytes()), operation.route->local_members.size());
  return operation.route->path == GroupRoute::Path::kLocal &&
         (reduces(collective) || collective == Collective::kBarrier) && (operation.key.op & kNamedKey) == 0 &&
         config_.check_finite == Toggle::kOff && operation.output.size() <= std::min(one_part, one_message);
}

Shortcut Progress::take_shortcut(SmallOperation& operation) {
  std::uint64_t none = 0;
  // Counted, so that a shutdown waits for it; alone, so that what is peeked at below is for nobody else.
  if (!may_take_shortcut() || !pending_.compare_exchange_strong(none, 1)) return Shortcut::kNotTaken;
  Shortcut result = Shortcut::kDone;
  try {
    if (!exchange_small(operation)) result = Shortcut::kAnnounced;
  } catch (const std::exception& problem) {
    break_down(problem);
    operation.status = failure();
  }
  watch_unsent();
  count_ended(1);
  if (has_local_backlog()) seat_->unpark();
  return result;
}

bool Progress::may_take_shortcut() const {
  if (is_broken_ || !local_ || !departed_.empty() || !local_->is_untroubled()) return false;
  return !has_local_backlog() && failure().is_ok();
}

/// False where the engine has to go on.
bool Progress::exchange_small(SmallOperation& operation) {
  constexpr int kRoundsPerYield = 32;
  constexpr int kRoundsPerLook = 16;
  intra_node::Neighborhood& neighborhood = *options_.neighborhood;
  const GroupRoute& route = *operation.route;
  const std::size_t members = route.local_members.size();
  const intra_node::Shortcut shortcut(operation.key, operation.descriptor, route.local_members, divisor(operation));
  const Channel channel = members == neighborhood.size() ? Channel::kAll : Channel::kPair;
  if (channel == Channel::kAll) {
    send_to_all(shortcut.head(), operation.input, shortcut.tail());
  } else {
    for (const std::uint32_t to : route.local_members) {
      if (to != route.local_members[route.local_index]) {
        send_local(to, shortcut.head(), operation.input, shortcut.tail());
      }
    }
    neighborhood.flush();
  }

  small_inputs_.assign(members, {});
  small_inputs_[route.local_index] = operation.input;
  const Instant deadline = std::chrono::steady_clock::now() + spin_.longest();
  std::size_t next = 0;  // Those before it have come.
  for (int round = 1;; ++round) {
    for (; next < members; ++next) {
      if (next == route.local_index) continue;
      std::span<const std::byte> message;
      if (!neighborhood.peek(route.local_members[next], channel, message)) {
        // Where it had no room to send it to all, it comes the other way.
        const bool other =
            channel == Channel::kAll && neighborhood.peek(route.local_members[next], Channel::kPair, message);
        if (other) return false;
        break;
      }
      const auto data = shortcut.data_in(message);
      if (!data) return false;
      small_inputs_[next] = *data;
    }
    if (next == members) break;
    if (round % kRoundsPerLook == 0 && std::chrono::steady_clock::now() >= deadline) return false;
    // From another core it comes sooner than a system call returns; but whom it waits for may be on this very core.
    if (shares_cores_ || round % kRoundsPerYield == 0) {
      if (!yield_core(std::chrono::steady_clock::now())) return false;
    } else {
      relax();
    }
  }
  if (!operation.output.empty()) {
    const ReduceSpec spec{operation.descriptor.dtype, operation.descriptor.reduce, divisor(operation)};
    server::reduce(spec, small_inputs_, std::span(&operation.output, 1), isa_);
  }
  for (std::size_t i = 0; i < members; ++i) {
    if (i != route.local_index) neighborhood.pop(route.local_members[i], channel);
  }
  ++(neighborhood.contains(operation.output) ? zero_copy_shortcuts_ : staged_shortcuts_);
  return true;
}

}  // namespace herring::runtime
