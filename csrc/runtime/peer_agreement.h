#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "runtime/communicator.h"

namespace herring::runtime {

using PeerNumbers = std::array<std::int64_t, 8>;

/// The ranks of a group (world ranks; `rank` is this one) say how something went that each did for itself, and hear
/// what the first of them says. Blocks. Throws Error on all where it went wrong on one: its own there, and elsewhere
/// kUnavailable with `what` that rank cannot do, for people.
PeerNumbers agree(Communicator& communicator, GroupId group, const std::vector<std::uint32_t>& ranks,
                  std::uint32_t rank, Duration timeout, const Status& own, const char* what, const PeerNumbers& said);

class Records;
/// Ok where all ranks (world ranks, in order) said the same of operation `number`; else who said what.
Status compare(const Records& said, const std::vector<std::uint32_t>& ranks, std::uint32_t number, GroupId group);

}  // namespace herring::runtime
