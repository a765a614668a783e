#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "memory/domain.h"

/// What Runtime::allocate() gives out, known to the network cards where they want that.
namespace herring::runtime {

/// Pages of this process; null where there are none. Where a card does not take it, it is memory like any other: the
/// operation that needs it says why.
std::shared_ptr<std::byte> allocate_private(memory::Domain& domain, std::size_t bytes);

/// The arena says when it takes the pages back (NeighborhoodOptions::on_discard).
std::shared_ptr<std::byte> adopt_arena(memory::Domain& domain, std::span<std::byte> memory,
                                       std::shared_ptr<std::byte> owner);

}  // namespace herring::runtime
