#include "runtime/validate.h"

#include <algorithm>
#include <string>

#include "core/memory.h"
#include "runtime/memory_in_use.h"

namespace herring::runtime {
namespace {

Status bad(const Request& request, const std::string& what) {
  return Status(Code::kInvalidArgument, to_string(request.descriptor) + ": " + what);
}

constexpr const char* kOverlap = "the input and the output overlap; use separate memory, or the same memory for both";

/// Results would be written to what is still to be read. Where the input lies `offset` into the output it is in place.
bool overlaps_elsewhere(const Request& request, std::size_t offset) {
  return overlap(request.input, request.output) && request.input.data() != request.output.data() + offset;
}

}  // namespace

Status validate(const Request& request, const GroupRoute& route) {
  const OpDescriptor& descriptor = request.descriptor;
  const std::size_t element = element_bytes(descriptor.dtype);
  if (element == 0) return bad(request, "unknown element type");
  if (descriptor.dims > kMaxDims) return bad(request, "more than 8 dimensions; flatten the array first");
  if (request.output.size() % element != 0) {
    return bad(request, std::to_string(request.output.size()) + " bytes are no whole number of elements");
  }
  if (request.timeout && *request.timeout <= Duration::zero()) return bad(request, "the timeout must be above zero");
  const bool may_lack_some = reduces(descriptor.collective) &&
                             (descriptor.reduce == ReduceOp::kSum || descriptor.reduce == ReduceOp::kAverage);
  if (request.has_backup && !may_lack_some) return bad(request, "only sums and averages can have backup workers");
  const bool takes_late = descriptor.collective == Collective::kAllReduce && !request.has_backup &&
                          route.path != GroupRoute::Path::kAlone && request.input.data() == request.output.data();
  if (request.late && !takes_late) return bad(request, "late memory is for all-reduces in place of several ranks");
  if (request.device_memory && (descriptor.collective != Collective::kAllReduce || request.has_backup || request.late ||
                                route.path != GroupRoute::Path::kNetwork)) {
    return bad(request, "memory of a device is for all-reduces of ranks that all talk to the servers themselves");
  }
  switch (descriptor.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:  // The root is for the caller to check: in an elastic job that rank may be gone.
    case Collective::kReduceScatter:
      if (request.input.size() != request.output.size()) return bad(request, "input and output differ in size");
      if (overlaps_elsewhere(request, 0)) return bad(request, kOverlap);
      return server::check({descriptor.dtype, descriptor.reduce, 1});
    case Collective::kBroadcast:
      if (descriptor.root >= route.ranks.size()) {
        return bad(request, "root " + std::to_string(descriptor.root) + " is not in the group, which has ranks 0 to " +
                                std::to_string(route.ranks.size() - 1));
      }
      if (descriptor.root == route.index && request.input.size() != request.output.size()) {
        return bad(request, "input and output differ in size");
      }
      if (descriptor.root == route.index && overlaps_elsewhere(request, 0)) return bad(request, kOverlap);
      return Status::ok();
    case Collective::kAllGather:
      if (request.input.size() * route.ranks.size() != request.output.size()) {
        return bad(request, "the output has " + std::to_string(request.output.size()) + " bytes, but the input has " +
                                std::to_string(request.input.size()) + " on each of " +
                                std::to_string(route.ranks.size()) + " ranks");
      }
      if (overlaps_elsewhere(request, route.index * request.input.size())) return bad(request, kOverlap);
      return Status::ok();
    case Collective::kBarrier:
      return request.output.empty() ? Status::ok() : bad(request, "a barrier takes no data");
    case Collective::kGather:
    case Collective::kScatter:
    case Collective::kAllToAll:
    case Collective::kUnevenAllGather:
      return bad(request, "is made of messages");
  }
  return bad(request, "unknown operation");
}

std::uint64_t effective_arena_bytes(const Config& config) {
  return std::max<std::uint64_t>(resolve_arena_bytes(config), config.arena_bytes != 0 ? 0 : 64u << 20);
}

server::Isa reduction_isa(const Config& config) {
  const server::Isa best = server::best_isa();
  if (config.simd == "auto") return best;
  for (const server::Isa isa : {server::Isa::kScalar, server::Isa::kNeon, server::Isa::kAvx2, server::Isa::kAvx512}) {
    if (server::name(isa) == config.simd && server::is_available(isa)) return isa;
  }
  throw Error(Code::kUnavailable, "HERRING_SIMD=" + config.simd + ": this processor does not have it (its best is " +
                                      std::string(server::name(best)) + ")");
}

}  // namespace herring::runtime
