#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "core/types.h"

/// Tensors of which ranks have different numbers of rows: what they tell each other of them, and who gets which.
namespace herring::collectives {

/// A tensor as ranks tell each other of it: shape[0] counts its rows.
struct RowsSpec {
  DataType dtype = DataType::kFloat32;
  std::vector<std::int64_t> shape;
  std::size_t row_bytes() const;
};

/// How many of `rows` go to each of `size` ranks: as `splits` says, else equally many. Throws Error(kInvalidArgument).
std::vector<std::int64_t> checked_splits(std::optional<std::span<const std::int64_t>> splits, std::int64_t rows,
                                         std::uint32_t size);

/// Throws Error(kInvalidArgument) for dimensions that cannot be told: none, or too many.
void check_dims(std::size_t dims);

/// The first row of member `index` where `size` members share them, and the one after its last: as many for each, one
/// more for the first ones where they do not come out even.
std::pair<std::int64_t, std::int64_t> rows_of(std::int64_t rows, std::uint32_t size, std::uint32_t index);

/// The numbers that each rank tells all others of its tensors, in one all-gather: tensor by tensor the dtype, the
/// dimensions, and how many rows go to whom where it is an all-to-all.
class RowTable final {
 public:
  static constexpr std::size_t kMaxDims = 12;

  /// As check_dims(). `splits`: of the one tensor.
  RowTable(std::span<const RowsSpec> tensors, std::span<const std::int64_t> splits, std::uint32_t members);

  std::span<const std::int64_t> mine() const { return mine_; }
  std::span<std::int64_t> all() { return all_; }  ///< Each member's numbers, in order.
  std::size_t width() const { return width_; }    ///< Numbers of each tensor.

  // Once all of them are there; the same on every rank:

  /// What is wrong where more than the first dimension differs: ranks[i] is what people call member i.
  Status check(std::span<const std::uint32_t> ranks) const;
  /// How many rows member `from` has of the tensor, or sends to `to`.
  std::int64_t rows(std::size_t tensor, std::size_t from) const { return row(tensor, from)[kFirstDim]; }
  std::int64_t rows_to(std::size_t from, std::size_t to) const { return row(0, from)[kSplits + to]; }

 private:
  static constexpr std::size_t kFirstDim = 2;  // After the dtype and the number of dimensions.
  static constexpr std::size_t kSplits = kFirstDim + kMaxDims;

  std::span<const std::int64_t> row(std::size_t tensor, std::size_t member) const;
  bool are_alike(std::size_t tensor, std::size_t member) const;  // As member 0's, but for the rows.
  std::string text(std::size_t tensor, std::size_t member) const;

  const std::size_t width_;
  std::vector<std::int64_t> mine_;
  std::vector<std::int64_t> all_;
};

}  // namespace herring::collectives
