#include "runtime/local_writes.h"

#include "core/copy.h"

namespace herring::runtime {

void LocalWrites::copy(const intra_node::CopyAction& action) {
  if (!action.for_others) return copy_bytes(action.from, action.to, action.bypass_cache);
  for_others(action.to.size(), [&](bool streams) { copy_bytes(action.from, action.to, streams); });
}

void LocalWrites::reduce(intra_node::ReduceLocal& action) {
  if (!action.last_for_others || !choice_.streams() || action.outputs.back().size() < StoreChoice::kLeastBytes) {
    return server::reduce(action.spec, action.inputs, action.outputs, isa_);
  }
  const std::span<std::byte> last = action.outputs.back();
  action.outputs.pop_back();
  server::reduce(action.spec, action.inputs, action.outputs, isa_);
  copy_bytes(action.outputs.front(), last, true);
}

}  // namespace herring::runtime
