#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include "core/idle_pool.h"
#include "runtime/communicator.h"

namespace herring::torch_binding {

/// Host memory for tensors of accelerators: of the runtime's arena, where the ranks of a host read each other's without
/// a copy, and pinned, so that copies from and to the device go at full speed. Neither can be had on the way of an
/// operation without waiting (for the system, for the device), so what was used is kept for later tensors: as much as
/// was ever in use at once. Any thread.
class HostMemory final : public std::enable_shared_from_this<HostMemory> {
 public:
  /// Smaller tensors are not worth pages of their own.
  static constexpr std::size_t kLeastBytes = 64 << 10;

  explicit HostMemory(std::weak_ptr<runtime::Communicator> runtime);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  /// So many bytes at least, back here when the last owner goes: by then no copy may use them. Null where there are
  /// none: less than kLeastBytes are asked for, the arena is used up, or the system pins no more.
  std::shared_ptr<std::byte> take(std::size_t bytes, c10::Device device);

 private:
  struct Pages;
  class Pinner;

  std::unique_ptr<Pages> make(std::size_t bytes, c10::Device device);
  /// The one of the process, made for the first device that asks. Throws Error.
  std::shared_ptr<Pinner> pinner_of(c10::Device device);

  const std::weak_ptr<runtime::Communicator> runtime_;
  IdlePool<Pages> pool_;
  std::mutex mutex_;
  std::shared_ptr<Pinner> pinner_;        // guarded by mutex_
  std::atomic<bool> is_refused_ = false;  ///< The system pins no more.
};

}  // namespace herring::torch_binding
