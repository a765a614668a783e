#pragma once

#include <array>
#include <csignal>

/// The signal handlers of the process that Herring is a guest in.
namespace herring::efa {

/// Puts back, when it ends, what libraries that came after Herring have made of signals in the meantime: libinfinipath,
/// which Debian's libfabric 1.17 brings, takes SIGINT, SIGTERM, SIGSEGV, ... while it is loaded, and libfabric's shm
/// provider does in the first fi_getinfo of some releases. What the program, its interpreter or a library that was
/// there before sets on another thread at the same time stays.
class SignalGuard final {
 public:
  SignalGuard() noexcept;
  ~SignalGuard();
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

 private:
  struct Saved {
    struct sigaction action = {};
    bool is_known = false;  ///< Not so for the two that the C library keeps to itself.
  };

  std::array<Saved, NSIG> saved_;  ///< By signal number; 0 is unused.
};

}  // namespace herring::efa
