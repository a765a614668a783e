#pragma once

#include <optional>

#include "core/types.h"
#include "intra_node/neighborhood.h"
#include "runtime/core_balance.h"
#include "runtime/core_share.h"

namespace herring::runtime {

/// A thread that polls lets others have its core: whom it waits for may be on this very core. Used by one thread at a
/// time.
class PoliteWait final {
 public:
  /// `neighborhood`: the ranks of this host; null where there are no others.
  PoliteWait(CoreShare& share, intra_node::Neighborhood* neighborhood);

  /// False where the core should not be left: this thread would be long in coming back.
  bool yield(Instant now);
  /// This host has more ranks than cores.
  bool shares_cores() const { return shares_cores_; }

 private:
  CoreShare& share_;
  std::optional<CoreBalance> balance_;  // Where other ranks are on this host.
  bool shares_cores_ = false;
};

}  // namespace herring::runtime
