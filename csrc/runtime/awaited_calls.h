#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/deadlock.h"
#include "runtime/group_table.h"
#include "runtime/operation_order.h"

namespace herring::runtime {

/// Of groups whose calls no thread of the program makes.
using Outlooks = std::map<GroupId, BackgroundCaller::Outlook>;

/// Those of groups that have one.
using BackgroundCallers = std::map<GroupId, std::shared_ptr<const BackgroundCaller>>;
BackgroundCallers background_callers(const GroupTable& groups);
Outlooks ask(const BackgroundCallers& callers);

/// What is waited for, by threads and by who calls by himself. None where something of it has ended, is not known, or
/// is known by a number that its caller chose; and where something will be called whoever waits.
std::optional<WaitingReport> report_waiting(const std::vector<Awaited>& awaited, const Outlooks& outlooks,
                                            const OperationOrder& order, const GroupTable& groups);

/// A bit for each call of the list that this rank, which is in its group, has not made, and does not make by itself.
std::uint64_t calls_not_called(const DeadlockList& list, const Outlooks& outlooks, const GroupTable& groups);

}  // namespace herring::runtime
