#include "runtime/validate.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "server/reduce.h"

namespace herring::runtime {
namespace {

Status bad(const Request& request, const std::string& what) {
  return Status(Code::kInvalidArgument, to_string(request.descriptor) + ": " + what);
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
  if (request.timeout && *request.timeout <= Duration::zero()) return bad(request, "the time-out must be above zero");
  switch (descriptor.collective) {
    case Collective::kAllReduce:
      if (request.input.size() != request.output.size()) return bad(request, "input and output differ in size");
      return server::check({descriptor.dtype, descriptor.reduce, 1});
    case Collective::kBroadcast:
      if (descriptor.root >= route.ranks.size()) {
        return bad(request, "root " + std::to_string(descriptor.root) + " is not in the group, which has ranks 0 to " +
                                std::to_string(route.ranks.size() - 1));
      }
      if (descriptor.root == route.index && request.input.size() != request.output.size()) {
        return bad(request, "input and output differ in size");
      }
      return Status::ok();
    case Collective::kAllGather:
      if (request.input.size() * route.ranks.size() != request.output.size()) {
        return bad(request, "the output has " + std::to_string(request.output.size()) + " bytes, but the input has " +
                                std::to_string(request.input.size()) + " on each of " +
                                std::to_string(route.ranks.size()) + " ranks");
      }
      return Status::ok();
    case Collective::kBarrier:
      return request.output.empty() ? Status::ok() : bad(request, "a barrier takes no data");
  }
  return bad(request, "unknown operation");
}

std::uint64_t effective_arena_bytes(const Config& config) {
  if (config.arena_bytes != 0) return config.arena_bytes;
  const auto pages = static_cast<std::uint64_t>(std::max(sysconf(_SC_PHYS_PAGES), 1L));
  const auto page_bytes = static_cast<std::uint64_t>(std::max(sysconf(_SC_PAGESIZE), 1L));
  return std::max<std::uint64_t>(pages * page_bytes / 2, 64u << 20);
}

}  // namespace herring::runtime
