#pragma once

#include "core/types.h"

namespace herring::runtime {

/// Whether something has been past its deadline for too long, as the loop that looks at it saw: while that loop does
/// not run (its process was stopped), nothing gets later.
class Overdue final {
 public:
  explicit Overdue(Instant deadline = Instant::max()) : deadline_(deadline) {}
  /// True where look() has been called for longer than `patience` with a time past the deadline.
  bool look(Instant now, Duration patience) {
    if (now < deadline_) return false;
    if (since_ == Instant::max()) since_ = now;
    return now - since_ > patience;
  }

 private:
  Instant deadline_;
  Instant since_ = Instant::max();
};

}  // namespace herring::runtime
