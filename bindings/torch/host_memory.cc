#include "host_memory.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <span>
#include <utility>

#include "core/device.h"
#include "cuda/open.h"

namespace herring::torch_binding {
/// One GPU's context pins for all of them.
class HostMemory::Pinner final {
 public:
  explicit Pinner(DeviceId id) : gpu_(cuda::open_device(id)), pid_(getpid()) {}
  ~Pinner() {
    if (getpid() != pid_) static_cast<void>(gpu_.release());  // The driver does not work in a forked child.
  }
  Pinner(const Pinner&) = delete;
  Pinner& operator=(const Pinner&) = delete;

  Status pin(std::span<std::byte> memory) {
    const std::lock_guard lock(mutex_);
    return gpu_->pin(memory);
  }
  void unpin(std::span<std::byte> memory) {
    if (getpid() != pid_) return;
    const std::lock_guard lock(mutex_);
    static_cast<void>(gpu_->unpin(memory));  // Where the driver has gone, nothing is pinned any more.
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<Device> gpu_;  // guarded by mutex_
  const pid_t pid_;
};

struct HostMemory::Pages {
  Pages(std::shared_ptr<std::byte> pages, std::size_t of_bytes) : memory(std::move(pages)), size(of_bytes) {}
  ~Pages() {
    // First: pages that a device may write to are nobody else's.
    if (pinner) pinner->unpin({memory.get(), size});
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  const std::shared_ptr<std::byte> memory;
  const std::size_t size;
  std::size_t bytes() const { return size; }
  std::shared_ptr<Pinner> pinner;  ///< Null: not pinned.
};

HostMemory::HostMemory(std::weak_ptr<runtime::Communicator> runtime) : runtime_(std::move(runtime)) {}

HostMemory::~HostMemory() = default;

std::shared_ptr<std::byte> HostMemory::take(std::size_t bytes, c10::Device device) {
  if (bytes < kLeastBytes) return nullptr;
  std::unique_ptr<Pages> pages = pool_.find(bytes, [](const Pages&) { return true; });
  if (!pages) pages = make(pooled_bytes(bytes), device);
  while (!pages && !is_refused_) {
    // The arena is used up, perhaps by sizes that nobody asks for any more.
    if (!pool_.oldest()) return nullptr;
    pages = make(pooled_bytes(bytes), device);
  }
  if (!pages) return nullptr;
  pool_.lend(*pages);
  std::byte* const start = pages->memory.get();
  return {start, [home = weak_from_this(), held = pages.release()](std::byte*) {
            std::unique_ptr<Pages> back(held);
            if (const auto self = home.lock()) self->pool_.give_back(std::move(back));
          }};
}

std::unique_ptr<HostMemory::Pages> HostMemory::make(std::size_t bytes, c10::Device device) {
  if (is_refused_) return nullptr;
  std::shared_ptr<std::byte> memory;
  try {
    if (const auto runtime = runtime_.lock()) memory = runtime->allocate(bytes);
  } catch (const Error&) {
    // Shut down: the operation will say so.
  }
  if (!memory) return nullptr;
  auto pages = std::make_unique<Pages>(std::move(memory), bytes);
  if (!device.is_cuda()) return pages;  // Plug-ins have no way to say it.
  try {
    const std::shared_ptr<Pinner> pinner = pinner_of(device);
    pinner->pin({pages->memory.get(), bytes}).or_throw();
    pages->pinner = pinner;
    return pages;
  } catch (const std::exception& error) {
    is_refused_ = true;
    TORCH_WARN("herring: ", error.what(), "; torch's pinned memory is used, which is copied once more");
    return nullptr;
  }
}

std::shared_ptr<HostMemory::Pinner> HostMemory::pinner_of(c10::Device device) {
  const std::lock_guard lock(mutex_);
  if (!pinner_) pinner_ = std::make_shared<Pinner>(DeviceId{static_cast<std::uint32_t>(device.index())});
  return pinner_;
}

}  // namespace herring::torch_binding
