#include "collectives/placed_memory.h"

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "collectives/bucket_memory.h"
#include "collectives/fusion_engine.h"
#include "core/status.h"

namespace herring::collectives {
namespace {

constexpr std::uint64_t kMostBytes = std::numeric_limits<std::int64_t>::max();

}  // namespace

TensorRow make_row(runtime::Communicator& runtime, std::span<const NamedBytes> tensors) {
  TensorRow row;
  std::unordered_set<std::string_view> names;
  std::uint64_t end = 0;
  for (const NamedBytes& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      throw Error(Code::kInvalidArgument, "'" + tensor.name + "' comes twice; every tensor needs a name of its own");
    }
    row.offsets.push_back(place_after(end, 0));
    if (tensor.bytes > kMostBytes - row.offsets.back() - 64) {
      throw Error(Code::kInvalidArgument, "the tensors up to '" + tensor.name + "' have too many bytes");
    }
    end = row.offsets.back() + tensor.bytes;
  }
  row.bytes = std::max<std::uint64_t>(place_after(end, 0), 64);
  row.memory = allocate(runtime, row.bytes);
  // What lies between tensors travels with them.
  std::uint64_t used = 0;
  for (std::size_t i = 0; i <= tensors.size(); ++i) {
    const std::uint64_t next = i < tensors.size() ? row.offsets[i] : row.bytes;
    std::fill(row.memory.get() + used, row.memory.get() + next, std::byte{0});
    if (i < tensors.size()) used = next + tensors[i].bytes;
  }
  return row;
}

void PlacedMemory::add(std::span<const NamedBytes> tensors, const TensorRow& row) {
  std::erase_if(rows_, [](const Row& each) { return each.memory.expired(); });
  std::erase_if(places_, [](const auto& each) { return each.second.memory.expired(); });
  rows_.push_back({row.memory, row.memory.get(), row.bytes});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Place place{next_number_ + row.offsets[i], {row.memory.get() + row.offsets[i], tensors[i].bytes}};
    places_.insert_or_assign(tensors[i].name, Entry{place, row.memory});
  }
  next_number_ = place_after(next_number_ + row.bytes, 64);
}

const PlacedMemory::Place* PlacedMemory::find(std::string_view name, std::span<const std::byte> bytes) const {
  // Most tensors lie in no row, and rows are few.
  const auto holds = [start = bytes.data()](const Row& row) {
    return start >= row.start && start <= row.start + row.bytes;
  };
  if (std::ranges::none_of(rows_, holds)) return nullptr;
  const auto found = places_.find(name);
  if (found == places_.end() || found->second.memory.expired()) return nullptr;
  const Place& place = found->second.place;
  return place.memory.data() == bytes.data() && place.memory.size() == bytes.size() ? &place : nullptr;
}

std::shared_ptr<std::byte> PlacedMemory::keep(std::byte* start, std::uint64_t bytes) const {
  for (const Row& row : rows_) {
    if (start < row.start || start + bytes > row.start + row.bytes) continue;
    // Another row may have the place of one that has gone.
    if (std::shared_ptr<std::byte> memory = row.memory.lock()) return {std::move(memory), start};
  }
  return nullptr;
}

}  // namespace herring::collectives
