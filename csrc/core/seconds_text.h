#pragma once

#include <cstdio>
#include <string>

#include "core/types.h"

namespace herring {

/// "3 s", "0.25 s", "1800 s": a time-out for people. What was measured down from it by the way here (2.99998) is the
/// round number that the caller gave.
inline std::string round_seconds_text(Duration duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  char text[32];
  std::snprintf(text, sizeof(text), seconds < 100 ? "%.3g s" : "%.0f s", seconds);
  return text;
}

}  // namespace herring
