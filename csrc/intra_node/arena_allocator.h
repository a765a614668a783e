#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

namespace herring::intra_node {

/// Hands out ranges of an arena; knows offsets only, touches no memory. Thread-safe.
///
/// A freed range is *warm*: its pages are there, likely in cache. The next request of its size gets the most recently
/// freed one. When warm ranges exceed `warm_limit_bytes` in all, the oldest go back: `discard(offset, bytes)` is called
/// (to give the pages to the system) and the range is merged with its *clean* neighbours, from which new ranges are cut
/// by best fit.
class ArenaAllocator final {
 public:
  using Discard = std::function<void(std::uint64_t offset, std::uint64_t bytes)>;

  static constexpr std::uint64_t kAlignment = 4096;
  static constexpr std::uint64_t kHugePage = 2 << 20;  ///< Ranges of at least this are aligned to it.

  ArenaAllocator(std::uint64_t arena_bytes, std::uint64_t warm_limit_bytes, Discard discard);

  /// Offset of a range of at least `bytes` (0 counts as 1); nothing where no range is large enough, or less than
  /// `leave_bytes` of the arena would be left.
  std::optional<std::uint64_t> allocate(std::uint64_t bytes, std::uint64_t leave_bytes = 0);
  /// `offset` came from allocate(). False, and nothing happens, where it did not or was freed already.
  bool deallocate(std::uint64_t offset);

  std::uint64_t bytes_in_use() const;  ///< Handed out, rounded to pages.
  std::uint64_t warm_bytes() const;

 private:
  struct Warm {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::multimap<std::uint64_t, std::list<Warm>::iterator>::iterator by_size;
  };
  using WarmList = std::list<Warm>;  ///< Oldest first.

  std::optional<std::uint64_t> take_warm(std::uint64_t bytes);
  std::optional<std::uint64_t> take_clean(std::uint64_t bytes);
  void cool_oldest();
  void insert_clean(std::uint64_t offset, std::uint64_t bytes);
  void erase_clean(std::map<std::uint64_t, std::uint64_t>::iterator extent);

  const std::uint64_t usable_;
  const std::uint64_t warm_limit_;
  const Discard discard_;
  mutable std::mutex mutex_;                                         // guards all below
  std::map<std::uint64_t, std::uint64_t> clean_;                     ///< offset -> bytes; no two touch.
  std::set<std::pair<std::uint64_t, std::uint64_t>> clean_by_size_;  ///< (bytes, offset)
  WarmList warm_;
  std::multimap<std::uint64_t, WarmList::iterator> warm_by_size_;  ///< Equal sizes: in order of freeing.
  std::unordered_map<std::uint64_t, std::uint64_t> live_;          ///< offset -> bytes
  std::uint64_t warm_total_ = 0;
  std::uint64_t live_total_ = 0;
};

}  // namespace herring::intra_node
