#pragma once

#include <string>
#include <vector>

namespace herring::tcp {

/// TCP's congestion control on the connections of an endpoint. BBR measures a path flow by flow. Here many flows share
/// a link, begin and end together, and the slowest one ends the operation: cubic and reno share it better
/// (docs/adr/0030-congestion-control.md).
class CongestionControl final {
 public:
  static constexpr const char* kAuto = "auto";
  static constexpr const char* kSystem = "system";

  /// kAuto, kSystem or a name. Throws Error (kUnavailable) for a name that this process may not use, with those that it
  /// may.
  explicit CongestionControl(const std::string& wanted);

  /// Of a connection that is established. kAuto: only where the system takes BBR for it.
  void apply(int socket) const;

  /// What the connection has; empty where the system does not say.
  static std::string of(int socket);

 private:
  bool is_auto_;
  std::vector<std::string> names_;  // In order of preference. Empty: nothing changes.
};

}  // namespace herring::tcp
