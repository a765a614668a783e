#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/status.h"

/// The balanced fusion buffer: many tensors in one bucket, so that they are reduced by one operation whose shards are
/// large and of equal size on every server. CPU memory; a CUDA twin of pack/unpack belongs beside this file.
namespace herring {

/// Where one tensor lies in a bucket, in bytes.
struct TensorSlice {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const TensorSlice&, const TensorSlice&) = default;
};

/// One bucket of a layout: tensors [first_tensor, first_tensor + tensor_count).
struct Bucket {
  std::uint32_t first_tensor = 0;
  std::uint32_t tensor_count = 0;
  std::uint64_t bytes = 0;  ///< End of its last tensor.
  friend bool operator==(const Bucket&, const Bucket&) = default;
};

struct BucketLayout {
  std::vector<Bucket> buckets;
  std::vector<TensorSlice> slices;  ///< One a tensor, in the order given; offsets are inside the tensor's bucket.

  /// Slices of one bucket, ascending by offset.
  std::span<const TensorSlice> slices_of(const Bucket& bucket) const {
    return std::span(slices).subspan(bucket.first_tensor, bucket.tensor_count);
  }
  friend bool operator==(const BucketLayout&, const BucketLayout&) = default;
};

/// Pure, the same on every process: consecutive tensors share a bucket while it stays within bucket_cap_bytes (the
/// first bucket: first_bucket_cap_bytes; 0: no cap of its own). Every slice starts at a multiple of alignment. A tensor
/// larger than the cap gets a bucket of its own. No tensors: no buckets. Throws Error(kInvalidArgument) for an
/// alignment of 0, a cap of 0, or sizes that overflow.
BucketLayout plan_buckets(std::span<const std::uint64_t> tensor_bytes, std::uint64_t bucket_cap_bytes,
                          std::uint64_t first_bucket_cap_bytes, std::uint64_t alignment);

/// In parts of what size an operation crosses the network with this many lanes: part_bytes, or more where shards of an
/// evenly cut part would fall below min_shard_bytes.
std::uint64_t balanced_part_bytes(std::uint64_t part_bytes, std::uint32_t lanes, std::uint64_t min_shard_bytes);

/// Copies tensors[i] to slices[i] of the bucket and zeroes the gaps between slices (they cross the network too). Slices
/// ascend and do not overlap. Throws Error(kInvalidArgument) naming the first tensor whose size or place does not fit.
void pack(std::span<const std::span<const std::byte>> tensors, std::span<const TensorSlice> slices,
          std::span<std::byte> bucket);
/// Copies slices[i] of the bucket to tensors[i]. Throws as pack().
void unpack(std::span<const std::byte> bucket, std::span<const TensorSlice> slices,
            std::span<const std::span<std::byte>> tensors);

/// One reservation of a FusionBuffer. Plain value; `memory` is valid until the buffer's reset().
struct FusionSlice {
  std::uint32_t index = 0;       ///< In order of reservation.
  std::uint32_t generation = 0;  ///< Which fill of the buffer it belongs to.
  std::span<std::byte> memory;
};

/// One bucket being filled: reserve slices, mark each ready when its gradient is in, seal; when sealed and all ready,
/// contents() may be reduced; reset() starts the next fill. Owned by one thread; borrows its memory (registered or
/// shared memory of the runtime) for its whole life. Never allocates memory for tensors.
class FusionBuffer final {
 public:
  /// Throws Error(kInvalidArgument) where alignment is no power of two or the memory does not start on it.
  explicit FusionBuffer(std::span<std::byte> memory, std::size_t alignment = 64);

  /// An aligned slice; nothing where the rest of the buffer is too small (seal, reduce, reset, try again) or it is
  /// sealed. A tensor larger than capacity_bytes() never fits.
  [[nodiscard]] std::optional<FusionSlice> reserve(std::size_t bytes);
  /// The slice holds its data. kInvalidArgument for a slice of an earlier fill or one that is ready already.
  Status mark_ready(const FusionSlice& slice);
  /// No more reservations until reset(). Again: no effect.
  void seal() noexcept { sealed_ = true; }
  /// Forgets all slices; those handed out before are refused from now on.
  void reset() noexcept;

  bool is_sealed() const noexcept { return sealed_; }
  bool all_ready() const noexcept { return pending_ == 0; }
  /// Sealed and all ready.
  bool is_complete() const noexcept { return sealed_ && pending_ == 0; }
  /// From the first slice to the end of the last; gaps between slices are zero.
  std::span<std::byte> contents() const noexcept { return memory_.first(used_); }
  std::size_t capacity_bytes() const noexcept { return memory_.size(); }
  std::size_t slice_count() const noexcept { return ready_.size(); }

 private:
  std::span<std::byte> memory_;
  std::size_t alignment_;
  std::size_t used_ = 0;
  std::size_t pending_ = 0;  // Reserved and not ready.
  std::vector<bool> ready_;  // By slice index.
  std::uint32_t generation_ = 0;
  bool sealed_ = false;
};

}  // namespace herring
