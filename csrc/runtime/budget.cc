#include "runtime/budget.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <numeric>
#include <span>

#include "core/roster.h"
#include "core/status.h"
#include "core/text.h"
#include "runtime/checked_endpoint.h"
#include "transport/limits.h"
#include "wire/header.h"

namespace herring::runtime {
namespace {

// Slots and announce buffers grow with the number of workers; past these totals each worker gets fewer instead, and
// smaller ones: a lane keeps receives for kFullAnnounces of each worker, announces and the rest.
constexpr std::uint64_t kMaxSlotBytes = 256u << 20;
constexpr std::uint64_t kMaxAnnounceBytes = 128u << 20;
constexpr std::uint64_t kFullAnnounceBytes = 64u << 20;
constexpr std::uint32_t kFullAnnounces = 64;
constexpr std::uint32_t kLeastEagerBytes = 16 << 10;
// Records of operations, of all lanes of a server.
constexpr std::uint64_t kRecordBytes = 1u << 30;
// Text of an Error or Cancel that still fits next to an announce.
constexpr std::uint64_t kMinBodyBytes = 2048;
constexpr std::uint32_t kMaxCredits = 32;
// Messages of one worker that take no credit (cancels, receipts) and may wait at the same moment. Beyond it they wait
// in the provider until one of the receives is posted again, so with fewer nothing stops.
constexpr std::uint32_t kUncredited = 24;
// Of Moved messages: one comes for each lane that is lost. If more are lost at the same moment, these wait likewise. A
// receive has room for an announce with its data, so one for each lane of a large job would be most of a lane's memory.
constexpr std::size_t kMostMoved = 16;
// What a lane sends to a worker beside its grants: credits, errors, what is settled.
constexpr std::uint32_t kFromLane = 8;
constexpr std::uint32_t kFromLanes = 64;  // And in all, where there are few lanes.
// Between two workers: at least so many credits, and what takes none.
constexpr std::uint32_t kLeastMessageCredits = 4;
constexpr std::uint32_t kUncreditedMessages = 2;
constexpr std::uint64_t kMessageData = 1024;  // Chunks of large messages that come in at once.

std::uint32_t share(std::uint64_t total, std::uint64_t unit, std::uint32_t workers, std::uint32_t low,
                    std::uint32_t high) {
  const std::uint64_t each = total / (unit * std::max(workers, 1u));
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(each, low, high));
}

/// Something that is taken less of, down to `least`.
struct Step {
  std::uint32_t* value;
  std::uint32_t least;
};

/// Takes the steps in turn, each no further than needed. False where it does not fit after all of them.
bool shrink(std::span<const Step> steps, const std::function<bool()>& fits) {
  for (const Step& step : steps) {
    while (!fits() && *step.value > step.least) --*step.value;
  }
  return fits();
}

std::uint64_t sum(const std::vector<std::uint32_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::uint64_t{0});
}

class Planner {
 public:
  explicit Planner(const BudgetInput& input) : input_(input) {
    limit_ = input.operations != 0 ? input.operations : transport::kMaxOperations;
    sends_ = std::min<std::uint64_t>(transport::kMaxSends, limit_ / 8);
    reports_ = reports_of(input.workers);
  }

  Budget run() {
    ask();
    if (!input_.lane_windows.empty()) {
      fit_lane();
      fit_worker();
      fit_messages();
    }
    count_bytes();
    count_descriptors();
    return budget_;
  }

 private:
  /// What each member gets where there is room.
  void ask() {
    const std::uint32_t eager = std::bit_floor(share(kFullAnnounceBytes, kFullAnnounces, input_.workers, 1, ~0u));
    budget_.eager_bytes = std::min(input_.eager_bytes, std::max(eager, kLeastEagerBytes));
    const std::uint64_t words = input_.backup_workers > 0 ? roster_words(input_.workers) : 0;
    budget_.body_bytes = std::max<std::uint64_t>(
        budget_.eager_bytes + wire::kAnnounceBytes + words * sizeof(std::uint64_t), kMinBodyBytes);
    budget_.announce_credits =
        share(kMaxAnnounceBytes, budget_.eager_bytes + kMinBodyBytes, input_.workers, 4, kMaxCredits);
    budget_.uncredited = kUncredited;
    budget_.from_lane = kFromLane;
    for (const std::uint32_t window : input_.lane_windows) {
      budget_.lane_windows.push_back(
          share(kMaxSlotBytes, std::max(input_.chunk_bytes, 1u), pushers(), 1, std::max(window, 1u)));
    }
    most_ = budget_.lane_windows.empty() ? 1 : *std::ranges::max_element(budget_.lane_windows);
    if (input_.failover) {
      budget_.ready = most_;
      budget_.moved = static_cast<std::uint32_t>(std::min<std::size_t>(budget_.lane_windows.size(), kMostMoved));
    }
    budget_.eager_window = std::max(budget_.announce_credits / 2, 1u);
  }

  void fit_lane() {
    EndpointBudget& lane = budget_.lane;
    const std::uint64_t workers = input_.workers;
    // With checksums a result keeps its slot until all have confirmed it: two more windows of them.
    const auto fits = [&] {
      lane = {workers * budget_.control_messages(), slots(most_), reports_, sends_};
      return lane.total() <= limit_;
    };
    // First what only matters when much fails at once, then what keeps more in flight.
    const std::array<Step, 9> steps = {{{&budget_.moved, 4},
                                        {&budget_.uncredited, 8},
                                        {&budget_.ready, 2},
                                        {&budget_.announce_credits, 8},
                                        {&most_, 2},
                                        {&budget_.moved, 1},
                                        {&budget_.uncredited, 2},
                                        {&budget_.announce_credits, 2},
                                        {&budget_.ready, 1}}};
    bool is_enough = shrink(steps, fits);
    if (!is_enough) {
      most_ = 1;
      is_enough = fits();
    }
    if (!is_enough) refuse_workers();
    for (std::uint32_t& window : budget_.lane_windows) window = std::min(window, most_);
    budget_.eager_window = std::max(budget_.announce_credits / 2, 1u);
  }

  void fit_worker() {
    const std::uint64_t lanes = budget_.lane_windows.size();
    const auto fits = [&] {
      for (std::uint32_t& window : budget_.lane_windows) window = std::min(window, most_);
      const std::uint64_t windows = sum(budget_.lane_windows);
      // Two windows: while one's chunks are summed and come back the next one's are pushed.
      budget_.worker = {kFromLanes + windows + lanes * budget_.from_lane, 2 * windows + lanes * budget_.eager_window,
                        reports_of(lanes), sends_};
      return budget_.worker.total() <= limit_;
    };
    const std::array<Step, 5> steps = {{{&budget_.from_lane, 4},
                                        {&budget_.eager_window, 4},
                                        {&most_, 1},
                                        {&budget_.eager_window, 1},
                                        {&budget_.from_lane, 2}}};
    if (!shrink(steps, fits)) refuse_lanes();
  }

  void fit_messages() {
    budget_.messages = {std::uint64_t{input_.workers} * (kLeastMessageCredits + kUncreditedMessages),
                        std::min(kMessageData, limit_ / 8), reports_, sends_};
    if (budget_.messages.total() > limit_) refuse_workers();
  }

  /// Workers whose chunks come to a lane at the same time, where all are in the operation.
  std::uint32_t pushers() const { return (input_.workers - 1) / input_.rails + 1; }
  /// One for each worker at least, and for two operations, so that one that waits for its data holds up no other.
  std::uint64_t slots(std::uint32_t window) const {
    const std::uint32_t pushing = std::min(2 * pushers(), input_.workers);
    const std::uint64_t windows = std::uint64_t{pushing} + (input_.checksum ? 2 : 0);
    return std::max<std::uint64_t>(windows * window, input_.workers);
  }
  std::uint64_t reports_of(std::uint64_t peers) const {
    return input_.checksum ? std::min<std::uint64_t>(2 * peers, CheckedEndpoint::kMaxReportReceives) : 0;
  }

  std::string job_text() const {
    return counted(input_.workers, "worker") + " on " + counted(input_.hosts, "host") + " with " +
           counted(input_.lane_windows.size(), "server lane");
  }

  [[noreturn]] void refuse(const std::string& why, const std::string& remedy) const {
    throw Error(Code::kInvalidArgument, "this job is too large: " + job_text() + ". " + why + " " + remedy);
  }

  [[noreturn]] void refuse_workers() const {
    const std::uint64_t room = limit_ - sends_ - reports_;
    const std::uint64_t each = std::max(budget_.control_messages() + 1, kLeastMessageCredits + kUncreditedMessages);
    const std::uint64_t most = (room - (input_.checksum ? 2 : 0) - std::min(kMessageData, limit_ / 8)) / each;
    std::string what = std::to_string(budget_.announce_credits) + " announces, " + std::to_string(budget_.uncredited) +
                       " other messages, 1 chunk";
    if (input_.failover) what += ", 2 messages of failover";
    refuse("A network endpoint keeps " + std::to_string(room) + " receives posted, and each worker needs at least " +
               std::to_string(each) + " on every server lane (" + what + ").",
           "Start at most about " + std::to_string(most) + " workers in one job" +
               (input_.failover ? ", or set HERRING_FAILOVER=off, which needs 2 less for each" : "") + ".");
  }

  [[noreturn]] void refuse_lanes() const {
    const std::uint64_t lanes = input_.lane_windows.size();
    const std::uint64_t room = limit_ - sends_ - reports_of(lanes) - kFromLanes;
    const std::uint64_t each = 3 + budget_.eager_window + budget_.from_lane;
    refuse("A worker's network endpoint keeps " + std::to_string(room) + " receives posted, and needs at least " +
               std::to_string(each) + " for each server lane.",
           "Use at most " + std::to_string(room / each) + " lanes: lower HERRING_LANES (now " +
               std::to_string(input_.lanes_of_server) + "), or start fewer servers.");
  }

  void count_bytes() {
    budget_.record_bytes = kRecordBytes / std::max(input_.lanes_of_server, 1u);
    const std::uint64_t checked = input_.checksum ? CheckedEndpoint::kPostBytes : 0;
    const std::uint64_t kept = input_.backup_workers > 0 ? input_.backup_bytes : 0;
    for (const std::uint32_t window : budget_.lane_windows) {
      // Cancels that wait for the announce that they overtook: one for each announce on its way.
      const std::uint64_t held = budget_.announce_credits * (wire::kHeaderBytes + kMinBodyBytes / 2);
      const std::uint64_t each =
          held + std::uint64_t{window} * checked +
          (budget_.control_messages() + budget_.eager_window) * (budget_.body_bytes + wire::kHeaderBytes + checked);
      budget_.lane_slots.push_back(slots(window));
      budget_.lane_bytes.push_back(slots(window) * input_.chunk_bytes + kept + input_.workers * each);
    }
  }

  void count_descriptors() {
    const std::uint64_t lanes = input_.lane_windows.size();
    // Two that connect to each other at the same moment have two connections for a while.
    budget_.worker_descriptors = lanes > 0 ? 2 * (lanes + input_.workers) : 0;
    budget_.server_descriptors = lanes > 0 ? 2 * std::uint64_t{input_.lanes_of_server} * input_.workers : 0;
  }

  const BudgetInput& input_;
  std::uint64_t limit_ = 0;
  std::uint64_t sends_ = 0;
  std::uint64_t reports_ = 0;
  std::uint32_t most_ = 1;  // The largest window.
  Budget budget_;
};

}  // namespace

std::uint32_t most_message_credits(std::uint32_t workers) {
  const std::uint64_t room =
      transport::kMaxOperations - transport::kMaxSends - kMessageData - CheckedEndpoint::kMaxReportReceives;
  const std::uint64_t each = room / std::max(workers, 1u);
  return static_cast<std::uint32_t>(std::max<std::uint64_t>(each, kLeastMessageCredits + kUncreditedMessages) -
                                    kUncreditedMessages);
}

Budget make_budget(const BudgetInput& input) { return Planner(input).run(); }

}  // namespace herring::runtime
