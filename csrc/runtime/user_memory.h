#pragma once

#include <cstddef>
#include <memory>

#include "intra_node/neighborhood.h"
#include "memory/domain.h"

/// What Runtime::allocate() gives out, known to the network cards where they want that.
namespace herring::runtime {

/// Pages of this process; null where there are none. Where a card does not take it, it is memory like any other: the
/// operation that needs it says why.
std::shared_ptr<std::byte> allocate_private(memory::Domain& domain, std::size_t bytes);

/// Of the host's arena, which says when it takes the pages back (NeighborhoodOptions::on_discard); null where it is
/// full.
std::shared_ptr<std::byte> allocate_in_arena(memory::Domain& domain,
                                             const std::shared_ptr<intra_node::Neighborhood>& arena, std::size_t bytes);

}  // namespace herring::runtime
