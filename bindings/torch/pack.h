#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <span>
#include <vector>

namespace herring::torch_binding {

/// Device tensors that move as one: a kernel puts them next to each other into a bucket on the device, and one copy
/// takes that to the host, or back. A copy for each small tensor takes the time of its start. Where there are no
/// kernels (csrc/cuda/kernels; a plug-in's device) torch copies them into the bucket, one after the other.
class Pack final {
 public:
  /// Past this the bucket costs more than it saves.
  static constexpr std::size_t kMostTensorBytes = 1 << 20;
  static constexpr std::size_t kMostBytes = 32 << 20;

  explicit Pack(c10::Device device) : device_(device) {}

  /// Both are on one device, of one type and shape, dense, contiguous, small, not empty.
  static bool takes(const at::Tensor& source, const at::Tensor& target);
  /// A pack has at most kMostBytes of tensors.
  bool has_room(const at::Tensor& tensor) const { return bytes_ + tensor.nbytes() <= kMostBytes; }
  /// What `source` holds is to be read, and what comes of it to be written to `target`. Its index.
  std::size_t add(const at::Tensor& source, const at::Tensor& target);
  std::size_t size() const { return pieces_.size(); }
  /// Of host memory that all of them need.
  std::size_t bytes() const { return bytes_; }

  /// Bytes, at least so many: from here on the host tensors are there, and none is added.
  void lay(at::Tensor memory);
  const at::Tensor& host(std::size_t index) const { return pieces_[index].host; }

  /// Puts what moves them on this stream: from the sources to the host, and from the host to these targets. Host
  /// memory, and this, are in use until that is done.
  void copy_out(const c10::Stream& stream);
  void copy_back(const c10::Stream& stream, std::span<const std::size_t> indices);
  void copy_back(const c10::Stream& stream);

 private:
  struct Piece {
    at::Tensor source;
    at::Tensor target;
    at::Tensor host;
    std::size_t begin = 0;
  };
  enum class Way { kToBucket, kFromBucket };

  /// Between tensors and the bucket, whose first byte stands for `begin` of the host's.
  void move(Way way, const c10::Stream& stream, const at::Tensor& bucket, std::size_t begin,
            std::span<const std::size_t> indices);
  bool launch(Way way, const c10::Stream& stream, const at::Tensor& bucket, std::size_t begin,
              std::span<const std::size_t> indices);
  std::vector<std::size_t> all() const;

  const c10::Device device_;
  std::vector<Piece> pieces_;
  std::size_t bytes_ = 0;
  at::Tensor memory_;
  std::vector<at::Tensor> in_use_;  ///< Buckets and tables, until all copies are done.
};

}  // namespace herring::torch_binding
