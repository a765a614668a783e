#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

/// How often each name was used in a group. No name can be forgotten while the job lives: another rank may still count
/// it, and the two would wait for each other. So there is a bound, and what a name costs is little.
namespace herring::runtime {

/// The name is new, and there is no room for it.
inline Status no_room_for_name(std::string_view name, std::size_t names) {
  return Status(Code::kInvalidArgument,
                "\"" + std::string(name) + "\": " + std::to_string(names) +
                    " different names were used, and there is no room for more; name a tensor by what it is, not by "
                    "the step, so that its name comes again");
}

class NameUses final {
 public:
  static constexpr std::size_t kMaxNames = std::size_t{3} << 22;   ///< 12.6 million,
  static constexpr std::size_t kMaxBytes = std::size_t{12} << 24;  ///< which take 201 MB.
  /// From here on the program is told that it names what never comes again.
  static constexpr std::size_t kManyNames = 1'000'000;

  /// How often the name (its key, never 0) was used before, and counts this use. Nothing where it is new and there is
  /// no room for it.
  std::optional<std::uint64_t> next(std::uint64_t name, std::size_t max_names = kMaxNames) {
    if (names_.empty()) resize(kLeast);
    std::size_t place = find(name);
    if (names_[place] == 0) {
      if (size_ >= max_names) return std::nullopt;
      if ((size_ + 1) * 4 > names_.size() * 3) {
        resize(names_.size() * 2);
        place = find(name);
      }
      names_[place] = name;
      ++size_;
    }
    return uses_[place]++;
  }

  /// How often the name was used before.
  std::uint64_t count(std::uint64_t name) const {
    if (names_.empty()) return 0;
    const std::size_t place = find(name);
    return names_[place] == 0 ? 0 : uses_[place];
  }

  std::size_t size() const { return size_; }
  std::size_t bytes() const {
    return names_.capacity() * sizeof(std::uint64_t) + uses_.capacity() * sizeof(std::uint32_t);
  }

 private:
  static constexpr std::size_t kLeast = 64;

  /// Where the name is, or the empty place for it: three quarters are taken at most.
  std::size_t find(std::uint64_t name) const {
    const std::size_t mask = names_.size() - 1;
    std::size_t place = (name * 0x9E3779B97F4A7C15ull >> 20) & mask;
    while (names_[place] != 0 && names_[place] != name) place = (place + 1) & mask;
    return place;
  }

  void resize(std::size_t places) {
    std::vector<std::uint64_t> names(places);
    std::vector<std::uint32_t> uses(places);
    names.swap(names_);
    uses.swap(uses_);
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (names[i] == 0) continue;
      const std::size_t place = find(names[i]);
      names_[place] = names[i];
      uses_[place] = uses[i];
    }
  }

  std::vector<std::uint64_t> names_;  // 0: nothing there. Its size is a power of two.
  std::vector<std::uint32_t> uses_;   // After 4 billion uses numbers come again, long after anybody knows them.
  std::size_t size_ = 0;
};

/// What the program is told at the name that makes them kManyNames.
inline std::string many_names(std::string_view name) {
  return std::to_string(NameUses::kManyNames) + " different names were used, the last is \"" + std::string(name) +
         "\"; each takes memory for as long as the job lives, and there is room for " +
         std::to_string(NameUses::kMaxNames) + ": name tensors so that names come again";
}

}  // namespace herring::runtime
