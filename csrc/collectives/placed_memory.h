#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/communicator.h"

namespace herring::collectives {

struct NamedBytes {
  std::string name;
  std::uint64_t bytes = 0;
};

/// Tensors one after the other, as a bucket has them.
struct TensorRow {
  std::shared_ptr<std::byte> memory;
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> offsets;  ///< Of each tensor.
};

/// Uninitialised memory for these tensors: of the runtime's arena, of the heap where that is full. Throws
/// Error(kInvalidArgument) where a name comes twice, or the sizes overflow; std::bad_alloc.
TensorRow make_row(runtime::Communicator& runtime, std::span<const NamedBytes> tensors);

/// Where this rank's tensors lie that were asked for by name, while their memory lives. One thread at a time.
class PlacedMemory final {
 public:
  struct Place {
    std::uint64_t number = 0;  ///< Ascends through a row; see Placement. Rows are apart.
    std::span<std::byte> memory;
  };

  /// A name has its latest place.
  void add(std::span<const NamedBytes> tensors, const TensorRow& row);
  bool is_empty() const { return rows_.empty(); }
  /// Of this name, if these bytes are it. None where it has no place there, or its memory has gone.
  const Place* find(std::string_view name, std::span<const std::byte> bytes) const;
  /// Keeps the memory from `start` on, where all of these bytes are of one row; else null.
  std::shared_ptr<std::byte> keep(std::byte* start, std::uint64_t bytes) const;

 private:
  struct Row {
    std::weak_ptr<std::byte> memory;
    std::byte* start = nullptr;
    std::uint64_t bytes = 0;
  };
  struct Entry {
    Place place;
    std::weak_ptr<std::byte> memory;
  };
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
  };

  std::vector<Row> rows_;
  std::unordered_map<std::string, Entry, Hash, std::equal_to<>> places_;
  std::uint64_t next_number_ = 64;
};

}  // namespace herring::collectives
