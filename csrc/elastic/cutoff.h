#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>

#include "elastic/plan.h"

namespace herring::elastic {

/// Of a planned switch, the same on all workers: which operations still go through the generation before.
class Cutoff final {
 public:
  using Groups = std::map<std::uint32_t, GroupRecord>;

  Cutoff() = default;  ///< None.
  /// Those that any worker had submitted, in groups that this one knows. `submitted`: each worker's groups.
  Cutoff(std::span<const Summary> submitted, const std::function<bool(std::uint32_t group)>& is_known);

  bool covers(const Record& record) const;
  /// This worker has submitted all that it covers. Groups that are not there any more do not count.
  bool is_passed(const Groups& submitted) const;

 private:
  Groups limits_;
};

}  // namespace herring::elastic
