#include "fusion_buffer/fusion_buffer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string>

#include "fusion_buffer/refuse.h"

namespace herring {
namespace {

/// Next multiple of alignment, or nothing where that overflows.
std::optional<std::uint64_t> align_up(std::uint64_t value, std::uint64_t alignment) {
  const std::uint64_t over = value % alignment;
  if (over == 0) return value;
  const std::uint64_t missing = alignment - over;
  if (value > std::numeric_limits<std::uint64_t>::max() - missing) return std::nullopt;
  return value + missing;
}

/// memcpy(null, null, 0) is undefined; empty tensors come with null data.
void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

/// Throws unless tensor i fits slice i, and the slices ascend inside the bucket.
template <class Tensor>
void check_slices(std::span<const Tensor> tensors, std::span<const TensorSlice> slices, std::size_t bucket_bytes) {
  if (tensors.size() != slices.size()) {
    refuse("fusion buffer: " + std::to_string(tensors.size()) + " tensors for " + std::to_string(slices.size()) +
           " slices");
  }
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const TensorSlice& slice = slices[i];
    if (tensors[i].size() != slice.bytes) {
      refuse("fusion buffer: tensor " + std::to_string(i) + " has " + std::to_string(tensors[i].size()) +
             " bytes, its slice " + std::to_string(slice.bytes));
    }
    if (slice.offset < end || slice.offset > bucket_bytes || slice.bytes > bucket_bytes - slice.offset) {
      refuse("fusion buffer: the slice of tensor " + std::to_string(i) + " (" + std::to_string(slice.bytes) +
             " bytes at " + std::to_string(slice.offset) + ") overlaps the one before it or leaves the bucket of " +
             std::to_string(bucket_bytes) + " bytes");
    }
    end = slice.offset + slice.bytes;
  }
}

}  // namespace

BucketLayout plan_buckets(std::span<const std::uint64_t> tensor_bytes, std::uint64_t bucket_cap_bytes,
                          std::uint64_t first_bucket_cap_bytes, std::uint64_t alignment) {
  if (alignment == 0) refuse("bucket plan: an alignment of 0 bytes; use 1 for none");
  if (bucket_cap_bytes == 0) refuse("bucket plan: buckets of 0 bytes");
  if (tensor_bytes.size() > std::numeric_limits<std::uint32_t>::max()) refuse("bucket plan: too many tensors");
  BucketLayout layout;
  layout.slices.reserve(tensor_bytes.size());
  for (std::size_t i = 0; i < tensor_bytes.size(); ++i) {
    const std::uint64_t bytes = tensor_bytes[i];
    const bool is_first = layout.buckets.size() <= 1 && first_bucket_cap_bytes > 0;
    const std::uint64_t cap = is_first ? first_bucket_cap_bytes : bucket_cap_bytes;
    std::optional<std::uint64_t> offset;
    if (!layout.buckets.empty()) {
      offset = align_up(layout.buckets.back().bytes, alignment);
      // Subtractions only: sizes come from outside and sums of them may overflow.
      if (offset && (*offset > cap || bytes > cap - *offset)) offset.reset();
    }
    if (!offset) {
      layout.buckets.push_back({.first_tensor = static_cast<std::uint32_t>(i)});
      offset = 0;
    }
    Bucket& bucket = layout.buckets.back();
    layout.slices.push_back({*offset, bytes});
    bucket.bytes = *offset + bytes;
    ++bucket.tensor_count;
  }
  return layout;
}

std::uint64_t balanced_part_bytes(std::uint64_t part_bytes, std::uint32_t lanes, std::uint64_t min_shard_bytes) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  if (lanes > 0 && min_shard_bytes > kMost / lanes) return kMost;
  return std::max(part_bytes, lanes * min_shard_bytes);
}

void pack(std::span<const std::span<const std::byte>> tensors, std::span<const TensorSlice> slices,
          std::span<std::byte> bucket) {
  check_slices(tensors, slices, bucket.size());
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    std::ranges::fill(bucket.subspan(end, slices[i].offset - end), std::byte{0});
    copy(bucket.data() + slices[i].offset, tensors[i].data(), slices[i].bytes);
    end = slices[i].offset + slices[i].bytes;
  }
}

void unpack(std::span<const std::byte> bucket, std::span<const TensorSlice> slices,
            std::span<const std::span<std::byte>> tensors) {
  check_slices(tensors, slices, bucket.size());
  for (std::size_t i = 0; i < slices.size(); ++i) {
    copy(tensors[i].data(), bucket.data() + slices[i].offset, slices[i].bytes);
  }
}

FusionBuffer::FusionBuffer(std::span<std::byte> memory, std::size_t alignment)
    : memory_(memory), alignment_(alignment) {
  if (!std::has_single_bit(alignment)) {
    refuse("fusion buffer: an alignment of " + std::to_string(alignment) + " bytes; it must be a power of two");
  }
  if (std::bit_cast<std::uintptr_t>(memory.data()) % alignment != 0) {
    refuse("fusion buffer: its memory does not start at a multiple of " + std::to_string(alignment) + " bytes");
  }
}

std::optional<FusionSlice> FusionBuffer::reserve(std::size_t bytes) {
  if (sealed_) return std::nullopt;
  const std::optional<std::uint64_t> begin = align_up(used_, alignment_);
  if (!begin || *begin > memory_.size() || bytes > memory_.size() - *begin) return std::nullopt;
  // What was there before this fill must not reach the network or make a NaN.
  std::ranges::fill(memory_.subspan(used_, *begin - used_), std::byte{0});
  used_ = *begin + bytes;
  ready_.push_back(false);
  ++pending_;
  return FusionSlice{static_cast<std::uint32_t>(ready_.size() - 1), generation_, memory_.subspan(*begin, bytes)};
}

Status FusionBuffer::mark_ready(const FusionSlice& slice) {
  if (slice.generation != generation_ || slice.index >= ready_.size()) {
    return {Code::kInvalidArgument, "fusion buffer: slice " + std::to_string(slice.index) + " belongs to fill " +
                                        std::to_string(slice.generation) + ", the buffer is at fill " +
                                        std::to_string(generation_) + " with " + std::to_string(ready_.size()) +
                                        " slices; reserve it again after reset()"};
  }
  if (ready_[slice.index]) {
    return {Code::kInvalidArgument, "fusion buffer: slice " + std::to_string(slice.index) + " (" +
                                        std::to_string(slice.memory.size()) +
                                        " bytes) is ready already; its gradient came twice"};
  }
  ready_[slice.index] = true;
  --pending_;
  return Status::ok();
}

void FusionBuffer::reset() noexcept {
  used_ = 0;
  pending_ = 0;
  ready_.clear();
  ++generation_;
  sealed_ = false;
}

}  // namespace herring
