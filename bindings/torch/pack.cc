#include "pack.h"

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>

#include "core/device.h"
#include "cuda/kernels/twins.h"
#include "cuda/open.h"
#include "device.h"

namespace herring::torch_binding {
namespace {

/// Of a tensor in the bucket: for the widest accesses, and for every type.
constexpr std::size_t kAlignment = 64;
/// Enough to fill a GPU; a block takes several tiles where there are more.
constexpr std::size_t kMostBlocks = 528;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Herring's kernels on one GPU, for as long as the process lives: its driver must not be asked for anything in a
/// forked child, and no copy comes there.
class Kernels final {
 public:
  /// Null where there are none for this device.
  static Kernels* of(c10::Device device) {
    if (!device.is_cuda()) return nullptr;
    static std::mutex mutex;
    static auto* const known = new std::map<c10::DeviceIndex, Kernels*>();
    const std::lock_guard lock(mutex);
    const auto [place, is_new] = known->try_emplace(device.index(), nullptr);
    if (is_new) {
      try {
        place->second = new Kernels(cuda::open_device(DeviceId{static_cast<std::uint32_t>(device.index())}));
      } catch (const Error& error) {
        TORCH_WARN("herring: ", error.what(), "; small tensors on ", device, " are copied one by one");
      }
    }
    return place->second;
  }

  /// False where the driver is too old for them.
  bool pack(const c10::Stream& stream, KernelId kernel, const cuda::PackParameters& parameters) {
    const ForeignStream native = native_stream(stream);
    const std::lock_guard lock(mutex_);
    if (!is_usable_) return false;
    const StreamHandle handle = gpu_->adopt_stream(native);
    const auto blocks = static_cast<std::uint32_t>(std::min<std::size_t>(parameters.tile_count, kMostBlocks));
    const Status status = gpu_->launch(handle, kernel, std::as_bytes(std::span(&parameters, 1)), blocks);
    if (status.code() == Code::kUnavailable) {
      TORCH_WARN("herring: ", status.message(), "; small tensors are copied one by one");
      is_usable_ = false;
      return false;
    }
    status.or_throw();
    return true;
  }

 private:
  explicit Kernels(std::unique_ptr<Device> gpu) : gpu_(std::move(gpu)) {}

  std::mutex mutex_;
  const std::unique_ptr<Device> gpu_;
  bool is_usable_ = true;
};

bool can_move(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous() && tensor.numel() > 0 &&
         tensor.nbytes() <= Pack::kMostTensorBytes && !tensor.is_neg() && !tensor.is_conj();
}

/// A tensor as another one is, in the memory of `bucket` from byte `begin` on.
at::Tensor place_in(const at::Tensor& bucket, std::size_t begin, const at::Tensor& like) {
  const auto offset = bucket.storage_offset() + static_cast<std::int64_t>(begin);
  return at::empty({0}, bucket.options().dtype(like.scalar_type()))
      .set_(bucket.storage(), offset / static_cast<std::int64_t>(like.element_size()), like.sizes(), like.strides());
}

}  // namespace

bool Pack::takes(const at::Tensor& source, const at::Tensor& target) {
  if (!can_move(source)) return false;
  if (target.is_same(source)) return true;
  return can_move(target) && target.device() == source.device() && target.scalar_type() == source.scalar_type() &&
         target.sizes() == source.sizes();
}

std::size_t Pack::add(const at::Tensor& source, const at::Tensor& target) {
  const at::Tensor read = source.detach();
  pieces_.push_back({read, target.is_same(source) ? read : target.detach(), at::Tensor(), bytes_});
  bytes_ += aligned(source.nbytes());
  return pieces_.size() - 1;
}

void Pack::lay(at::Tensor memory) {
  memory_ = std::move(memory);
  for (Piece& piece : pieces_) piece.host = place_in(memory_, piece.begin, piece.source);
}

void Pack::copy_out(const c10::Stream& stream) {
  const c10::StreamGuard on_stream(stream);
  if (pieces_.size() == 1) {
    pieces_[0].host.copy_(pieces_[0].source, true);
    return;
  }
  const at::Tensor bucket =
      at::empty({static_cast<std::int64_t>(bytes_)}, at::TensorOptions(at::kByte).device(device_));
  in_use_.push_back(bucket);
  move(Way::kToBucket, stream, bucket, 0, all());
  memory_.narrow(0, 0, bucket.numel()).copy_(bucket, true);
}

void Pack::copy_back(const c10::Stream& stream) { copy_back(stream, all()); }

void Pack::copy_back(const c10::Stream& stream, std::span<const std::size_t> indices) {
  if (indices.empty()) return;
  if (indices.size() == 1) {
    const c10::StreamGuard on_stream(stream);
    pieces_[indices[0]].target.copy_(pieces_[indices[0]].host, true);
    return;
  }
  const auto begins = [&](std::size_t index) { return pieces_[index].begin; };
  const std::size_t first = std::ranges::min(indices, {}, begins), last = std::ranges::max(indices, {}, begins);
  const std::size_t begin = pieces_[first].begin, end = pieces_[last].begin + aligned(pieces_[last].source.nbytes());
  const auto count = static_cast<std::int64_t>(end - begin);
  const c10::StreamGuard on_stream(stream);
  const at::Tensor bucket = at::empty({count}, at::TensorOptions(at::kByte).device(device_));
  in_use_.push_back(bucket);
  // What lies between them goes along, and is not looked at.
  bucket.copy_(memory_.narrow(0, static_cast<std::int64_t>(begin), count), true);
  move(Way::kFromBucket, stream, bucket, begin, indices);
}

void Pack::move(Way way, const c10::Stream& stream, const at::Tensor& bucket, std::size_t begin,
                std::span<const std::size_t> indices) {
  if (launch(way, stream, bucket, begin, indices)) return;
  for (const std::size_t index : indices) {
    const Piece& piece = pieces_[index];
    const at::Tensor place = place_in(bucket, piece.begin - begin, piece.source);
    way == Way::kToBucket ? place.copy_(piece.source, true) : piece.target.copy_(place, true);
  }
}

bool Pack::launch(Way way, const c10::Stream& stream, const at::Tensor& bucket, std::size_t begin,
                  std::span<const std::size_t> indices) {
  Kernels* const kernels = Kernels::of(device_);
  if (kernels == nullptr) return false;
  // As bytes: nothing is scaled or cast.
  std::vector<cuda::Tile> tiles;
  tiles.reserve(indices.size());
  const auto address = [](const at::Tensor& tensor) { return reinterpret_cast<std::uint64_t>(tensor.data_ptr()); };
  for (const std::size_t index : indices) {
    const Piece& piece = pieces_[index];
    const std::uint64_t place = address(bucket) + piece.begin - begin;
    const bool is_out = way == Way::kToBucket;
    cuda::cut_tiles(is_out ? address(piece.source) : place, is_out ? place : address(piece.target),
                    piece.source.nbytes(), cuda::Element::kUInt8, cuda::Element::kUInt8, tiles);
  }
  const auto bytes = static_cast<std::int64_t>(tiles.size() * sizeof(cuda::Tile));
  const at::Tensor here = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  std::memcpy(here.data_ptr(), tiles.data(), static_cast<std::size_t>(bytes));
  const at::Tensor there = at::empty({bytes}, at::TensorOptions(at::kByte).device(device_));
  in_use_.insert(in_use_.end(), {here, there});
  there.copy_(here, true);
  cuda::PackParameters parameters;
  parameters.tiles = address(there);
  parameters.tile_count = static_cast<std::uint32_t>(tiles.size());
  parameters.source_type = parameters.target_type = cuda::Element::kUInt8;
  return kernels->pack(stream, way == Way::kToBucket ? KernelId::kPack : KernelId::kUnpack, parameters);
}

std::vector<std::size_t> Pack::all() const {
  std::vector<std::size_t> indices(pieces_.size());
  std::iota(indices.begin(), indices.end(), std::size_t{0});
  return indices;
}

}  // namespace herring::torch_binding
