#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <vector>

#include "core/device.h"
#include "core/operation.h"
#include "core/status.h"
#include "runtime/host_reduction.h"
#include "staging/peer_engine.h"

namespace herring::runtime {

/// The steps of a HostReduction: in each of its lanes one after the other, as it takes them.
class ReductionLanes final {
 public:
  struct Taken {
    HostReduction::Step step;
    staging::Piece piece;
    Status status;  ///< Ok: it is on its stream.
  };

  void add(HostReduction::Step step, const staging::Piece& piece, const OpDescriptor& descriptor, DeviceSpan tensor);
  /// As many as it takes now.
  std::vector<Taken> go_on(HostReduction& reduction);
  /// All that are left, after the reduction was aborted. What had begun may be on its stream, and touch the tensor
  /// until that has come so far: it counts as taken.
  std::vector<Taken> give_up(const Status& why);
  bool is_empty() const {
    return std::ranges::all_of(lanes_, [](const auto& lane) { return lane.empty(); });
  }

 private:
  struct Waiting {
    HostReduction::Step step;
    staging::Piece piece;
    OpDescriptor descriptor;
    DeviceSpan tensor;
    bool has_begun = false;
  };
  std::array<std::deque<Waiting>, HostReduction::kLanes> lanes_;
};

}  // namespace herring::runtime
