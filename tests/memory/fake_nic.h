#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "memory/nic.h"

namespace herring::memory {

/// Counts what is registered with it. A descriptor is the registration's own address.
class FakeNic final : public Nic {
 public:
  explicit FakeNic(bool takes_devices = false) : takes_devices_(takes_devices) {}

  std::string description() const override { return "fake"; }
  bool takes(MemoryKind kind) const noexcept override { return is_on_host(kind) || takes_devices_; }
  std::unique_ptr<Registration> register_memory(std::span<std::byte> memory, MemoryPlace place) override {
    if (on_register) on_register(memory, place.kind);
    ++registered;
    ++live;
    return std::make_unique<Region>(*this);
  }

  std::function<void(std::span<std::byte>, MemoryKind)> on_register;
  std::function<void()> on_release;
  std::atomic<int> registered{0};  ///< Ever.
  std::atomic<int> live{0};

 private:
  struct Region final : Registration {
    explicit Region(FakeNic& of) : nic(of) {}
    ~Region() override {
      --nic.live;
      if (nic.on_release) nic.on_release();
    }
    void* descriptor() const noexcept override { return const_cast<Region*>(this); }
    FakeNic& nic;
  };

  const bool takes_devices_;
};

}  // namespace herring::memory
