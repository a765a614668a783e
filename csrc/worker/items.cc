#include "worker/items.h"

#include <algorithm>
#include <numeric>

#include "fusion_buffer/shard_plan.h"
#include "wire/header.h"

namespace herring::worker {
namespace {

__extension__ using Wide = unsigned __int128;

/// A run of one chunk costs each worker as many messages as a long one.
constexpr std::uint32_t kMinRun = 2;

std::vector<std::uint32_t> heirs(std::size_t lanes, std::span<const std::uint32_t> lost, std::uint64_t seed) {
  std::vector<std::uint32_t> alive;
  for (std::uint32_t lane = 0; lane < lanes; ++lane) {
    if (std::find(lost.begin(), lost.end(), lane) == lost.end()) alive.push_back(lane);
  }
  std::rotate(alive.begin(), alive.begin() + static_cast<std::ptrdiff_t>(seed % alive.size()), alive.end());
  return alive;
}

/// Where each lane's share of `chunks` ends, rounded to the nearest chunk, a half up. Lanes without any weight among
/// them share evenly. In whole numbers: every process has to come to the same, whatever its machine.
std::vector<std::uint32_t> share_ends(std::span<const std::uint32_t> lanes, std::span<const double> weights,
                                      std::uint32_t chunks) {
  std::vector<double> own;
  for (const std::uint32_t lane : lanes) own.push_back(weights[lane]);
  const bool has_weight = std::any_of(own.begin(), own.end(), [](double weight) { return weight > 0; });
  if (!has_weight) own.assign(lanes.size(), 1.0);
  const std::vector<std::uint64_t> parts = whole_weights(own);
  const std::uint64_t total = std::accumulate(parts.begin(), parts.end(), std::uint64_t{0});
  std::vector<std::uint32_t> ends;
  std::uint64_t before = 0;
  for (const std::uint64_t part : parts) {
    before += part;
    ends.push_back(static_cast<std::uint32_t>((2 * Wide{before} * chunks + total) / (2 * Wide{total})));
  }
  return ends;
}

/// Adds the pieces of `item` for these lanes, as many as it has chunks for.
void deal(const Item& item, std::span<const std::uint32_t> lanes, std::span<const double> weights,
          std::uint32_t& next_piece, std::vector<Item>& out) {
  const auto add = [&](std::uint32_t lane, std::uint32_t first, std::uint32_t chunks) {
    out.push_back({item.origin | next_piece++ << 16, item.id, item.origin, lane, first, chunks});
  };
  if (item.chunks == 0) {
    add(lanes.front(), item.first, 0);
    return;
  }
  lanes = lanes.first(std::min<std::size_t>(lanes.size(), std::max(1u, item.chunks / kMinRun)));
  const std::vector<std::uint32_t> ends = share_ends(lanes, weights, item.chunks);
  std::uint32_t start = 0;
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    while (start < ends[i]) {
      const std::uint32_t run = std::min<std::uint32_t>(ends[i] - start, wire::kMaxHeldChunks);
      add(lanes[i], item.first + start, run);
      start += run;
    }
  }
}

}  // namespace

std::vector<Item> make_items(std::uint32_t origin, std::uint32_t chunks, std::span<const std::uint32_t> losses,
                             std::span<const double> weights, std::uint64_t seed) {
  std::vector<Item> items = {{origin, origin, origin, origin, 0, chunks}};
  std::uint32_t next_piece = 1;
  for (std::size_t loss = 0; loss < losses.size(); ++loss) {
    const std::uint32_t lost = losses[loss];
    if (std::none_of(items.begin(), items.end(), [lost](const Item& item) { return item.lane == lost; })) continue;
    const std::vector<std::uint32_t> alive = heirs(weights.size(), losses.first(loss + 1), seed);
    std::vector<Item> next;
    for (const Item& item : items) {
      if (item.lane != lost) next.push_back(item);
    }
    for (const Item& item : items) {
      if (item.lane == lost) deal(item, alive, weights, next_piece, next);
    }
    items = std::move(next);
  }
  return items;
}

}  // namespace herring::worker
