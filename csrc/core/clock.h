#pragma once

#include <chrono>

#include "core/types.h"

namespace herring {

/// `now` plus some seconds, held to what an Instant can hold: huge and infinite spans give Instant::max() ("no
/// deadline"), negative ones and NaN give `now`. Pure; for engines.
inline Instant deadline_after(Instant now, double seconds) noexcept {
  if (!(seconds > 0)) return now;
  const double left = std::chrono::duration<double>(Instant::max() - now).count();
  // Not at the very end: near it a double cannot tell apart what fits and what does not.
  if (seconds >= left * 0.999) return Instant::max();
  return now + std::chrono::duration_cast<Instant::duration>(std::chrono::duration<double>(seconds));
}

/// The same for a span that is not negative.
inline Instant deadline_after(Instant now, Duration span) noexcept {
  return span > Instant::max() - now ? Instant::max() : now + span;
}

/// From the clock's now; for those who own a thread.
inline Instant deadline_after(double seconds) noexcept {
  return deadline_after(std::chrono::steady_clock::now(), seconds);
}

/// Seconds as a Duration, held to what is used of one: 1e9 s (30 years) at most, and nothing for negative ones and NaN.
inline Duration duration_of(double seconds) noexcept {
  if (!(seconds > 0)) return Duration::zero();
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds < 1e9 ? seconds : 1e9));
}

}  // namespace herring
