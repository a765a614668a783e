#include "elastic/reports.h"

#include <algorithm>
#include <utility>

namespace herring::elastic {
namespace {

constexpr Duration kReportPause = std::chrono::milliseconds(50);

}  // namespace

/// A word to everybody takes 5 to 10 us for each: no more than a tenth of the time goes into it, so that large jobs
/// hear of several operations at once. Nobody waits for it: only the journals are longer.
Duration settled_pause(std::uint32_t workers) { return std::chrono::microseconds(100) * workers; }

Duration report_pause(std::uint32_t workers) { return std::max(kReportPause, settled_pause(workers)); }

Instant Reports::due(std::uint32_t workers) const {
  return waiting_.empty() ? Instant::max() : told_ + report_pause(workers);
}

std::vector<OperationId> Reports::take(Instant now) {
  if (!waiting_.empty()) told_ = now;
  return std::exchange(waiting_, {});
}

}  // namespace herring::elastic
