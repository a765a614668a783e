#pragma once

#include <cstdint>
#include <vector>

/// What a job asks of each of its processes, computed before anything is opened: a pure function of numbers that all
/// processes have alike, so that all of them scale down alike, or refuse alike.
namespace herring::runtime {

struct BudgetInput {
  std::uint32_t workers = 1;
  std::uint32_t hosts = 1;
  std::vector<std::uint32_t> lane_windows;  ///< By lane: chunks of one worker that may be in flight to it.
  std::uint32_t lanes_of_server = 1;        ///< Config::lanes
  std::uint32_t rails = 1;        ///< Placement::rails: so many workers of a host share what it has for one lane.
  std::uint32_t chunk_bytes = 0;  ///< Of this job.
  std::uint32_t eager_bytes = 0;
  bool failover = false;
  bool checksum = false;
  std::uint32_t backup_workers = 0;
  std::uint64_t backup_bytes = 0;
  std::uint64_t operations = 0;  ///< Posts that an endpoint holds; 0: as the transports do (transport/limits.h).
};

/// Posts of one endpoint at the same moment, at most.
struct EndpointBudget {
  std::uint64_t control = 0;  ///< Receives that are kept posted for control messages.
  std::uint64_t data = 0;     ///< Receives of chunks and results.
  std::uint64_t reports = 0;  ///< Receives that checksums take.
  std::uint64_t sends = 0;    ///< Set aside for sends.

  std::size_t receives() const { return control + data + reports; }
  std::uint64_t total() const { return receives() + sends; }
};

/// What workers and lanes of the job work with; fewer than was asked for where that would not fit.
struct Budget {
  // Of one worker with one lane.
  std::uint32_t announce_credits = 0;  ///< Announces that are not credited back.
  std::uint32_t eager_window = 0;      ///< Unfinished eager announces.
  std::uint32_t uncredited = 0;        ///< Control messages that take no credit and have a receive all the same.
  std::uint32_t ready = 0;             ///< With failover: Ready messages, one for each grant,
  std::uint32_t moved = 0;             ///< and Moved ones, of so many lanes that are lost at the same moment.
  std::uint32_t from_lane = 0;         ///< The lane's messages to the worker, beside its grants.

  std::uint32_t eager_bytes = 0;            ///< Largest shard that travels inside its announce.
  std::vector<std::uint32_t> lane_windows;  ///< By lane.
  std::vector<std::uint64_t> lane_slots;    ///< By lane: chunks that it has memory for.
  std::uint64_t body_bytes = 0;             ///< Of the largest control message to a lane.
  EndpointBudget lane;                      ///< Of the lane with the largest window.
  EndpointBudget worker;
  EndpointBudget messages;                ///< Of a worker's endpoint for point-to-point messages.
  std::vector<std::uint64_t> lane_bytes;  ///< By lane: all that workers can make it use (docs/architecture.md, Memory).
  std::uint64_t record_bytes = 0;         ///< Of each lane: server::EngineConfig, same name.
  std::uint64_t worker_descriptors = 0;   ///< Sockets, where each connection is one: of a worker without lanes,
  std::uint64_t server_descriptors = 0;   ///< and of the lanes of one server.

  /// Control receives of a lane for one worker.
  std::uint32_t control_messages() const { return announce_credits + uncredited + ready + moved; }
};

/// Point-to-point control messages of one worker to another that one endpoint has receives for, without those that take
/// no credit; at least 4.
std::uint32_t most_message_credits(std::uint32_t workers);

/// Throws Error(kInvalidArgument) where the job does not fit however little each of its members gets; the text says
/// which numbers lead to it, and what to change.
Budget make_budget(const BudgetInput& input);

}  // namespace herring::runtime
