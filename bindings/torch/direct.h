#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "core/idle_pool.h"
#include "core/types.h"
#include "runtime/communicator.h"

namespace herring::torch_binding {

/// HERRING_GPUDIRECT and what belongs to it.
struct DirectSettings {
  enum class Mode : std::uint8_t { kOff, kAuto, kOn };
  Mode mode = Mode::kOff;
  std::uint64_t least_bytes = 0;  ///< Tensors up to this size go through the host.
};

/// Memory of GPUs that the network cards read and write: torch's, but for this alone. What the card knows is kept for
/// later tensors, as registering takes long: as much as was ever in use at once. Any thread.
class DirectMemory final : public std::enable_shared_from_this<DirectMemory> {
 public:
  /// Some of it, registered as long as this lives. By then nothing uses it.
  class Block;

  DirectMemory(std::weak_ptr<runtime::Communicator> runtime, DirectSettings settings);
  ~DirectMemory();
  DirectMemory(const DirectMemory&) = delete;
  DirectMemory& operator=(const DirectMemory&) = delete;

  /// Whether a group's all-reduce may go this way, and how. Where not: throws with HERRING_GPUDIRECT=on; else says once
  /// a group why.
  bool takes(GroupId group, const std::string& name, std::size_t bytes, runtime::DeviceMemoryUse& use);
  /// As large as `tensor`, for what the thread's current stream has by now or others submit later. Null as takes() has
  /// it: the card does not take the memory.
  std::shared_ptr<Block> take(const at::Tensor& tensor);
  /// A tensor of the same shape and type there.
  static at::Tensor like(const at::Tensor& tensor, const Block& block);

 private:
  std::unique_ptr<Block> make(std::size_t bytes, c10::Device device);
  void refuse(const std::string& who, const std::string& why) const;

  const std::weak_ptr<runtime::Communicator> runtime_;
  const DirectSettings settings_;
  IdlePool<Block> pool_;
  std::mutex mutex_;
  std::set<std::uint32_t> told_;  ///< Groups whose users know why not; guarded by mutex_.
  std::atomic<bool> is_refused_ = false;
};

class DirectMemory::Block final {
 public:
  Block(at::Tensor memory, std::shared_ptr<void> registration)
      : memory_(std::move(memory)), registration_(std::move(registration)) {}

  std::size_t bytes() const { return memory_.nbytes(); }
  c10::Device device() const { return memory_.device(); }

 private:
  friend class DirectMemory;
  const at::Tensor memory_;  // First: goes last.
  const std::shared_ptr<void> registration_;
};

}  // namespace herring::torch_binding
