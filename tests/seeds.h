#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace herring::testing {

/// Which schedules a seeded test plays: seeds first, first + 1, ...
struct SeedRange {
  std::uint64_t first = 1;
  std::uint64_t count = 0;
};

/// HERRING_TEST_SEED=n plays that seed alone; HERRING_TEST_SCHEDULES=n changes how many there are, and
/// HERRING_TEST_FIRST=n with which they begin (benchmarks/sim.py). HERRING_TEST_MOST_SCHEDULES=n: no more than that
/// (sanitizers).
inline SeedRange seeds(std::uint64_t count, std::uint64_t first = 1) {
  const auto number = [](const char* name, std::uint64_t otherwise) -> std::uint64_t {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
  };
  if (std::getenv("HERRING_TEST_SEED") != nullptr) return {number("HERRING_TEST_SEED", 1), 1};
  const std::uint64_t most = std::min(count, number("HERRING_TEST_MOST_SCHEDULES", count));
  return {number("HERRING_TEST_FIRST", first), number("HERRING_TEST_SCHEDULES", most)};
}

}  // namespace herring::testing
