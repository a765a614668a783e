#include "collectives/rows.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace herring::collectives {

std::size_t RowsSpec::row_bytes() const {
  return std::accumulate(shape.begin() + 1, shape.end(), element_bytes(dtype),
                         [](std::size_t bytes, std::int64_t size) { return bytes * static_cast<std::size_t>(size); });
}

std::vector<std::int64_t> checked_splits(std::optional<std::span<const std::int64_t>> splits, std::int64_t rows,
                                         std::uint32_t size) {
  if (!splits) {
    if (rows % size == 0) return std::vector<std::int64_t>(size, rows / size);
    throw Error(Code::kInvalidArgument, "alltoall without splits: " + std::to_string(rows) +
                                            " rows cannot be divided equally among " + std::to_string(size) +
                                            " ranks; pass splits");
  }
  std::int64_t left = rows;
  for (const std::int64_t each : *splits)
    left = each < 0 || each > left ? -1 : left - each;  // Their sum may be too large for a number.
  if (splits->size() == size && left >= 0) return {splits->begin(), splits->end()};
  std::string text;
  for (const std::int64_t each : *splits) text += (text.empty() ? "" : ", ") + std::to_string(each);
  throw Error(Code::kInvalidArgument, "alltoall: splits are [" + text + "]; there must be " + std::to_string(size) +
                                          ", none negative, with a sum of at most " + std::to_string(rows) + " rows");
}

void check_dims(std::size_t dims) {
  if (dims > 0 && dims <= RowTable::kMaxDims) return;
  throw Error(Code::kInvalidArgument, "the array has " + std::to_string(dims) + " dimensions; at most " +
                                          std::to_string(RowTable::kMaxDims) + " are supported");
}

std::pair<std::int64_t, std::int64_t> rows_of(std::int64_t rows, std::uint32_t size, std::uint32_t index) {
  const std::int64_t each = rows / size;
  const std::int64_t more = rows % size;
  const std::int64_t first = index * each + std::min<std::int64_t>(index, more);
  return {first, first + each + (index < more ? 1 : 0)};
}

RowTable::RowTable(std::span<const RowsSpec> tensors, std::span<const std::int64_t> splits, std::uint32_t members)
    : width_(kSplits + splits.size()), mine_(tensors.size() * width_), all_(mine_.size() * members) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::vector<std::int64_t>& shape = tensors[i].shape;
    check_dims(shape.size());
    const auto row = std::span(mine_).subspan(i * width_, width_);
    row[0] = static_cast<std::int64_t>(tensors[i].dtype);
    row[1] = static_cast<std::int64_t>(shape.size());
    std::ranges::copy(shape, row.begin() + kFirstDim);
    std::ranges::copy(splits, row.begin() + kSplits);
  }
}

std::span<const std::int64_t> RowTable::row(std::size_t tensor, std::size_t member) const {
  return std::span(all_).subspan(member * mine_.size() + tensor * width_, width_);
}

bool RowTable::are_alike(std::size_t tensor, std::size_t member) const {
  const auto first = row(tensor, 0), other = row(tensor, member);
  return std::ranges::equal(first.first(kFirstDim), other.first(kFirstDim)) &&
         std::ranges::equal(first.subspan(kFirstDim + 1, kMaxDims - 1), other.subspan(kFirstDim + 1, kMaxDims - 1));
}

std::string RowTable::text(std::size_t tensor, std::size_t member) const {
  const auto told = row(tensor, member);
  std::string text(name(static_cast<DataType>(told[0])));
  for (std::size_t i = 0; i < static_cast<std::size_t>(told[1]); ++i) {
    text += (i == 0 ? "[" : ", ") + std::to_string(told[kFirstDim + i]);
  }
  return text + "]";
}

Status RowTable::check(std::span<const std::uint32_t> ranks) const {
  for (std::size_t tensor = 0; tensor * width_ < mine_.size(); ++tensor) {
    std::string odd;
    for (std::size_t member = 1; member < ranks.size(); ++member) {
      if (!are_alike(tensor, member)) odd += ", rank " + std::to_string(ranks[member]) + ": " + text(tensor, member);
    }
    if (odd.empty()) continue;
    return {Code::kMismatch, "ranks disagree, and only the first dimension may differ: rank " +
                                 std::to_string(ranks[0]) + ": " + text(tensor, 0) + odd};
  }
  return Status::ok();
}

}  // namespace herring::collectives
