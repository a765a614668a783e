#include "efa/card.h"

#include <utility>

#include "core/descriptors.h"
#include "efa/devices.h"
#include "efa/signals.h"

namespace herring::efa {
namespace {

class Region final : public memory::Registration {
 public:
  explicit Region(fid_mr* region) : region_(region) {}
  void* descriptor() const noexcept override { return fi_mr_desc(region_.get()); }

 private:
  FidPtr<fid_mr> region_;
};

}  // namespace

Card::Card(std::shared_ptr<const Library> library, const fi_info& chosen, Sharing sharing)
    : library_(std::move(library)), info_(library_->duplicate(&chosen)) {
  const SignalGuard guard;
  if (sharing == Sharing::kManyThreads) info_->domain_attr->threading = FI_THREAD_SAFE;
  fid_fabric* fabric = nullptr;
  if (const int result = library_->open_fabric(info_->fabric_attr, &fabric)) fail("fi_fabric", result);
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  if (const int result = fi_domain(fabric, info_.get(), &domain, nullptr)) fail("fi_domain", result);
  domain_.reset(domain);
}

std::string Card::description() const {
  return std::string(info_->fabric_attr->prov_name) + " (" + info_->domain_attr->name + ")";
}

bool Card::needs_registration() const noexcept { return (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0; }

bool Card::takes(MemoryKind kind) const noexcept { return is_on_host(kind) || takes_devices(*info_); }

std::unique_ptr<memory::Registration> Card::register_memory(std::span<std::byte> memory, MemoryPlace place) {
  fid_mr* region = nullptr;
  if (!is_on_host(place.kind)) {
    const int result = register_device(domain_.get(), memory, place.device, next_key_++, &region);
    if (result != 0) {
      fail("fi_mr_regattr of " + std::to_string(memory.size()) + " bytes of GPU " + std::to_string(place.device) +
               " (is the kernel module nvidia_peermem loaded, or does the kernel export GPU memory as DMA-BUF?)",
           result);
    }
    return std::make_unique<Region>(region);
  }
  const int result =
      fi_mr_reg(domain_.get(), memory.data(), memory.size(), FI_SEND | FI_RECV, 0, next_key_++, 0, &region, nullptr);
  if (result != 0) {
    fail("fi_mr_reg of " + std::to_string(memory.size()) + " bytes (is `ulimit -l` large enough?)", result);
  }
  return std::make_unique<Region>(region);
}

void Card::fail(const std::string& call, std::int64_t error) const {
  throw Error(Code::kTransport, call + " on " + description() + ": " + library_->error_text(error) + descriptor_hint());
}

}  // namespace herring::efa
