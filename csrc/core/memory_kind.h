#pragma once

#include <cstdint>
#include <string_view>

namespace herring {

/// What a range of memory is. Two facts follow from it: who may touch its bytes, and who has to be told about them.
enum class MemoryKind : std::uint8_t {
  kHost,    ///< This process's own.
  kShared,  ///< Mapped by other ranks of this host as well (an arena).
  kPinned,  ///< Host memory that a device copies from and to by itself. May be of an arena too.
  kDevice,  ///< A device's: an address here is a name, and reading it on the host is a fault.
};

/// The same, and of which device it is (core/device.h, DeviceId).
struct MemoryPlace {
  MemoryPlace(MemoryKind of = MemoryKind::kHost, std::uint32_t number = 0) : kind(of), device(number) {}
  MemoryKind kind;
  std::uint32_t device;  ///< Where the kind is kDevice.
};

/// The host may read and write it.
constexpr bool is_on_host(MemoryKind kind) noexcept { return kind != MemoryKind::kDevice; }

constexpr std::string_view name(MemoryKind kind) noexcept {
  switch (kind) {
    case MemoryKind::kHost:
      return "host";
    case MemoryKind::kShared:
      return "shared";
    case MemoryKind::kPinned:
      return "pinned";
    case MemoryKind::kDevice:
      return "device";
  }
  return "unknown";
}

}  // namespace herring
