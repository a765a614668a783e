#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/deadlock.h"
#include "runtime/group_table.h"
#include "runtime/operation_order.h"

namespace herring::runtime {

/// What these works are for. None where one has ended, or is known by a number that its caller chose.
std::optional<WaitingReport> report_waiting(const std::vector<const Work*>& works, const OperationOrder& order,
                                            const GroupTable& groups);

/// A bit for each call of the list that this rank, which is in its group, has not made.
std::uint64_t calls_not_called(const DeadlockList& list, const GroupTable& groups);

}  // namespace herring::runtime
