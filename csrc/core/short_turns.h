#pragma once

#include <cstdint>

#include "core/types.h"

namespace herring {

/// While it lives, Linux lets the calling thread run for `turn` at a time where others want its core too, and lets it
/// run the sooner: what moves data then does not wait for whole turns of those that compute. Its share of the core
/// stays the same. Linux 6.12 and later, from 0.1 ms on; else, where the system refuses, for threads with another
/// policy than the usual one, and for a `turn` of zero it changes nothing. Ends on the thread that it began on.
class ShortTurns final {
 public:
  explicit ShortTurns(Duration turn);
  ~ShortTurns();
  ShortTurns(const ShortTurns&) = delete;
  ShortTurns& operator=(const ShortTurns&) = delete;

 private:
  std::uint64_t before_ns_ = 0;  // 0: nothing has changed.
};

}  // namespace herring
