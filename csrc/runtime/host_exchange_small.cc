// Small operations inside a host, done by the thread that calls them: no allocation, no other thread.

#include <algorithm>
#include <chrono>

#include "core/operation.h"
#include "core/relax.h"
#include "intra_node/shortcut.h"
#include "runtime/host_exchange.h"
#include "runtime/part_size.h"

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

bool HostExchange::is_small(const SmallOperation& operation) const {
  const Collective collective = operation.descriptor.collective;
  const std::uint64_t one_part = options_.config.local_part_bytes / kPartAlignment * kPartAlignment;
  const std::uint64_t one_message = intra_node::inline_limit(
      local_inline_bytes(options_.neighborhood->max_message_bytes()), operation.route->local_members.size());
  return operation.route->path == GroupRoute::Path::kLocal &&
         (reduces(collective) || collective == Collective::kBarrier) && (operation.key.op & kNamedKey) == 0 &&
         options_.config.check_finite == Toggle::kOff && operation.output.size() <= std::min(one_part, one_message);
}

bool HostExchange::exchange(const SmallOperation& operation, PoliteWait& wait, Duration patience) {
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
      if (to != route.local_members[route.local_index]) send(to, shortcut.head(), operation.input, shortcut.tail());
    }
    neighborhood.flush();
  }

  inputs_.assign(members, {});
  inputs_[route.local_index] = operation.input;
  const Instant deadline = std::chrono::steady_clock::now() + patience;
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
      inputs_[next] = *data;
    }
    if (next == members) break;
    if (round % kRoundsPerLook == 0 && std::chrono::steady_clock::now() >= deadline) return false;
    // From another core it comes sooner than a system call returns; but whom it waits for may be on this very core.
    if (wait.shares_cores() || round % kRoundsPerYield == 0) {
      if (!wait.yield(std::chrono::steady_clock::now())) return false;
    } else {
      relax();
    }
  }
  if (!operation.output.empty()) {
    const ReduceSpec spec{operation.descriptor.dtype, operation.descriptor.reduce, divisor(operation)};
    std::span<std::byte> output = operation.output;
    server::reduce(spec, inputs_, std::span(&output, 1), isa_);
  }
  for (std::size_t i = 0; i < members; ++i) {
    if (i != route.local_index) neighborhood.pop(route.local_members[i], channel);
  }
  ++(neighborhood.contains(operation.output) ? zero_copy_exchanges_ : staged_exchanges_);
  return true;
}

}  // namespace herring::runtime
