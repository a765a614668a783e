// What records of operations take, and whose they are: docs/architecture.md, "Memory".

#include <algorithm>
#include <string>

#include "server/delivery.h"

namespace herring::server {
namespace {

/// Of an operation, in the tables that find it.
constexpr std::uint64_t kIndexBytes = 4 * kNodeBytes;

}  // namespace

/// `is_first`: whoever comes first pays for the operation's own record, which has a place for each worker of the job.
std::uint64_t Engine::Impl::record_bytes_of(std::uint32_t contributors, bool is_first) const {
  const std::uint64_t mine = sizeof(Participant) + 2 * kNodeBytes;
  if (!is_first) return mine;
  return mine + sizeof(Op) + kIndexBytes + config_.workers * sizeof(std::uint32_t) +
         std::uint64_t{contributors} * sizeof(std::vector<std::uint32_t>);
}

/// Takes the records of a participant into account; whoever comes first pays for the operation's.
void Engine::Impl::charge(Op& op, Participant& participant) {
  const bool is_first = op.participants.empty();
  const std::uint32_t contributors = participant.announce.contributor_count;
  // Another number of contributors than before: a mismatch, whose table grows with the largest.
  const std::uint64_t grows = op.owners.size() < contributors ? contributors - op.owners.size() : 0;
  participant.record_bytes = record_bytes_of(0, is_first) + grows * sizeof(op.owners[0]);
  participant.record_bytes += delivery_->record_bytes(participant.announce);
  add_records(participant.peer, participant.record_bytes);
}

void Engine::Impl::add_records(PeerId peer, std::uint64_t bytes) {
  workers_[peer.value].record_bytes += bytes;
  stats_.record_bytes += bytes;
  stats_.record_peak = std::max(stats_.record_peak, stats_.record_bytes);
}

void Engine::Impl::drop_records(PeerId peer, std::uint64_t bytes) {
  workers_[peer.value].record_bytes -= bytes;
  stats_.record_bytes -= bytes;
}

/// Past the limit each worker has its share still, so that one who floods the lane takes nothing from the others.
bool Engine::Impl::has_room_for_records(PeerId peer, std::uint64_t bytes) {
  if (config_.record_bytes == 0) return true;
  const auto fits = [&] { return stats_.record_bytes + bytes <= config_.record_bytes; };
  const std::uint64_t share = config_.record_bytes / std::max(config_.workers, 1u);
  if (fits() || workers_[peer.value].record_bytes + bytes <= share) return true;
  // Failures are remembered for who comes late; work goes first.
  while (!fits() && forget_oldest_failure()) {
  }
  return fits();
}

Status Engine::Impl::check_records(const wire::Header& header, const wire::Announce& announce,
                                   std::span<const std::byte> body) {
  const PeerId peer{header.sender};
  const std::uint64_t most = record_bytes_of(announce.contributor_count, true) + body.size();
  if (config_.record_bytes == 0 || stats_.record_bytes + most <= config_.record_bytes) return Status::ok();
  const bool is_first = find_live(key_of(header)) == nullptr;
  if (has_room_for_records(peer, record_bytes_of(announce.contributor_count, is_first) + body.size())) {
    return Status::ok();
  }
  const WorkerState& worker = workers_[peer.value];
  return Status(Code::kInvalidArgument, "announce of rank " + std::to_string(peer.value) + ": it has " +
                                            std::to_string(worker.ops) + " operations in flight, whose records take " +
                                            std::to_string(worker.record_bytes >> 20) + " MiB of the " +
                                            std::to_string(config_.record_bytes >> 20) +
                                            " MiB that this server has for all; wait for some before starting more");
}

/// False where there is none of which nothing is in flight any more.
bool Engine::Impl::forget_oldest_failure() {
  const auto oldest = std::find_if(failed_order_.begin(), failed_order_.end(),
                                   [this](std::uint64_t id) { return find_op(id)->drained; });
  if (oldest == failed_order_.end()) return false;
  erase_op(*oldest);
  return true;
}

}  // namespace herring::server
