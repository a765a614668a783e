#pragma once

#include <cstdint>
#include <string>

/// File descriptors of this process: with tcp each connection is one.
namespace herring {

/// So many may be open beside those that Herring counts: of the framework, the script and the launcher.
inline constexpr std::uint64_t kOtherDescriptors = 512;

/// Descriptors that one part of the process has open as long as this object is there: `least` for certain, `most` at
/// most. 1024 is a common soft limit: it is raised to what all parts need together, as far as the hard limit allows.
/// Any thread may use it.
class DescriptorClaim final {
 public:
  DescriptorClaim() = default;
  /// Throws Error(kUnavailable) where `least` more cannot be open; the text says that `what` needs them.
  DescriptorClaim(const std::string& what, std::uint64_t least, std::uint64_t most);
  ~DescriptorClaim();
  DescriptorClaim(DescriptorClaim&& other) noexcept;
  DescriptorClaim& operator=(DescriptorClaim&& other) noexcept;

 private:
  std::uint64_t count_ = 0;
};

/// Where this process has (almost) no descriptor left: ". It has 1020 of 1024 file descriptors open: raise the limit
/// (ulimit -n)"; else empty. For errors of libraries that hide the reason.
std::string descriptor_hint();

}  // namespace herring
