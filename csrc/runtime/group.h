#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "runtime/name_uses.h"
#include "runtime/placement.h"
#include "runtime/runtime.h"

namespace herring::runtime {

/// A group as the runtime keeps it; immutable but for what counts operations.
struct Group {
  GroupId id;
  std::uint32_t use = 0;  ///< As UsedGroup's.
  GroupRoute route;
  std::atomic<std::uint64_t> next_op{0};
  struct Left {
    std::uint64_t calls;  ///< So many without a name came before.
    std::string text;     ///< Who, and how.
  };
  std::vector<Left> left;     ///< Written in the progress seat alone, guarded by the runtime for all who read it.
  bool has_own_keys = false;  ///< Its operations are not counted here. Guarded by the runtime.
  bool is_left = false;       ///< The others know that nothing more is called here. Guarded by the runtime.
  Status closed;              ///< Why nothing can be called in it any more. Guarded by the runtime.
  NameUses name_uses;         ///< Guarded by the runtime.
  std::weak_ptr<const BackgroundCaller> caller;  ///< As Communicator::set_background_caller(). Guarded by the runtime.

  /// Who does not take part in a numbered call; null: nobody has left before it.
  const Left* left_before(std::uint64_t op) const {
    const auto found = std::find_if(left.begin(), left.end(), [op](const Left& each) { return op >= each.calls; });
    return found == left.end() ? nullptr : &*found;
  }
};

}  // namespace herring::runtime
