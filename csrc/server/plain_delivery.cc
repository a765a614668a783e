#include "server/delivery.h"

namespace herring::server {

Status Engine::Impl::PlainDelivery::check(const wire::Header& header, const wire::Announce&,
                                          std::span<const std::byte>) const {
  const std::uint32_t shard = (header.flags & wire::kFlagRoster) != 0 ? wire::kRosterShard : 0;
  const bool is_plain = (header.flags & (wire::kFlagHeld | wire::kFlagReady)) == 0 && header.shard == shard;
  if (is_plain) return Status::ok();
  return {Code::kProtocol,
          "announce of rank " + std::to_string(header.sender) + ": of a job with failover; here it is off"};
}

void Engine::Impl::PlainDelivery::after_sends(Instant, Op& op) {
  --engine_.undrained_;
  engine_.erase_op(op.id);
}

}  // namespace herring::server
