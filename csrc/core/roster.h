#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace herring {

/// Whose contributions are in an operation with backup workers (docs/adr/0007-backup-workers.md): contributor c is bit
/// c % 64 of word c / 64. Empty where nobody is left out.
using Roster = std::vector<std::uint64_t>;

inline constexpr std::uint32_t kRosterBits = 64;  ///< Contributors of one word.

inline constexpr std::uint32_t roster_words(std::uint32_t contributors) {
  return contributors / kRosterBits + (contributors % kRosterBits != 0 ? 1 : 0);
}

inline bool is_in(const Roster& roster, std::uint32_t contributor) {
  const std::size_t word = contributor / kRosterBits;
  return word < roster.size() && (roster[word] >> (contributor % kRosterBits) & 1u) != 0;
}

inline void add_to(Roster& roster, std::uint32_t contributor) {
  roster[contributor / kRosterBits] |= std::uint64_t{1} << (contributor % kRosterBits);
}

/// The contributors, in order.
inline std::vector<std::uint32_t> members_of(const Roster& roster) {
  std::vector<std::uint32_t> members;
  for (std::uint32_t c = 0; c < roster.size() * kRosterBits; ++c) {
    if (is_in(roster, c)) members.push_back(c);
  }
  return members;
}

/// How many they are.
inline std::uint32_t count_of(const Roster& roster) {
  std::uint32_t count = 0;
  for (const std::uint64_t word : roster) count += static_cast<std::uint32_t>(std::popcount(word));
  return count;
}

/// Whether it names somebody, and only contributors that there are.
inline bool is_sane(const Roster& roster, std::uint32_t contributors) {
  if (roster.size() != roster_words(contributors)) return false;
  const std::uint32_t used = contributors % kRosterBits;
  return count_of(roster) > 0 && (used == 0 || roster.back() >> used == 0);
}

}  // namespace herring
