#include "runtime/reduction_lanes.h"

#include <utility>

namespace herring::runtime {

void ReductionLanes::add(HostReduction::Step step, const staging::Piece& piece, const OpDescriptor& descriptor,
                         DeviceSpan tensor) {
  lanes_[HostReduction::lane(step)].push_back({step, piece, descriptor, tensor});
}

std::vector<ReductionLanes::Taken> ReductionLanes::go_on(HostReduction& reduction) {
  std::vector<Taken> taken;
  for (std::deque<Waiting>& lane : lanes_) {
    while (!lane.empty()) {
      Waiting& first = lane.front();
      const bool had_begun = first.has_begun;
      const Status status = first.has_begun ? reduction.poll(first.step, first.piece, first.tensor)
                                            : reduction.begin(first.step, first.piece, first.descriptor, first.tensor);
      first.has_begun = true;
      if (status.is_again()) break;
      // Why is for health() to say, or for who watches over the ranks.
      if (!status.is_ok() && had_begun && reduction.waits_on_device()) break;
      taken.push_back({first.step, first.piece, status});
      lane.pop_front();
    }
  }
  return taken;
}

std::vector<ReductionLanes::Taken> ReductionLanes::give_up(const Status& why) {
  std::vector<Taken> taken;
  for (std::deque<Waiting>& lane : lanes_) {
    for (const Waiting& each : std::exchange(lane, {})) {
      taken.push_back({each.step, each.piece, each.has_begun ? Status::ok() : why});
    }
  }
  return taken;
}

}  // namespace herring::runtime
