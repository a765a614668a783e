#include "runtime/job_counters.h"

#include <algorithm>

#include "server/engine.h"

namespace herring::runtime {
namespace {

constexpr std::size_t kFields = 3;

void sum_over_workers(Communicator& job, const char* name, std::vector<std::int64_t>& values) {
  Request request;
  request.name = name;
  request.descriptor.dtype = DataType::kInt64;
  request.descriptor.dims = 1;
  request.descriptor.shape[0] = values.size();
  request.output = std::as_writable_bytes(std::span(values));
  request.input = request.output;
  request.is_waited_for = true;
  const std::shared_ptr<Work> work = job.submit(request);
  work->wait(Instant::max());
  work->status().or_throw();
}

}  // namespace

std::vector<Straggler> gather_stragglers(Communicator& job, const RuntimeStats& own) {
  std::vector<std::int64_t> values(job.size() * kFields, 0);
  std::int64_t* const mine = &values[job.rank() * kFields];
  mine[0] = static_cast<std::int64_t>(own.announces);
  mine[1] = static_cast<std::int64_t>(own.late_us);
  mine[2] = static_cast<std::int64_t>(own.came_last);
  sum_over_workers(job, "herring.stragglers", values);
  std::vector<Straggler> all;
  for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
    const std::int64_t* row = &values[rank * kFields];
    const double announces = std::max<double>(static_cast<double>(row[0]), 1);
    all.push_back({rank, static_cast<std::uint64_t>(row[0]), static_cast<double>(row[1]) / announces * 1e-6,
                   static_cast<double>(row[2]) / announces});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Straggler& a, const Straggler& b) { return a.mean_late_s > b.mean_late_s; });
  return all;
}

std::vector<ServerCounters> gather_server_counters(Communicator& job, const Placement& placement,
                                                   const std::vector<PeerTraffic>& own) {
  std::vector<std::int64_t> values(placement.servers * kFields, 0);
  if (values.empty()) return {};
  for (std::size_t lane = 0; lane < own.size(); ++lane) {
    std::int64_t* row = &values[placement.lanes[lane].server * kFields];
    row[0] += static_cast<std::int64_t>(own[lane].bytes_sent);
    row[1] += static_cast<std::int64_t>(own[lane].bytes_received);
    row[2] += static_cast<std::int64_t>(own[lane].messages);
  }
  sum_over_workers(job, "herring.server_counters", values);
  std::vector<ServerCounters> counters;
  for (std::uint32_t server = 0; server < placement.servers; ++server) {
    const std::int64_t* row = &values[server * kFields];
    counters.push_back({server,
                        placement.server_places[server],
                        static_cast<std::uint64_t>(row[0]),
                        static_cast<std::uint64_t>(row[1]),
                        static_cast<std::uint64_t>(row[2]),
                        {},
                        0,
                        0});
  }
  for (const LanePlace& lane : placement.lanes) {
    counters[lane.server].memory_bound_bytes += placement.budget.lane_bytes[lane.peer.value - placement.workers];
    counters[lane.server].record_bound_bytes += server::record_bound(placement.budget.record_bytes);
  }
  return counters;
}

}  // namespace herring::runtime
