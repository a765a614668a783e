#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include <rdma/fi_domain.h>

#include "core/status.h"
#include "efa/library.h"
#include "memory/nic.h"

namespace herring::efa {

struct FidDeleter {
  template <class Object>
  void operator()(Object* object) const noexcept {
    if (object != nullptr) static_cast<void>(fi_close(&object->fid));
  }
};
template <class Object>
using FidPtr = std::unique_ptr<Object, FidDeleter>;

/// Do endpoints of several threads use one libfabric domain?
enum class Sharing : std::uint8_t { kOneThread, kManyThreads };

/// libfabric's fabric and domain, open: what endpoints, and the memory that they use, belong to. Closes after them all.
class Card final : public memory::Nic {
 public:
  /// Throws Error(kTransport) that names the call and the provider.
  Card(std::shared_ptr<const Library> library, const fi_info& chosen, Sharing sharing);

  std::string description() const override;
  bool takes(MemoryKind kind) const noexcept override;
  std::unique_ptr<memory::Registration> register_memory(std::span<std::byte> memory, MemoryPlace place) override;

  const Library& library() const noexcept { return *library_; }
  const fi_info& info() const noexcept { return *info_; }
  fid_fabric* fabric() const noexcept { return fabric_.get(); }
  fid_domain* domain() const noexcept { return domain_.get(); }
  /// The provider reads and writes no memory that is not registered.
  bool needs_registration() const noexcept;
  /// "fi_cq_open on tcp (lo): Invalid argument".
  [[noreturn]] void fail(const std::string& call, std::int64_t error) const;

 private:
  std::shared_ptr<const Library> library_;
  InfoPtr info_;
  FidPtr<fid_fabric> fabric_;
  FidPtr<fid_domain> domain_;
  std::atomic<std::uint64_t> next_key_{1};
};

}  // namespace herring::efa
